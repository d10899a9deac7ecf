"""Several rounds in one call: the same as one after the other, and each message counts."""

import threading
import time

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_dsgd
from tests import helpers
from tf_dsgd.engine import in_a_row
from tf_dsgd.engine.program import Program
from tf_dsgd.strategies.packing import Packing
from tf_dsgd.strategies.pipelines import Progress

BATCH, ROUNDS = 4, 4


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    """Not only after a thousand mini-batches."""
    monkeypatch.setattr(in_a_row, "PAYS_AFTER", 0)


@pytest.fixture
def packed(monkeypatch):
    """How many mini-batches each call to a worker brought."""
    pack, calls = Packing.pack, []

    def noted(self, batches):
        calls.append(batches.shape[0])
        return pack(self, batches)

    monkeypatch.setattr(Packing, "pack", noted)
    return calls


def with_tables(optimizer):
    ids = keras.Input((2,), dtype="int32")
    tables = [
        keras.layers.Embedding(23, 4, keras.initializers.RandomNormal(seed=k))(ids)
        for k in range(2)
    ]
    hidden = keras.layers.Dense(5, "relu", kernel_initializer=keras.initializers.HeNormal(seed=2))
    out = keras.layers.Dense(1, kernel_initializer=keras.initializers.HeNormal(seed=3))
    model = keras.Model(ids, out(hidden(keras.layers.Flatten()(keras.layers.add(tables)))))
    model.compile(optimizer, "mse")
    return model


@pytest.mark.parametrize(
    "make", [lambda: keras.optimizers.Adagrad(0.1), lambda: keras.optimizers.SGD(0.1)]
)
def test_a_call_is_its_rounds_one_after_another(make):
    """Beside Keras itself: what a worker fetches is what its last message has made.

    Each id occurs once in a mini-batch, as Keras squares the gradient of each occurrence.
    """
    random = np.random.default_rng(0)
    x = np.stack([random.permutation(23)[: 2 * BATCH].reshape(BATCH, 2) for _ in range(12)])
    x = x.reshape(-1, 2).astype("int32")
    y = random.standard_normal((len(x), 1)).astype("float32")
    strategy = tf_dsgd.DownpourStrategy(placement={"embedding.*": tf_dsgd.Rows()})
    with strategy.scope():
        model = with_tables(make())
    plain = with_tables(make())
    model.fit(x[:BATCH], y[:BATCH], batch_size=BATCH, shuffle=False, verbose=0)
    plain.fit(x[:BATCH], y[:BATCH], batch_size=BATCH, shuffle=False, verbose=0)
    for first in (1, 1 + ROUNDS):
        part = slice(first * BATCH, (first + ROUNDS) * BATCH)
        batches = helpers.packed(strategy, (x[part], y[part]), BATCH)
        worker = first % 2
        with tf.device(strategy.engine.store.worker_devices[worker]):
            strategy.engine.program.rounds_on[worker](*batches)
        plain.fit(x[part], y[part], batch_size=BATCH, shuffle=False, verbose=0)
        for ours, theirs in zip(model.get_weights(), plain.get_weights(), strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)
    assert [shard.steps_done() for shard in strategy.engine.shards] == [1 + 2 * ROUNDS] * 2
    assert strategy.staleness().max == 0


