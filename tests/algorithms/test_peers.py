"""Peers beside a trace by hand, a NumPy twin, plain Keras, and conservation to the bit."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_dsgd
from tests import helpers
from tests.algorithms import peers_twin
from tests.algorithms.peers_bench import (
    BATCH,
    assert_copies_are_equal,
    dyadic,
    gradients,
    linear,
    residuals,
    simulated,
)
from tf_dsgd import compression

ALL = compression.TopK(1.0)


# -- by hand --------------------------------------------------------------------------------

# One weight w, the loss of a target v is (w - v)^2 / 2, the rate 1: a change is v - w. A takes 2
# seconds for a mini-batch and B 5, a message is with both after half a second, tau is 1. Behind
# each arrival: the update that it is, its staleness, and what its sender keeps.
#
#   t = 0     A takes 1, at w = 0.                B takes 2, at w = 0.
#   t = 2.5   A's change  1 - 0 = 1 arrives:  0 is sent.   1, staleness 0, A keeps 1.
#             A takes 3, at w = 0.
#   t = 5     A's change  3 - 0 = 3 arrives: +1 is sent.   2, staleness 0, A keeps 1 + 3 - 1 = 3.
#             A takes 4, at w = 1.
#   t = 5.5   B's change  2 - 0 = 2 arrives: +1 is sent.   3, staleness 2, B keeps 1.
#             B takes 7, at w = 2.
#   t = 7.5   A's change  4 - 1 = 3 arrives: +1 is sent.   4, staleness 1, A keeps 5.
#             A takes 9, at w = 3.
#   t = 10    A's change  9 - 3 = 6 arrives: +1 is sent.   5, staleness 0, A keeps 10.
#   t = 11    B's change  7 - 2 = 5 arrives: +1 is sent.   6, staleness 2, B keeps 5.
#
# w = 5, and 5 + 10 + 5 = 20 is the sum of all changes.
TARGETS = [1, 2, 3, 4, 7, 9]


def half_square(y_true, y_pred):
    return 0.5 * keras.ops.mean(keras.ops.square(y_true - y_pred), axis=-1)


def test_two_workers_by_hand():
    strategy = tf_dsgd.CompressedAsyncStrategy(
        simulated(2.0, 5.0, network=0.5), compression=compression.Threshold(1.0)
    )
    with strategy.scope():
        layer = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
        model = keras.Sequential([keras.Input((1,)), layer])
        model.compile(keras.optimizers.SGD(1.0), half_square)
    y = np.array(TARGETS, "float32")[:, None]
    model.fit(np.ones_like(y), y, batch_size=1, shuffle=False, verbose=0)
    assert float(model.get_weights()[0][0, 0]) == 5.0
    assert strategy.residual() == (10.0, 5.0)
    assert strategy.engine.now == 11.0
    staleness = strategy.staleness()
    assert (staleness.count, staleness.max) == (6, 2)
    assert staleness.mean == pytest.approx(5 / 6)  # 0 0 2 1 0 2
    assert [worker.steps for worker in strategy.ledger().workers] == [4, 2]
    assert strategy.updates == int(model.optimizer.iterations) == 6


# -- the twin -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "seconds",
    [
        pytest.param((1.0, 1.7), marks=pytest.mark.slow),
        pytest.param((1.0, 1.73, 3.1), marks=pytest.mark.slow),
        (2.2, 1.0, 1.0),  # two of them always at the same moment
    ],
)
def test_beside_the_twin(seconds):
    """Momentum on each worker, in double precision; over 30 messages of 24 numbers."""
    random = np.random.default_rng(len(seconds))
    # Keras takes data, and computes losses, in float32; what is sent are multiples of tau.
    x, y = (random.normal(size=(30, 4, n)).astype("float32").astype("float64") for n in (6, 4))
    strategy = tf_dsgd.CompressedAsyncStrategy(
        simulated(*seconds, network=0.31), compression=compression.Threshold(0.02)
    )
    with strategy.scope():
        layer = keras.layers.Dense(4, use_bias=False, dtype="float64")
        model = keras.Sequential([keras.Input((6,), dtype="float64"), layer])
        model.compile(keras.optimizers.SGD(0.0625, momentum=0.5), half_square)
    first = model.get_weights()[0]
    model.fit(x.reshape(-1, 6), y.reshape(-1, 4), batch_size=4, shuffle=False, verbose=0)
    optimizer = peers_twin.momentum(0.0625, 0.5)
    peers = [peers_twin.Peer(first, s, 0.31, optimizer) for s in seconds]

    def gradient(w, batch):
        inputs, targets = batch
        return inputs.T @ (inputs @ w - targets) / targets.size

    staleness = peers_twin.run(peers, gradient, zip(x, y, strict=True), 0.02)
    np.testing.assert_allclose(model.get_weights()[0], peers[0].w, rtol=0, atol=1e-12)
    kept = [np.linalg.norm(peer.residual) for peer in peers]
    np.testing.assert_allclose(strategy.residual(), kept, rtol=1e-6)
    found = strategy.staleness()
    assert (found.count, found.max) == (30, max(staleness))
    assert found.mean == pytest.approx(np.mean(staleness)) and found.mean > 0
    assert_copies_are_equal(strategy)


# -- plain Keras ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", [pytest.param("SGD", marks=pytest.mark.slow), "Adam"])
def test_one_worker_that_sends_everything_is_plain_keras(name):
    """Up to rounding: a worker's weights are what it was and what it has sent."""
    x, y = helpers.regression(64, ids=False)
    found = []
    for strategy in (
        None,
        tf_dsgd.CompressedAsyncStrategy(tf_dsgd.LocalCluster(1), compression=ALL),
    ):
        keras.utils.set_random_seed(4)
        with tf_dsgd_scope(strategy):
            layers = [keras.layers.Dense(8, "tanh"), keras.layers.BatchNormalization()]
            model = keras.Sequential([keras.Input((4,)), *layers, keras.layers.Dense(1)])
            model.compile(getattr(keras.optimizers, name)(0.03), "mse")
        history = model.fit(x, y, batch_size=4, epochs=2, shuffle=False, verbose=0)
        found.append([*model.get_weights(), history.history["loss"]])
    for mine, theirs in zip(*found, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=2e-5, atol=2e-6)


