"""A message is applied at most once and whole, and a worker's error loses nobody else's."""

from __future__ import annotations

import threading

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_dsgd

pytestmark = pytest.mark.medium


def trained(cluster, **options):
    """A strategy after one epoch of eight batches whose gradient is 1, at rate 1."""
    strategy = tf_dsgd.DownpourStrategy(cluster, **options)
    with strategy.scope():
        model = keras.Sequential(
            [keras.Input((1,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")]
        )
        model.compile(keras.optimizers.SGD(1.0), loss=lambda y, p: tf.reduce_mean(p))
    model.fit(np.ones((16, 1)), np.ones((16, 1)), batch_size=2, verbose=0)
    return strategy, model


def program_of(strategy):
    return strategy.engine.program


@pytest.mark.parametrize("kind", ["local", "simulated"])
def test_a_message_delivered_twice_is_applied_once(kind):
    cluster = tf_dsgd.LocalCluster(2) if kind == "local" else tf_dsgd.SimulatedCluster(2)
    strategy, model = trained(cluster)
    before, weight = strategy.ledger(), model.get_weights()[0].item()
    assert weight == -8
    program = program_of(strategy)
    gradient = [tf.constant([[1.0]])]
    row = strategy.engine.store.clock.copies[1].numpy()
    fresh = tf.constant([1, 0, row[2] + 1, strategy.updates - 3, 1], tf.int64)
    assert bool(program.deliver(fresh, gradient))
    assert not bool(program.deliver(fresh, gradient))
    assert model.get_weights()[0].item() == weight - 1
    after = strategy.ledger()
    assert after.applied == before.applied + 1
    assert after.refused == before.refused + 1 == 1
    assert after.workers[1].steps == before.workers[1].steps + 1
    assert strategy.updates == 9
    assert strategy.staleness().max >= 3


def test_a_message_of_a_replaced_worker_is_refused():
    strategy, model = trained(tf_dsgd.LocalCluster(1))
    old = tf.constant([0, -1, 1000, strategy.updates, 1], tf.int64)
    assert not bool(program_of(strategy).deliver(old, [tf.constant([[1.0]])]))
    assert model.get_weights()[0].item() == -8
    assert strategy.ledger().refused == 1
    assert strategy.steps == 8


class FailAbove(keras.layers.Layer):
    """Raises on the batch that holds a number above the limit."""

    def call(self, x):
        tf.debugging.assert_less(tf.reduce_max(x), 100.0, message="above the limit")
        return x


@pytest.mark.parametrize("kind", ["local", "simulated"])
def test_an_error_keeps_what_was_whole_and_training_can_go_on(kind):
    cluster = tf_dsgd.LocalCluster(2) if kind == "local" else tf_dsgd.SimulatedCluster(2)
    others = set(threading.enumerate())
    strategy = tf_dsgd.DownpourStrategy(cluster, push_every=3, fetch_every=3)
    with strategy.scope():
        model = keras.Sequential([keras.Input((1,)), FailAbove(), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.0), loss="mse")
    x = np.zeros((40, 1), "float32")
    x[21] = 1000.0
    with pytest.raises(tf.errors.InvalidArgumentError, match="above the limit"):
        model.fit(x, x, batch_size=2, shuffle=False, verbose=0)
    ledger = strategy.ledger()
    assert ledger.in_flight == 0
    assert ledger.refused <= 1
    done = strategy.steps
    assert done == sum(w.steps for w in ledger.workers) < 20
    model.fit(np.zeros((40, 1)), np.zeros((40, 1)), batch_size=2, verbose=0)
    assert strategy.steps == done + 20
    assert strategy.ledger().refused == ledger.refused
    mine = set(threading.enumerate()) - others
    assert [t.name for t in mine if t.name.startswith("tf_dsgd worker")] == []


@pytest.mark.parametrize("kind", ["local", "simulated"])
def test_an_error_leaves_no_collection_behind(kind):
    """What was collected before it is used at the next drain, and not with later messages."""
    cluster = tf_dsgd.LocalCluster(2) if kind == "local" else tf_dsgd.SimulatedCluster(2)
    strategy = tf_dsgd.SoftsyncStrategy(cluster, gradients_per_update=100, staleness_scaling=None)
    with strategy.scope():
        model = keras.Sequential([keras.Input((1,)), FailAbove(), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(1.0), loss=lambda y, p: tf.reduce_mean(p))
    x = np.zeros((40, 1), "float32")
    x[31] = 1000.0
    with pytest.raises(tf.errors.InvalidArgumentError, match="above the limit"):
        model.fit(x, x, batch_size=2, shuffle=False, verbose=0)
    assert model.get_weights()[1].item() == -1.0  # the mean of gradients of 1
    assert 0 < strategy.ledger().applied < 20
    assert strategy.updates == int(model.optimizer.iterations) == 1
    model.fit(np.zeros((40, 1)), np.zeros((40, 1)), batch_size=2, verbose=0)
    assert model.get_weights()[1].item() == -2.0
    assert strategy.updates == int(model.optimizer.iterations) == 2


class Table(keras.layers.Layer):
    """An embedding whose gradient is sparse, or dense by way of a one-hot product."""

    def __init__(self, sparse):
        super().__init__()
        self.sparse = sparse
        start = keras.initializers.RandomUniform(-0.05, 0.05, seed=3)
        self.table = self.add_weight(shape=(50, 3), initializer=start, name="table")

    def call(self, ids):
        if self.sparse:
            return keras.ops.take(self.table, ids, axis=0)
        return keras.ops.matmul(keras.ops.one_hot(ids, 50), self.table)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("push_every", "fetch_every", "local_rule"),
    [
        (3, 5, "sgd"),
        (4, 4, "none"),
        (4, 2, "optimizer"),
        pytest.param(4, 4, "sgd", marks=pytest.mark.slow),
        pytest.param(5, 3, "sgd", marks=pytest.mark.slow),
        pytest.param(2, 1, "sgd", marks=pytest.mark.slow),
    ],
)
def test_sparse_and_dense_gradients_give_the_same_weights(push_every, fetch_every, local_rule):
    """Rows fetched, accrued and pushed by themselves: as if the whole table had travelled."""
    random = np.random.default_rng(0)
    x, y = random.integers(0, 50, (96, 4)), random.standard_normal((96, 1)).astype("float32")
    weights = []
    for sparse in (True, False):
        keras.utils.set_random_seed(1)
        strategy = tf_dsgd.DownpourStrategy(
            tf_dsgd.SimulatedCluster(
                3, compute_seconds=[1.0, 1.3, 2.1], network_seconds=0.17, seed=0
            ),
            push_every=push_every,
            fetch_every=fetch_every,
            local_rule=local_rule,
        )
        with strategy.scope():
            layers = [Table(sparse), keras.layers.Flatten(), keras.layers.Dense(1)]
            model = keras.Sequential([keras.Input((4,), dtype="int32"), *layers])
            model.compile(keras.optimizers.SGD(0.1), "mse")
        model.fit(x, y, batch_size=4, epochs=2, shuffle=False, verbose=0)
        weights.append(model.get_weights())
        if local_rule != "optimizer":
            assert program_of(strategy).step.sparse[0] == sparse
    for ours, theirs in zip(*weights, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-6)


@pytest.mark.few(1)
@pytest.mark.thin
@pytest.mark.parametrize("optimizer", ["sgd", "adagrad"])
@pytest.mark.parametrize("scaling", [None, "inverse"])
def test_a_collection_of_sparse_gradients_gives_the_same_weights(scaling, optimizer):
    """A message's rows change later than it arrives, and are fetched from then on.

    Of rows that several messages touch an optimizer sees the sum, once.
    """
    random = np.random.default_rng(0)
    x, y = random.integers(0, 50, (98, 4)), random.standard_normal((98, 1)).astype("float32")
    weights = []
    for sparse in (True, False):
        keras.utils.set_random_seed(1)
        strategy = tf_dsgd.SoftsyncStrategy(
            tf_dsgd.SimulatedCluster(
                4, compute_seconds=[1.0, 1.3, 2.1, 5.7], network_seconds=0.17, seed=0
            ),
            gradients_per_update=5,
            staleness_scaling=scaling,
        )
        with strategy.scope():
            layers = [Table(sparse), keras.layers.Flatten(), keras.layers.Dense(1)]
            model = keras.Sequential([keras.Input((4,), dtype="int32"), *layers])
            rules = {"sgd": keras.optimizers.SGD(0.5), "adagrad": keras.optimizers.Adagrad(0.1)}
            model.compile(rules[optimizer], "mse")
        model.fit(x, y, batch_size=2, epochs=2, shuffle=False, verbose=0)
        weights.append(model.get_weights())
        program = program_of(strategy)
        assert program.step.sparse[0] == sparse
        # Rows only: a million-row table must not be copied for a collection.
        tables = [cell for cell in program._shard_cells.values() if cell.shape == [50, 3]]
        assert len(tables) == (0 if sparse else 1)
    for ours, theirs in zip(*weights, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-6)