@pytest.mark.parametrize("pipelines", [False, True])
def test_fit_makes_several_rounds_in_a_call_and_each_counts(packed, pipelines, monkeypatch):
    steps, calls = 200, packed
    strategy = tf_dsgd.DownpourStrategy(helpers.workers(2))
    with strategy.scope():
        model = helpers.constant_gradient_model(
            keras.optimizers.SGD(1.0), metrics=["mse"], steps_per_execution=20
        )
    x, y = helpers.ones(steps * 2)
    data = {"x": x, "y": y, "batch_size": 2}
    if pipelines:

        def dataset_fn(context):
            del context
            one = tf.data.Dataset.from_tensors((tf.ones([2, 3]), tf.ones([2, 1])))
            return one.repeat(steps // 2)

        data = {"x": strategy.distribute_datasets_from_function(dataset_fn), "shuffle": False}
        draw, calls = Progress.iterator, []

        def noted(self, worker, incarnation, segment):
            calls.append(segment.count)
            return draw(self, worker, incarnation, segment)

        monkeypatch.setattr(Progress, "iterator", noted)
    history = model.fit(**data, epochs=2, verbose=0).history
    assert sum(calls) == 2 * steps and set(calls) == {1, ROUNDS}
    assert calls.count(ROUNDS) > steps // ROUNDS  # of the two epochs more than half
    np.testing.assert_array_equal(model.get_weights()[0], np.full((3, 1), -2 * steps, "float32"))
    helpers.assert_ledger_balances(strategy)
    ledger = strategy.ledger()
    assert ledger.applied == 2 * steps and sum(w.applied for w in ledger.workers) == 2 * steps
    assert len(history["mse"]) == 2 and np.isfinite(history["mse"]).all()


def test_short_training_does_not_pay_for_several_rounds(packed, monkeypatch):
    """Nobody prepares them, and then everybody does, what the main thread has traced."""
    monkeypatch.setattr(in_a_row, "PAYS_AFTER", 150)
    trace, threads = Program._rounds_in_a_row, []

    def noted(self, batch):
        threads.append(threading.current_thread())
        trace(self, batch)

    monkeypatch.setattr(Program, "_rounds_in_a_row", noted)
    strategy = tf_dsgd.DownpourStrategy(helpers.workers(2))
    with strategy.scope():
        model = helpers.constant_gradient_model(keras.optimizers.SGD(1.0), steps_per_execution=20)
    x, y = helpers.ones(200)
    model.fit(x, y, batch_size=2, verbose=0)
    assert set(packed) == {1}
    assert "rounds_on" not in vars(strategy.engine.program)
    model.fit(x, y, batch_size=2, verbose=0, epochs=2)
    assert set(packed) == {1, ROUNDS}
    assert threads == [threading.main_thread()]
    helpers.assert_ledger_balances(strategy)


@pytest.mark.parametrize("most_out", [1, 3])
def test_a_loop_that_waits_until_mini_batches_were_counted_goes_on(packed, most_out):
    """It hands out no more before: a worker must not wait for as many as a call has."""
    strategy = tf_dsgd.DownpourStrategy(helpers.workers(2), local_rule="none")
    with strategy.scope():
        weight = tf.Variable(0.0)
        optimizer = keras.optimizers.SGD(1.0)
        optimizer.build([weight])

    def step(ticket):
        optimizer.apply([tf.ones([])], [weight])

    @tf.function
    def distributed_step(ticket):
        return strategy.run(step, args=(ticket,))

    tickets = tf.data.Dataset.range(40)
    for _ in range(2):  # at the second time workers know how long a message takes
        before = strategy.steps
        for number, ticket in enumerate(strategy.experimental_distribute_dataset(tickets)):
            distributed_step(ticket)
            deadline = time.monotonic() + 60.0
            while number - most_out > strategy.steps - before:
                assert time.monotonic() < deadline, strategy.steps - before
        assert strategy.steps - before >= 40 - most_out - 1
        assert float(weight) == -before - 40.0
    assert strategy.steps == 80


def test_an_error_in_the_middle_of_a_call_loses_none_before_it(packed):
    """A mini-batch has an id that no row has; `fit` says so, and training goes on."""
    strategy = tf_dsgd.DownpourStrategy(helpers.workers(2))
    with strategy.scope():
        model = keras.Sequential(
            [keras.Input((1,), dtype="int32"), keras.layers.Embedding(4, 1, "zeros")]
        )
        total = lambda _, y: -keras.ops.sum(y, axis=-1)  # noqa: E731
        model.compile(keras.optimizers.SGD(1.0), total, steps_per_execution=20)

    def counted():
        return float(model.get_weights()[0][0, 0])

    good = np.zeros((400, 1), "int32")
    bad = good.copy()
    bad[250] = 7
    model.fit(good, good, batch_size=2, verbose=0)
    del packed[:]
    with pytest.raises(tf.errors.OpError, match="indices"):
        model.fit(bad, bad, batch_size=2, shuffle=False, verbose=0)
    assert ROUNDS in packed
    before = strategy.ledger().applied
    assert counted() == before  # each applied message has added 1
    assert before > 200 + 20
    model.fit(good, good, batch_size=2, verbose=0)
    assert counted() == before + 200 == strategy.ledger().applied
    helpers.assert_ledger_balances(strategy)