def tf_dsgd_scope(strategy):
    return tf.distribute.get_strategy().scope() if strategy is None else strategy.scope()


# -- conservation ---------------------------------------------------------------------------

CODECS = {
    "threshold": compression.Threshold(1.0),
    "entropy": compression.Threshold(0.5, entropy=True),
    "top_k": compression.TopK(0.25),
}


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("workers", "name"),
    [
        pytest.param(2, "threshold", marks=pytest.mark.slow),
        (3, "entropy"),
        pytest.param(4, "top_k", marks=pytest.mark.slow),
        (5, "threshold"),
    ],
)
def test_what_was_sent_and_what_is_kept_are_all_changes(workers, name):
    """To the bit, on threads, at each drain; and all copies are equal then."""
    strategy = tf_dsgd.CompressedAsyncStrategy(
        tf_dsgd.LocalCluster(workers), compression=CODECS[name]
    )
    model = linear(strategy)
    total = np.zeros((6, 4), "float32")
    for seed in range(3):
        data = dyadic(40, seed)
        model.fit(*data, batch_size=BATCH, shuffle=False, verbose=0)
        total = total - gradients(*data).sum(0)
        weights = model.get_weights()[0]
        np.testing.assert_array_equal(weights + residuals(strategy), total)
        assert np.abs(weights).max() > 0 and np.abs(residuals(strategy)).max() > 0
        assert_copies_are_equal(strategy)
    helpers.assert_ledger_balances(strategy)
    assert strategy.steps == strategy.updates == 120
