"""BatchNorm's moving statistics with several workers, against closed forms in NumPy.

Batch b holds nothing but its own number, so that its mean is b; the rate is 0.
"""

import contextlib

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_dsgd
from tests import helpers
from tf_dsgd.engine import statistics

pytestmark = pytest.mark.medium

M = 0.9  # the momentum


def lock_step(workers):
    """All compute at the same time; their messages arrive in the order of their numbers."""
    return tf_dsgd.SimulatedCluster(workers, compute_seconds=1.0, network_seconds=0.0, seed=0)


def moving_mean(strategy, batches, build=None, epochs=1):
    with strategy.scope():
        model = keras.Sequential(
            [keras.Input((1,)), *(build or normalization)(), keras.layers.Dense(1)]
        )
        model.compile(keras.optimizers.SGD(0.0), "mse")
    x = np.repeat(np.arange(float(batches), dtype="float32"), 2)[:, None]
    model.fit(x, x, batch_size=2, epochs=epochs, shuffle=False, verbose=0)
    (found,) = [v for v in model.non_trainable_variables if "moving_mean" in v.path]
    return float(found.numpy()[0])


def normalization():
    return [keras.layers.BatchNormalization(momentum=M)]


def contribution(batches):
    """What mini-batches of these means add, beside what is left of the value they began with."""
    value = 0.0
    for b in batches:
        value = M * value + (1.0 - M) * b
    return value


@pytest.mark.few(3)
@pytest.mark.parametrize("workers", [1, 2, 4, 16])
@pytest.mark.parametrize("period", [1, 5])
def test_workers_in_lock_step(workers, period):
    """s <- m^(MK) s + sum_w m^(K (M - w)) c_w, once for each push of all."""
    strategy = tf_dsgd.DownpourStrategy(lock_step(workers), push_every=period, fetch_every=period)
    found = moving_mean(strategy, 3 * workers * period)
    # Turn by turn each takes its period's mini-batches, in the order of the data.
    expected, first = 0.0, 0
    for _ in range(3):
        for _ in range(workers):
            expected = M**period * expected + contribution(range(first, first + period))
            first += period
    np.testing.assert_allclose(found, expected, rtol=2e-6)


def test_a_fetch_between_two_pushes_takes_in_what_others_sent():
    """Pushes at 3 and 6; the fetch at 4 brings both to a worker with one mini-batch unsent."""
    strategy = tf_dsgd.DownpourStrategy(lock_step(2), push_every=3, fetch_every=2)
    found = moving_mean(strategy, 12)
    # Turns are of 2, 1, 1 and 2 mini-batches, of one worker and then of the other.
    sent = [(0, 1, 4), (2, 3, 5), (6, 8, 9), (7, 10, 11)]
    np.testing.assert_allclose(found, contribution(b for of in sent for b in of), rtol=2e-6)


@pytest.mark.few(1)
@pytest.mark.parametrize("workers", [2, 5])
def test_softsync_takes_messages_one_by_one(workers):
    strategy = tf_dsgd.SoftsyncStrategy(lock_step(workers), gradients_per_update=workers)
    found = moving_mean(strategy, 4 * workers)
    np.testing.assert_allclose(found, contribution(range(4 * workers)), rtol=2e-6)


