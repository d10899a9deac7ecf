"""Workers run at the same time: a layer that sleeps costs two workers half of one's time.

Times are of the second epoch, in which nothing is traced, and are bounds on what must happen, not
benchmarks: the sleeping needs no core.
"""

import gc

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_dsgd
from tests import helpers

pytestmark = pytest.mark.alone

STEPS, SECONDS = 40, 0.05


@pytest.fixture(autouse=True)
def _no_pause_while_timed():
    """Freeing the graphs of earlier tests takes a second or more, at a moment Python chooses."""
    gc.disable()
    yield
    gc.enable()


class ReadsCounters(keras.callbacks.Callback):
    """Reads, at every batch, what common callbacks read."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def on_train_batch_end(self, batch, logs=None):
        optimizer = self.model.optimizer
        self.seen.append((float(optimizer.learning_rate), int(optimizer.iterations)))


def epoch_seconds(cluster, callbacks=(), **periods):
    strategy = tf_dsgd.DownpourStrategy(cluster, **periods)
    with strategy.scope():
        model = helpers.constant_gradient_model(
            keras.optimizers.SGD(0.001), extra=[helpers.Sleep(SECONDS)]
        )
    clock = helpers.EpochSeconds()
    x, y = helpers.ones(2 * STEPS)
    model.fit(x, y, batch_size=2, epochs=2, verbose=0, callbacks=[clock, *callbacks])
    return clock.seconds[-1], strategy


@pytest.fixture(scope="module")
def one_worker():
    seconds, strategy = epoch_seconds(helpers.workers(1))
    assert seconds >= STEPS * SECONDS
    assert strategy.staleness().max == 0
    return seconds


@pytest.mark.parametrize("period", [1, 5, 40])
def test_two_workers_overlap(one_worker, period):
    seconds, strategy = epoch_seconds(helpers.workers(2), push_every=period, fetch_every=period)
    assert seconds <= 0.6 * one_worker
    ledger = helpers.assert_ledger_balances(strategy)
    assert strategy.steps == 2 * STEPS
    assert min(worker.steps for worker in ledger.workers) >= 0.3 * strategy.steps
    assert strategy.staleness().mean > 0


def test_a_callback_that_reads_counters_does_not_serialise(one_worker):
    """Reading the learning rate and `iterations` must not wait for the work under way."""
    reader = ReadsCounters()
    seconds, strategy = epoch_seconds(helpers.workers(2), [reader])
    assert seconds <= 0.6 * one_worker
    assert strategy.staleness().mean > 0
    rates, counts = zip(*reader.seen, strict=True)
    assert len(rates) == 2 * STEPS
    assert set(rates) == {float(np.float32(0.001))}
    assert list(counts) == sorted(counts)
    assert 0.8 * strategy.updates <= counts[-1] <= strategy.updates  # they follow the shard


def test_input_overlaps_compute():
    """Making a batch takes as long as a step; one worker must not wait for both in turn."""
    strategy = tf_dsgd.DownpourStrategy(helpers.workers(1))
    with strategy.scope():
        model = helpers.constant_gradient_model(
            keras.optimizers.SGD(0.001), extra=[helpers.Sleep(SECONDS)]
        )
    slow_input = helpers.Sleep(SECONDS)

    def make(x, y):
        return slow_input(x, training=True), y

    dataset = tf.data.Dataset.from_tensor_slices(helpers.ones(2 * STEPS)).batch(2).map(make)
    clock = helpers.EpochSeconds()
    model.fit(dataset, epochs=2, shuffle=False, verbose=0, callbacks=[clock])
    assert clock.seconds[-1] <= 0.75 * 2 * STEPS * SECONDS


def test_stopping_stops_every_worker():
    """`stop_training` at the sixth of 400 batches: nothing is left running, and nothing runs on."""
    strategy = tf_dsgd.DownpourStrategy(helpers.workers(2))

    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 5:
                self.model.stop_training = True

    with strategy.scope():
        model = helpers.constant_gradient_model(
            keras.optimizers.SGD(1.0), extra=[helpers.Sleep(0.02)]
        )
    x, y = helpers.ones(2 * 400)
    model.fit(x, y, batch_size=2, epochs=3, verbose=0, callbacks=[Stop()])
    done = strategy.steps
    assert 6 <= done <= 40
    helpers.assert_ledger_balances(strategy)
    assert float(model.get_weights()[0][0, 0]) == -done
    model.fit(x[:40], y[:40], batch_size=2, verbose=0)
    assert strategy.steps == done + 20
    np.testing.assert_array_equal(model.get_weights()[0], np.full((3, 1), -(done + 20), "f"))


def test_an_error_in_a_worker_comes_out_of_fit():
    """What a layer raises on a worker is raised by `fit`, soon, and the next `fit` works."""

    class Fails(keras.layers.Layer):
        armed = True

        def call(self, inputs, training=False):
            if not training:
                return inputs
            outputs = tf.numpy_function(self.check, [inputs], inputs.dtype)
            outputs.set_shape(inputs.shape)
            return outputs

        def check(self, inputs):
            if Fails.armed and inputs[0, 0] == 2.0:
                raise ValueError("a bad sample was met")
            return inputs

    strategy = tf_dsgd.DownpourStrategy(helpers.workers(2))
    with strategy.scope():
        model = helpers.constant_gradient_model(keras.optimizers.SGD(1.0), extra=[Fails()])
    x, y = helpers.ones(100)
    x[40] = 2.0
    with pytest.raises(Exception, match="a bad sample was met"):
        model.fit(x, y, batch_size=2, verbose=0)
    Fails.armed = False
    before = strategy.steps
    model.fit(x, y, batch_size=2, verbose=0)
    assert strategy.steps == before + 50
