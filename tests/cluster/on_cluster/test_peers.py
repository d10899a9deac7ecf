"""Workers that send to one another, as processes: sums, copies, and who sends whom how much."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_dsgd
from tests import helpers
from tests.algorithms import peers_bench as bench
from tests.cluster import connections
from tf_dsgd import compression

STEPS, WIDTH = 40, 20_000


def fit(model, data, **options):
    return model.fit(*data, batch_size=bench.BATCH, shuffle=False, verbose=0, **options)


def test_one_worker_is_one_thread():
    """To the bit: weights, BatchNorm, slots and the residual, whose messages nobody else gets."""

    def made(cluster):
        keras.utils.set_random_seed(5)
        codec = compression.Threshold(0.01, entropy=True)
        strategy = tf_dsgd.CompressedAsyncStrategy(cluster, compression=codec)
        with strategy.scope():
            layers = [keras.layers.Dense(5, "tanh"), keras.layers.BatchNormalization()]
            model = keras.Sequential([keras.Input((6,)), *layers, keras.layers.Dense(4)])
            model.compile(keras.optimizers.Adam(0.02), "mse")
        return strategy, model

    data, (strategy, model) = bench.dyadic(STEPS), made(helpers.workers(1))
    twin, other = made(tf_dsgd.LocalCluster(1))
    logs = [fit(each, data, epochs=2).history for each in (model, other)]
    assert logs[0] == logs[1]
    for mine, theirs in zip(model.get_weights(), other.get_weights(), strict=True):
        np.testing.assert_array_equal(mine, theirs)
    state, wanted = strategy.state(), twin.state()
    assert state.keys() == wanted.keys()
    for name, value in state.items():
        np.testing.assert_array_equal(value, wanted[name], err_msg=name)


@pytest.mark.parametrize("codec", [compression.Threshold(1.0), compression.TopK(1.0)], ids=repr)
def test_sums_are_exact_and_copies_equal(codec):
    """Of numbers whose sums are exact: what was sent and all residuals are all gradients."""
    strategy = tf_dsgd.CompressedAsyncStrategy(tf_dsgd.TFCluster(), compression=codec)
    model = bench.linear(strategy)
    data = bench.dyadic(STEPS)
    for epochs in (1, 2):
        fit(model, data)
        found = model.get_weights()[0] + bench.residuals(strategy)
        np.testing.assert_array_equal(found, -epochs * bench.gradients(*data).sum(0))
        bench.assert_copies_are_equal(strategy)
        helpers.assert_ledger_balances(strategy)
        assert strategy.steps == strategy.updates == epochs * STEPS
    model.set_weights([np.full((6, 4), 8.0)])
    held = bench.residuals(strategy)
    fit(model, data)
    found = model.get_weights()[0] + bench.residuals(strategy)
    np.testing.assert_array_equal(found, 8.0 + held - bench.gradients(*data).sum(0))
    bench.assert_copies_are_equal(strategy)


def test_messages_go_from_worker_to_worker_and_nowhere_else():
    """A weight of 480 kB as bfloat16, to the other worker. Batches come from the chief.

    Once an epoch each begins with what is read outside, and one shows what it has.
    """
    strategy = tf_dsgd.CompressedAsyncStrategy(
        helpers.workers(2), compression=compression.Cast("bfloat16")
    )
    with strategy.scope():
        layer = keras.layers.Dense(WIDTH, use_bias=False, kernel_initializer="zeros")
        model = keras.Sequential([keras.Input((6,)), layer])
        model.compile(keras.optimizers.SGD(1.0), loss=lambda y, p: tf.reduce_sum(p, -1))
    x, _ = bench.dyadic(STEPS)
    data = x, np.zeros((len(x), 1), "float32")
    fit(model, data)
    drained = connections.between_tasks()
    fit(model, data)
    sent = connections.between_tasks()
    sent.subtract(drained)
    size = 6 * WIDTH * 2
    between = sum(sent[f"worker {k}", f"worker {1 - k}"] for k in range(2))
    assert STEPS * size < between < STEPS * (size + 10_000) + 2 * size
    for m in range(2):
        told, heard = sent["chief 0", f"worker {m}"], sent[f"worker {m}", "chief 0"]
        assert told - 2 * size < STEPS * size / 10
        assert heard - 2 * size * (m == 0) < STEPS * size / 20


def test_a_change_that_is_not_finite_is_named_and_the_others_lose_nothing():
    strategy = tf_dsgd.CompressedAsyncStrategy(
        tf_dsgd.TFCluster(), compression=compression.Threshold(1.0)
    )
    model = bench.linear(strategy)
    x, y = bench.dyadic(STEPS)
    x[77] = np.nan
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"/kernel', .*is not finite"):
        fit(model, (x, y))
    before = model.get_weights()[0] + bench.residuals(strategy)
    assert np.isfinite(before).all()
    bench.assert_copies_are_equal(strategy)
    data = bench.dyadic(12)
    fit(model, data)  # and it goes on
    found = model.get_weights()[0] + bench.residuals(strategy)
    np.testing.assert_array_equal(found, before - bench.gradients(*data).sum(0))
    bench.assert_copies_are_equal(strategy)


def test_a_strategy_with_weights_on_workers_is_another_connection():
    strategy = tf_dsgd.CompressedAsyncStrategy(
        tf_dsgd.TFCluster(), compression=compression.TopK(1.0)
    )
    assert strategy.num_shards == 1 and "localhost" in strategy.shard_devices[0]
    with pytest.raises(RuntimeError, match=r"connected for that alone.*new process"):
        tf_dsgd.PeriodicAveragingStrategy(strategy.cluster)
