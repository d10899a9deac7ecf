"""Tables split by rows over two ps tasks, trained by workers in other processes."""

import keras
import numpy as np
import psutil
import pytest
import tensorflow as tf

import tf_dsgd
from tests import faults, helpers

WIDTH = 16


def model(strategy, rows):
    with strategy.scope():
        ids = keras.Input((2,), dtype="int32")
        table = keras.layers.Embedding(rows, WIDTH, "zeros", name="table")
        built = keras.Model(ids, keras.ops.sum(table(ids), axis=1))
        # Constant gradients: a descent of rate 1 adds 1 / 8 to each row that an example names.
        built.compile(keras.optimizers.SGD(1.0), lambda _, y: -keras.ops.sum(y, axis=-1))
    return built


def numbers(rows, examples=256):
    return np.random.default_rng(0).integers(0, rows, (examples, 2)).astype("int32")


def test_every_row_on_every_shard_counts_what_named_it():
    rows = 101
    for periods in ((1, 1), (3, 3), (1, 4)):
        strategy = tf_dsgd.DownpourStrategy(
            push_every=periods[0], fetch_every=periods[1], placement={"table/.*": tf_dsgd.Rows()}
        )
        built = model(strategy, rows)
        ids = numbers(rows)
        built.fit(ids, ids, batch_size=8, epochs=2, verbose=0)
        named = np.bincount(ids.ravel(), minlength=rows)
        want = np.repeat(2.0 * named[:, None] / 8, WIDTH, axis=1)
        np.testing.assert_array_equal(built.get_weights()[0], want)
        parts = built.layers[1].embeddings.value.parts
        for s, part in enumerate(parts):
            assert f"task:{s}" in part.primary.device
            np.testing.assert_array_equal(part.primary.numpy(), want[s::2])
        helpers.assert_ledger_balances(strategy)


@pytest.mark.parametrize("pipelines", [False, True])
def test_a_round_reads_its_rows_before_its_first_step(pipelines):
    """No step has an operation on a ps; and each row counts what named it, in short rounds, too."""
    rows = 101
    strategy = tf_dsgd.DownpourStrategy(
        push_every=3, fetch_every=3, placement={"table/.*": tf_dsgd.Rows()}
    )
    built = model(strategy, rows)
    given = {"x": numbers(rows), "y": numbers(rows), "batch_size": 8}
    if pipelines:

        def dataset_fn(context):
            ids = tf.random.stateless_uniform((128, 2), [context.input_pipeline_id, 1], 0, rows)
            ids = tf.cast(ids, tf.int32)
            return tf.data.Dataset.from_tensor_slices((ids, ids)).batch(8)

        given = {"x": strategy.distribute_datasets_from_function(dataset_fn)}
    built.fit(**given, epochs=2, shuffle=not pipelines, verbose=0)
    assert strategy.steps == 64
    # Each example names two rows, and adds an eighth to each.
    np.testing.assert_array_equal(built.get_weights()[0].sum(0), np.full(WIDTH, 2 * 256 * 2 / 8))
    (program,) = strategy.batches.programs
    step = program.program.step.function.graph
    assert not [op.name for op in step.get_operations() if "job:ps" in op.device]
    helpers.assert_ledger_balances(strategy)


class Shifted(keras.layers.Layer):
    """Adds a weight, of which each mini-batch's gradient is -1 as well."""

    def build(self, shape):
        self.shift = self.add_weight(shape=shape[-1:], initializer="zeros", name="shift")

    def call(self, x):
        return x + self.shift


@pytest.mark.parametrize(("every", "policy"), [(1, "average"), (3, "local")])
def test_every_row_counts_what_named_it_while_all_else_is_averaged(every, policy):
    """A row has all gradients that named it; the weight the mean of two workers' 64 steps."""
    rows = 101
    strategy = tf_dsgd.PeriodicAveragingStrategy(
        average_every=every, optimizer_state=policy, placement={"table/.*": tf_dsgd.Rows()}
    )
    with strategy.scope():
        small = model(strategy, rows)
        built = keras.Model(small.input, Shifted()(small.output))
        built.compile(keras.optimizers.SGD(1.0), lambda _, y: -keras.ops.sum(y, axis=-1))
    ids = numbers(rows)
    built.fit(ids, ids, batch_size=8, epochs=2, verbose=0)
    named = np.bincount(ids.ravel(), minlength=rows)
    table, shift = built.get_weights()
    np.testing.assert_array_equal(table, np.repeat(2.0 * named[:, None] / 8, WIDTH, axis=1))
    helpers.assert_ledger_balances(strategy, strategy.updates)
    assert strategy.steps == 64
    if every == 1:  # each round has one mini-batch of each worker
        assert strategy.updates == 32
        np.testing.assert_array_equal(shift, np.full(WIDTH, 32.0))
    assert int(built.optimizer.iterations) == 32


def resident(processes):
    return [process.memory_info().rss / 1e6 for process in processes]


def test_neither_workers_nor_the_chief_have_the_table():
    """256 MB of it; 128 MB more on each ps, at least."""
    rows = 4_000_000
    small = model(tf_dsgd.DownpourStrategy(placement={"table/.*": tf_dsgd.Rows()}), 100)
    ids = numbers(100)
    small.fit(ids, ids, batch_size=8, verbose=0)
    without = [psutil.Process(), *(faults.task("worker", m) for m in (0, 1))]
    before = resident(without)
    strategy = tf_dsgd.DownpourStrategy(placement={"table/.*": tf_dsgd.Rows()})
    large = model(strategy, rows)
    ids = numbers(rows)
    large.fit(ids, ids, batch_size=8, verbose=0)
    grown = [now - then for now, then in zip(resident(without), before, strict=True)]
    assert max(grown) < 100, grown
    sizes = [shard.bytes / 1e6 for shard in strategy.shards()]
    assert min(sizes) > 127, sizes
    some = large.layers[1].embeddings.value.primary
    named = np.bincount(ids.ravel(), minlength=rows)
    first = some.parts[0].sparse_read(np.unique(ids[ids % 2 == 0]) // 2).numpy()[:, 0]
    np.testing.assert_array_equal(first, named[np.unique(ids[ids % 2 == 0])] / 8)
