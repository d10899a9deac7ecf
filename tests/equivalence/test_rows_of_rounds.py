"""Rows that a worker reads once for all mini-batches of a round, as on a cluster: on threads."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_dsgd
from tests.equivalence import test_tables, twin
from tests.equivalence.test_tables import ROWS, SGD, SPLIT, WIDTH, ids, model, targets

pytestmark = pytest.mark.medium


@pytest.fixture(autouse=True)
def _reads_by_round(monkeypatch):
    for cluster in (tf_dsgd.LocalCluster, tf_dsgd.SimulatedCluster):
        monkeypatch.setattr(cluster, "reads_rows_by_round", True)


def downpour(push=3, fetch=3):
    return tf_dsgd.DownpourStrategy(
        tf_dsgd.LocalCluster(1), push_every=push, fetch_every=fetch, placement=SPLIT
    )


def rounds_of(strategy):
    (program,) = strategy.batches.programs
    return program.program.step._rows


def gathers(function):
    """How many operations in it, and in its branches and loops, read rows of a variable."""
    graphs = (function.graph, *test_tables.inner(function.graph))
    return sum(op.type == "ResourceGather" for graph in graphs for op in graph.get_operations())


@pytest.mark.parametrize("pipelines", [False, True])
def test_two_lookups_of_one_table_are_one_reading_of_a_round(pipelines, monkeypatch):
    """The same is trained where each step reads its own rows; the last round is short."""
    made = []
    for reads_ahead in (True, False):
        monkeypatch.setattr(tf_dsgd.LocalCluster, "reads_rows_by_round", reads_ahead)
        strategy = downpour()
        with strategy.scope():
            built = model(keras.optimizers.Adagrad(0.1))
        data = {"x": ids(), "y": targets(), "batch_size": 5}
        if pipelines:
            whole = tf.data.Dataset.from_tensor_slices((ids(), targets()))
            data = {"x": whole.batch(5)}
        built.fit(**data, shuffle=False, verbose=0, epochs=2)
        (program,) = strategy.batches.programs
        known = program.program.step._rows
        assert (known is not None) == reads_ahead
        assert gathers(program.program.step.function) == (0 if reads_ahead else 2)
        assert gathers(program.program.work[0].traced) == 1 * reads_ahead
        made.append([*built.get_weights(), *(v.numpy() for v in built.optimizer.variables)])
    for ahead, each in zip(*made, strict=True):
        np.testing.assert_array_equal(ahead, each)


@pytest.mark.parametrize("shards", [1, 3])
def test_a_round_computes_at_the_rows_of_its_beginning(shards):
    """By hand: two tables, of other widths and types, and SGD; gradients at the rows before it.

    What is asked of a shard, and what it gives, is one tensor for both.
    """
    strategy = tf_dsgd.DownpourStrategy(
        tf_dsgd.SimulatedCluster(1, num_shards=shards),
        push_every=2,
        fetch_every=4,
        placement={"(a|b)/.*": tf_dsgd.Rows()},
    )
    inputs = keras.Input((3,), dtype="int32")
    with strategy.scope():
        a = keras.layers.Embedding(ROWS, WIDTH, name="a")
        b = keras.layers.Embedding(ROWS, WIDTH + 1, name="b", dtype="float64")
        of_b = keras.ops.cast(keras.ops.sum(b(inputs[:, 2:]), 1)[:, 1:], "float32")
        built = keras.Model(inputs, keras.ops.sum(a(inputs[:, :2]), 1) + of_b)
        built.compile(SGD(0.1), lambda y, p: 0.5 * keras.ops.sum((y - p) ** 2, -1))
    x, y = ids(), targets()
    rows = [table.get_weights()[0].astype("float64") for table in (a, b)]
    built.fit(x, y, batch_size=4, shuffle=False, verbose=0)
    assert rounds_of(strategy).known
    for round_x, round_y in zip(x.reshape(-1, 2, 4, 3), y.reshape(-1, 2, 4, WIDTH), strict=True):
        total = [np.zeros_like(r) for r in rows]
        for bx, by in zip(round_x, round_y, strict=True):
            error = (rows[0][bx[:, :2]].sum(1) + rows[1][bx[:, 2], 1:] - by) / 4
            np.add.at(total[0], bx[:, :2], np.repeat(error[:, None], 2, axis=1))
            np.add.at(total[1], bx[:, 2], np.pad(error, ((0, 0), (1, 0))))
        rows = [r - 0.1 * t for r, t in zip(rows, total, strict=True)]
    for table, want in zip((a, b), rows, strict=True):
        np.testing.assert_allclose(table.get_weights()[0], want, rtol=2e-5, atol=2e-6)


class Drawn(keras.layers.Layer):
    """Ids that are not the mini-batch's alone."""

    def __init__(self, way):
        super().__init__()
        self.way = way
        self.seed = keras.random.SeedGenerator(1)

    def call(self, numbers):
        if self.way == "drawn at random":
            shift = tf.random.uniform((), 0, 2, tf.int32)
        else:
            shift = tf.cast(self.table.lookup(tf.as_string(numbers)), tf.int32)
        return numbers % 8 + shift

    def build(self, _):
        keys = tf.constant([str(n) for n in range(ROWS)])
        values = tf.range(ROWS, dtype=tf.int64) % 5
        self.table = tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer(keys, values), 0)


