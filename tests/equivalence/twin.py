"""Trains a model twice, by plain Keras and under a strategy, and compares what that leaves."""

import keras
import numpy as np
import tensorflow as tf

import tf_dsgd
from tests import helpers
from tf_dsgd.optimizers.delay import DelayTolerantOptimizer

ENGINES = helpers.engines(
    local=lambda: tf_dsgd.LocalCluster(1),
    simulated=lambda: tf_dsgd.SimulatedCluster(
        1, compute_seconds=1.0, network_seconds=0.25, seed=0
    ),
)
EXAMPLES, BATCH, EPOCHS = 48, 8, 2
STEPS = EPOCHS * EXAMPLES // BATCH


def state(variables):
    """The values of variables, in order."""
    return [np.asarray(variable.numpy()) for variable in variables]


def fit(make_model, x, y, **fit_args):
    """Makes the model from fixed seeds and fits it on unshuffled data."""
    keras.utils.set_random_seed(7)
    model = make_model()
    built = state(model.weights) if model.built else None
    settings = {"batch_size": BATCH, "epochs": EPOCHS, "shuffle": False, "verbose": 0}
    history = model.fit(x, y, **{**settings, **fit_args})
    return model, built, history.history


def with_dense_gradients(model):
    """Has a plain model's optimizer apply the gradient of a table as a tensor of all its rows.

    Where a sparse gradient names a row twice, Keras squares both; of a dense gradient the sum. An
    optimizer of tf_dsgd does that by itself, and has other rules for rows without a gradient.
    """
    optimizer = getattr(model, "optimizer", None)
    if isinstance(optimizer, DelayTolerantOptimizer):
        return model
    if any(isinstance(layer, keras.layers.Embedding) for layer in model.layers):
        apply = optimizer.apply

        def dense(gradients, variables=None):
            apply([tf.convert_to_tensor(gradient) for gradient in gradients], variables)

        optimizer.__dict__["apply"] = dense
    return model


def assert_same_as_plain(make_model, strategy, x, y, *, slots=True, tolerance=1e-6, **fit_args):
    """Fails unless weights, optimizer state, `iterations` and logs are equal; returns both."""
    plain, plain_start, plain_logs = fit(
        lambda: with_dense_gradients(make_model()), x, y, **fit_args
    )
    with strategy.scope():
        model, start, logs = fit(make_model, x, y, **fit_args)
    if plain_start is not None:
        helpers.assert_close(start, plain_start, 0, "initial weights")
    helpers.assert_close(state(model.weights), state(plain.weights), tolerance, "weights")
    assert int(model.optimizer.iterations) == int(plain.optimizer.iterations)
    if slots:
        names = [variable.path for variable in plain.optimizer.variables]
        got, want = state(model.optimizer.variables), state(plain.optimizer.variables)
        assert len(got) == len(want)
        for name, a, b in zip(names, got, want, strict=True):
            np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance, err_msg=name)
    assert sorted(logs) == sorted(plain_logs)
    for name, values in plain_logs.items():
        np.testing.assert_allclose(logs[name], values, rtol=1e-5, atol=1e-6, err_msg=name)
    return model, plain


def mlp(optimizer, **kernel_args):
    """A small network with a hidden layer; `kernel_args` go to both layers."""

    def make():
        model = keras.Sequential(
            [
                keras.Input((5,)),
                keras.layers.Dense(6, "tanh", **kernel_args),
                keras.layers.Dense(1, **kernel_args),
            ]
        )
        model.compile(optimizer(), "mse", metrics=["mae"])
        return model

    return make


def data(features=5, seed=3):
    """A smooth problem that a small network can follow, 48 examples."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((EXAMPLES, features)).astype("float32")
    y = np.sin(x.sum(1, keepdims=True)).astype("float32")
    return x, y
