"""`train_on_batch` and its like run here, in the main thread, between what workers do."""

import contextlib

import keras
import numpy as np
import pytest

import tf_dsgd
from tests import helpers

DOWNPOUR, AVERAGING = tf_dsgd.DownpourStrategy, tf_dsgd.PeriodicAveragingStrategy
PEERS = {"compression": tf_dsgd.compression.TopK(1.0)}
OWN = {
    "optimizer": (DOWNPOUR, {"local_rule": "optimizer"}, "adam"),
    "local": (AVERAGING, {"optimizer_state": "local"}, "adam"),
    "reset": (AVERAGING, {"optimizer_state": "reset"}, "rmsprop"),
    "elastic": (tf_dsgd.ElasticAveragingStrategy, {}, "sgd"),
    "peers": (tf_dsgd.CompressedAsyncStrategy, PEERS, "sgd"),
}
SHARED = {
    "downpour": (DOWNPOUR, {}, "adam"),
    "average": (AVERAGING, {}, "adam"),
    "no slots": (DOWNPOUR, {"local_rule": "optimizer"}, "sgd"),
    "no slots, local": (AVERAGING, {"optimizer_state": "local"}, "sgd"),
}


def make(scope, optimizer):
    keras.utils.set_random_seed(0)
    with scope:
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile(optimizer, "mse")
    return model


def data():
    x = np.random.default_rng(0).normal(size=(16, 3)).astype("float32")
    return x, x.sum(1, keepdims=True)


def fit(model):
    model.fit(*data(), batch_size=4, shuffle=False, verbose=0)


@pytest.mark.parametrize("name", OWN)
def test_train_on_batch_is_refused_where_workers_have_their_own(name):
    """Before they have it and after; and what they have stays as it is."""
    kind, options, optimizer = OWN[name]
    x, y = data()
    weights = []
    for refused in (True, False):
        cluster = tf_dsgd.SimulatedCluster(2, compute_seconds=[1.0, 1.5], seed=0)
        model = make(kind(cluster, **options).scope(), optimizer)
        for _ in range(2):
            if refused:
                with pytest.raises(ValueError, match=r"train_on_batch.*of its own.*model\.fit"):
                    model.train_on_batch(x, y)
            fit(model)
        weights.append(model.get_weights())
    helpers.assert_close(*weights, tolerance=0.0)


@pytest.mark.parametrize("name", SHARED)
def test_train_on_batch_and_fit_go_on_from_each_other(name):
    """As in plain Keras, where one worker's state is what is read outside."""
    kind, options, optimizer = SHARED[name]
    x, y = data()

    def weights(scope):
        model = make(scope, optimizer)
        for _ in range(2):
            model.train_on_batch(x[:4], y[:4])
            fit(model)
        return model.get_weights()

    strategy = kind(tf_dsgd.LocalCluster(1), **options)
    plain = weights(contextlib.nullcontext())
    helpers.assert_close(weights(strategy.scope()), plain, tolerance=1e-5)