@pytest.mark.parametrize("way", ["drawn at random", "looked up in a table of strings"])
def test_where_ids_are_not_the_mini_batchs_alone_each_step_reads_its_own(way):
    strategy = downpour()
    with strategy.scope():
        inputs = keras.Input((3,), dtype="int32")
        rows = keras.layers.Embedding(ROWS, WIDTH, name="table")(Drawn(way)(inputs))
        built = keras.Model(inputs, keras.ops.sum(rows, axis=1))
        built.compile(SGD(0.1), "mse")
    built.fit(ids(), targets(), batch_size=4, verbose=0)
    assert strategy.steps == 12
    (program,) = strategy.batches.programs
    assert program.program.step._rows is None and gathers(program.program.step.function) == 1


def test_ids_from_rows_of_another_table_are_not_known_before():
    strategy = tf_dsgd.DownpourStrategy(
        tf_dsgd.LocalCluster(1),
        push_every=3,
        fetch_every=3,
        placement={"(first|second)/.*": tf_dsgd.Rows()},
    )
    with strategy.scope():
        inputs = keras.Input((3,), dtype="int32")
        first = keras.layers.Embedding(ROWS, WIDTH, name="first")(inputs)
        numbers = keras.ops.cast(first[..., 0] > 0, "int32")
        second = keras.layers.Embedding(2, WIDTH, name="second")(numbers)
        built = keras.Model(inputs, keras.ops.sum(first + second, axis=1))
        built.compile(SGD(0.1), "mse")
    built.fit(ids(), targets(), batch_size=4, verbose=0)
    assert rounds_of(strategy) is None and strategy.steps == 12


@pytest.mark.parametrize(("wrong", "named"), [(-ROWS - 1, "-1"), (ROWS, str(ROWS))])
def test_an_id_that_the_table_has_not_is_named(wrong, named):
    """Keras adds the number of rows to what is below 0: its -1 is the last row."""
    strategy = downpour()
    with strategy.scope():
        built = model(SGD(0.1))
    x = ids()
    x[20, 1] = wrong
    with pytest.raises(tf.errors.InvalidArgumentError, match=rf"rows 0 to {ROWS - 1}") as caught:
        built.fit(x, targets(), batch_size=4, shuffle=False, verbose=0)
    assert f"[{named}" in str(caught.value)


@pytest.mark.parametrize("kind", ["int64", "a dict with text"])
def test_other_mini_batches(kind):
    """Ids of another type; features by name, of which one is text, and no tensor that is joined."""
    strategy = downpour(2, 2)
    text = kind != "int64"
    with strategy.scope():
        numbers = keras.Input((3,), dtype="int32" if text else "int64", name="n")
        rows = keras.layers.Embedding(ROWS, WIDTH, name="table")(numbers)
        given = {"n": numbers, "t": keras.Input((), dtype="string", name="t")} if text else numbers
        built = keras.Model(given, keras.ops.sum(rows, axis=1))
        built.compile(SGD(0.1), "mse")
    x = ids() if text else ids().astype("int64")
    given = {"n": x, "t": np.array(["a", "b"] * 24)} if text else x
    data = tf.data.Dataset.from_tensor_slices((given, targets())).batch(4)
    built.fit(data, shuffle=False, verbose=0)
    assert rounds_of(strategy).known and strategy.steps == 12


def test_one_worker_is_plain_keras_between_messages_of_one_mini_batch():
    """With periods of 1 each round is a mini-batch, whose rows are read before its step, too."""
    strategy = tf_dsgd.DownpourStrategy(tf_dsgd.LocalCluster(1), placement=SPLIT)
    twin.assert_same_as_plain(lambda: model(SGD(0.1)), strategy, ids(), targets())
    (program,) = strategy.batches.programs
    assert rounds_of(strategy).known and gathers(program.program.step.function) == 0
