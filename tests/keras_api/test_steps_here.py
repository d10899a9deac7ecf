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


class Predicting(keras.callbacks.Callback):
    """At every third mini-batch: how many have moved the weights by -1, as a model at rest says."""

    def __init__(self, ask):
        super().__init__()
        self.ask = ask
        self.found = []

    def on_train_batch_end(self, batch, logs=None):
        if batch % 3 == 2:
            x, y = helpers.ones(1)
            self.found.append(-float(np.ravel(self.ask(self.model, x, y))[0]) / 3)


@pytest.mark.parametrize(
    "ask",
    [
        lambda model, x, y: model.predict_on_batch(x),
        lambda model, x, y: model.test_on_batch(x, y),
        lambda model, x, y: model.predict(x, verbose=0),
        lambda model, x, y: model(x).numpy(),
    ],
    ids=["predict_on_batch", "test_on_batch", "predict", "call"],
)
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("before", [False, True], ids=["traced then", "traced before"])
def test_a_callback_that_predicts_finds_a_model_at_rest(ask, workers, before):
    """Not one that lags by what workers have not sent yet: a period is longer than an epoch."""
    strategy = tf_dsgd.DownpourStrategy(
        tf_dsgd.LocalCluster(workers), push_every=50, fetch_every=50
    )
    with strategy.scope():
        model = helpers.constant_gradient_model(keras.optimizers.SGD(1.0))
    if before:
        assert float(np.ravel(ask(model, *helpers.ones(1)))[0]) == 0.0
    predicting = Predicting(ask)
    x, y = helpers.ones(24)
    model.fit(x, y, batch_size=2, epochs=2, verbose=0, callbacks=[predicting])
    assert predicting.found == [3, 6, 9, 12, 15, 18, 21, 24]


def test_predict_on_batch_after_a_callback_has_ended_fit():
    strategy = tf_dsgd.DownpourStrategy(tf_dsgd.LocalCluster(2), push_every=50, fetch_every=50)
    with strategy.scope():
        model = helpers.constant_gradient_model(keras.optimizers.SGD(1.0))
    x, y = helpers.ones(24)
    model.predict_on_batch(x)

    def stop(batch, logs):
        if batch == 4:
            raise ValueError("that was enough")

    callbacks = [keras.callbacks.LambdaCallback(on_train_batch_end=stop)]
    with pytest.raises(ValueError, match="enough"):
        model.fit(x, y, batch_size=2, verbose=0, callbacks=callbacks)
    assert model.predict_on_batch(x[:1]) == -3.0 * 5


def test_xla_s_predictions_are_not_made_anew():
    strategy = tf_dsgd.DownpourStrategy(tf_dsgd.LocalCluster(1))
    with strategy.scope():
        model = helpers.constant_gradient_model(keras.optimizers.SGD(1.0), jit_compile=True)
    x, y = helpers.ones(4)
    model.fit(x, y, batch_size=2, verbose=0)
    functions = []
    for _ in range(3):
        np.testing.assert_array_equal(model.predict_on_batch(x), np.full((4, 1), -6.0, "f"))
        functions.append(model.predict_function)
        model.predict(x, verbose=0)
    assert functions[0] is functions[1] is functions[2]