@pytest.mark.parametrize("rule", ["sgd", "optimizer"])
def test_a_layer_that_is_used_twice_moves_twice(rule):
    class Twice(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self.shared = keras.layers.BatchNormalization(momentum=M, center=False, scale=False)

        def build(self, shape):
            self.shared.build(shape)

        def call(self, x, training=False):
            self.shared(x, training=training)
            self.shared(x, training=training)
            return x

    strategy = tf_dsgd.DownpourStrategy(lock_step(3), push_every=2, fetch_every=2, local_rule=rule)
    found = moving_mean(strategy, 6, lambda: [Twice()])
    expected = contribution(b for b in range(6) for _ in range(2))
    np.testing.assert_allclose(found, expected, rtol=2e-6)


def test_a_layer_that_is_used_now_and_then_moves_then():
    """In a branch of the graph: only batches of even numbers go through it."""

    class Sometimes(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self.inner = keras.layers.BatchNormalization(momentum=M)

        def build(self, shape):
            self.inner.build(shape)

        def call(self, x, training=False):
            if not training:
                return x
            even = tf.equal(tf.cast(x[0, 0], tf.int32) % 2, 0)
            tf.cond(even, lambda: tf.identity(self.inner(x, training=True)), lambda: tf.identity(x))
            return x

    strategy = tf_dsgd.DownpourStrategy(lock_step(3), push_every=2, fetch_every=2)
    found = moving_mean(strategy, 12, lambda: [Sometimes()])
    np.testing.assert_allclose(found, contribution(range(0, 12, 2)), rtol=2e-6)


def test_a_frozen_layer_stays():
    def frozen():
        (layer,) = normalization()
        layer.trainable = False
        return [layer]

    strategy = tf_dsgd.DownpourStrategy(lock_step(3))
    assert moving_mean(strategy, 6, frozen) == 0.0


@pytest.mark.few(1)
@pytest.mark.parametrize("workers", [1, 2, 16])
def test_averaging_puts_no_worker_first(workers):
    """A s + (1 - A) c, with c the mean of what the workers' own mini-batches made of it."""
    strategy = tf_dsgd.PeriodicAveragingStrategy(lock_step(workers), average_every=3)
    found = moving_mean(strategy, 3 * workers, epochs=2)
    own = [contribution(range(3 * w, 3 * w + 3)) / (1 - M**3) for w in range(workers)]
    all_kept, expected = M ** (3 * workers), 0.0
    for _ in range(2):
        expected = all_kept * expected + (1 - all_kept) * np.mean(own)
    np.testing.assert_allclose(found, expected, rtol=5e-6)


@pytest.mark.few(3)
@pytest.mark.parametrize(
    "make",
    [
        lambda c: tf_dsgd.DownpourStrategy(c, push_every=3, fetch_every=2),
        lambda c: tf_dsgd.DownpourStrategy(c, push_every=2, fetch_every=5),
        lambda c: tf_dsgd.DownpourStrategy(c, push_every=4, fetch_every=4, local_rule="optimizer"),
        lambda c: tf_dsgd.SoftsyncStrategy(c, gradients_per_update=1),
        lambda c: tf_dsgd.PeriodicAveragingStrategy(c, average_every=4),
        lambda c: tf_dsgd.ElasticAveragingStrategy(c, average_every=4),
    ],
    ids=["push 3, fetch 2", "push 2, fetch 5", "optimizer", "softsync", "averaging", "elastic"],
)
def test_one_worker_is_plain_keras_to_the_bit(make):
    x = np.random.default_rng(3).normal(2.0, 3.0, (62, 4)).astype("float32")
    found = []
    for strategy in (None, make(helpers.workers(1))):
        with strategy.scope() if strategy else contextlib.nullcontext():
            model = keras.Sequential([keras.Input((4,)), *normalization()])
            model.compile(keras.optimizers.SGD(0.0), "mse")
        model.fit(x, x, batch_size=2, epochs=2, shuffle=False, verbose=0)
        found.append([v.numpy() for v in model.non_trainable_variables])
    for one, other in zip(*found, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.few(1)
@pytest.mark.parametrize("period", [1, 20])
def test_many_workers_stay_between_the_mini_batches(period):
    """The sum of sixteen workers' changes would diverge, and their mean lag sixteen-fold."""
    strategy = tf_dsgd.DownpourStrategy(lock_step(16), push_every=period, fetch_every=period)
    found = moving_mean(strategy, 640)
    assert 320 < found <= 639  # 0.9^64 of the first 576 is left


def test_double_precision_stays_double():
    """0.99 is no float32, and a statistic of float64 would show it."""
    strategy = tf_dsgd.DownpourStrategy(lock_step(4), push_every=5, fetch_every=5)
    layer = keras.layers.BatchNormalization(momentum=0.99, dtype="float64")
    with strategy.scope():
        model = keras.Sequential([keras.Input((1,), dtype="float64"), layer])
        model.compile(keras.optimizers.SGD(0.0), "mse")
    x = np.repeat(np.arange(400.0), 2)[:, None]
    model.fit(x, x, batch_size=2, shuffle=False, verbose=0)
    expected = 0.0
    for b in range(400):
        expected = 0.99 * expected + (1.0 - 0.99) * b
    np.testing.assert_allclose(layer.moving_mean.numpy(), [expected], rtol=1e-12)


def test_what_a_subclass_adds_is_no_moving_statistic():
    class Counts(keras.layers.BatchNormalization):
        def build(self, shape):
            super().build(shape)
            self.seen = self.add_weight(
                name="seen", shape=(), dtype="int64", initializer="zeros", trainable=False
            )

        def call(self, inputs, training=None, mask=None):
            if training:
                self.seen.assign_add(1)
            return super().call(inputs, training=training, mask=mask)

    strategy = tf_dsgd.DownpourStrategy(lock_step(2))
    layer = Counts(momentum=M)
    moving_mean(strategy, 16, lambda: [layer])
    assert int(layer.seen.numpy()) == 16


@pytest.mark.parametrize("lock_free", [False, True])
def test_without_a_lock_what_another_message_wrote_meanwhile_stays(lock_free):
    """It comes between the reading of the shard's value and the writing."""

    class Primary:
        value = 10.0

        def read_value(self):
            read, Primary.value = tf.constant(Primary.value), 20.0  # the other message
            return read

        def assign(self, value, read_value):
            Primary.value = float(value)

        def assign_add(self, value, read_value):
            Primary.value += float(value)

    variable = type("Variable", (), {"primary": Primary(), "momentum": 0.5})
    moved = statistics.Moved(tf.constant(7.0), tf.constant(10.0), tf.constant(1, tf.int64))
    statistics.apply(variable, moved, lock_free)
    assert Primary.value == (17.0 if lock_free else 7.0)
