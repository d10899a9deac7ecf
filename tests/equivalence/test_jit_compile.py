"""`jit_compile=True`: XLA compiles steps, which end where those of plain Keras do, to 1e-5."""

import functools
import gc
import re
import weakref

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, optimizers

import tf_dsgd
from tests import helpers
from tests.conformance import registry
from tests.equivalence import twin
from tests.equivalence.models import MODELS
from tests.equivalence.test_other_strategies import STRATEGIES

pytestmark = pytest.mark.medium

TOLERANCE = 1e-5


def normalised_convolution():
    """Without a bias, whose gradient would be 0 but for rounding, of which Adam makes steps."""
    model = keras.Sequential(
        [
            keras.Input((6, 6, 1)),
            layers.Conv2D(3, 3, use_bias=False),
            layers.BatchNormalization(momentum=0.8),
            layers.Flatten(),
            layers.Dense(2),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizers.Adam(0.01), loss, metrics=["accuracy"])
    return model


# Layers that XLA compiles in ways of their own: loops, random numbers, statistics, rows, losses.
COMPILED = {
    "normalised_convolution": (normalised_convolution, MODELS["convolution"][1]),
    **{
        name: MODELS[name]
        for name in (*("dropout", "embedding_adagrad", "lstm", "own_train_step"),)
    },
}
OPTIMIZERS = {
    "sgd": lambda: optimizers.SGD(0.1),
    "momentum": lambda: optimizers.SGD(0.1, momentum=0.9, nesterov=True),
    "adam": lambda: optimizers.Adam(0.01),
}


def by_xla(make):
    """The same model, compiled with `jit_compile=True`."""

    def made():
        model = make()
        model.jit_compile = True
        return model

    return made


def compiled(strategy):
    """Whether XLA compiles: a worker's whole local step; forward and backward pass and metrics."""
    (program,) = strategy.batches.programs
    parts = program.program.one_step, program.program.step.function
    return tuple("_XlaMustCompile" in part.function_def.attr for part in parts)


SLOW = {"dropout", "own_train_step"}


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow if name in SLOW else []) for name in COMPILED],
)
def test_model(name):
    """The whole local step; but for rows that are kept for a message, whose number changes."""
    make, data = COMPILED[name]
    strategy = tf_dsgd.DownpourStrategy(helpers.workers(1))
    model, _ = twin.assert_same_as_plain(by_xla(make), strategy, *data(), tolerance=TOLERANCE)
    assert model.jit_compile
    assert compiled(strategy) == ("embedding" not in name, True)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("name", "optimizer"),
    [
        ("averaging", "adam"),
        ("update, periods of 3", "momentum"),
        pytest.param("downpour", "adam", marks=pytest.mark.slow),
        pytest.param("softsync", "momentum", marks=pytest.mark.slow),
    ],
)
def test_optimizer(name, optimizer):
    """On batches of 10, of which the last has 8: XLA compiles for each size."""
    made = {"downpour": tf_dsgd.DownpourStrategy, **STRATEGIES}[name]
    strategy = made(helpers.workers(1))
    make = by_xla(twin.mlp(OPTIMIZERS[optimizer]))
    x, y = twin.data()
    weights = np.linspace(0.5, 1.5, twin.EXAMPLES).astype("float32")
    twin.assert_same_as_plain(
        make, strategy, x, y, tolerance=TOLERANCE, sample_weight=weights, batch_size=10
    )
    assert compiled(strategy) == (True, True)


@pytest.mark.parametrize(
    "name", ["downpour_3_5", pytest.param("elastic_momentum", marks=pytest.mark.slow)]
)
def test_a_local_rule(name):
    """Of two simulated workers, whose turns are always the same: with XLA and without."""
    trained = []
    for jit_compile in (False, True):
        cluster = tf_dsgd.SimulatedCluster(
            2, compute_seconds=[1.0, 1.5], network_seconds=0.1, seed=0
        )
        strategy = registry.CONFIGURATIONS[name](cluster)
        make = twin.mlp(lambda: registry.optimizer(name))
        with strategy.scope():
            model, _, logs = twin.fit(by_xla(make) if jit_compile else make, *twin.data())
        assert compiled(strategy) == (jit_compile, jit_compile)
        trained.append((twin.state(model.weights), logs["loss"], strategy.staleness()))
    (weights, losses, staleness), (by_xla_weights, by_xla_losses, by_xla_staleness) = trained
    helpers.assert_close(by_xla_weights, weights, TOLERANCE)
    np.testing.assert_allclose(by_xla_losses, losses, rtol=TOLERANCE)
    assert by_xla_staleness == staleness


@pytest.mark.few(1)
@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_mixed_precision_and_several_steps_in_an_execution(policy):
    """Loss scaling among it: the scale begins so high that the first step is skipped."""
    keras.config.set_dtype_policy(policy)

    def make():
        optimizer = optimizers.Adam(0.01)
        if policy == "mixed_float16":
            optimizer = optimizers.LossScaleOptimizer(optimizer, initial_scale=2.0**40)
        model = keras.Sequential(
            [
                keras.Input((5,)),
                layers.Dense(6, "tanh"),
                layers.Dense(1, dtype="float32"),
            ]
        )
        model.compile(optimizer, "mse", metrics=["mae"], jit_compile=True, steps_per_execution=4)
        return model

    strategy = tf_dsgd.DownpourStrategy(helpers.workers(1))
    model, _ = twin.assert_same_as_plain(make, strategy, *twin.data(), tolerance=TOLERANCE)
    if policy == "mixed_float16":
        assert float(model.optimizer.dynamic_scale) < 2.0**40
    assert compiled(strategy) == (True, True)


def test_what_runs_here_is_not_compiled():
    """And need not be: on a cluster its variables are in other processes. In any order."""
    strategy = tf_dsgd.DownpourStrategy(helpers.workers(1))
    x, y = twin.data()
    plain = by_xla(twin.mlp(OPTIMIZERS["sgd"]))()
    with strategy.scope():
        model = by_xla(twin.mlp(OPTIMIZERS["sgd"]))()
    model.set_weights(plain.get_weights())
    for each in (plain, model):
        each.train_on_batch(x[:8], y[:8])
        each.fit(x, y, batch_size=8, shuffle=False, verbose=0)
    helpers.assert_close(model.get_weights(), plain.get_weights(), TOLERANCE)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=TOLERANCE)
    close(model.evaluate(x, y, verbose=0), plain.evaluate(x, y, verbose=0))
    close(model.test_on_batch(x, y), plain.test_on_batch(x, y))
    close(model.predict(x, verbose=0), plain.predict(x, verbose=0))
    close(model.predict_on_batch(x), plain.predict_on_batch(x))
    assert model.jit_compile and model.get_compile_config()["jit_compile"] is False
    made = model.train_function
    model.fit(x, y, verbose=0)
    assert model.train_function is made  # nothing is traced again


def as_text(x):
    return tf.strings.to_number(tf.strings.as_string(x))


def while_positive(x):
    """A loop of which nobody knows how long it is: of its gradient XLA would have to."""
    return tf.while_loop(lambda v: tf.reduce_sum(v) > 0.0, lambda v: (v * 0.5 - 1.0,), (x,))[0]


@pytest.mark.parametrize(
    ("function", "what"),
    [
        (as_text, r"it has no kernel for the operation AsString \(at .*AsString\)"),
        (while_positive, "XLA compilation requires a fixed tensor list size"),
    ],
)
def test_what_xla_cannot_compile_is_named(function, what):
    strategy = tf_dsgd.DownpourStrategy(helpers.workers(1))
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((5,)),
                layers.Dense(5),
                layers.Lambda(function, output_shape=(5,)),
                layers.Dense(1),
            ]
        )
        model.compile("sgd", "mse", jit_compile=True)
    with pytest.raises(tf.errors.InvalidArgumentError) as raised:
        model.fit(*twin.data(), verbose=0)
    said = f"XLA cannot compile the model's step: {what}.*Compile the model with jit_compile=False"
    assert re.match(said, raised.value.message)
    assert strategy.steps == 0
    with strategy.scope():
        model.compile("sgd", "mse", jit_compile=False)
    model.fit(*twin.data(), batch_size=8, verbose=0)
    assert strategy.steps == twin.EXAMPLES // 8


def test_a_model_that_nobody_has_any_more_is_freed():
    strategy = tf_dsgd.DownpourStrategy(tf_dsgd.LocalCluster(1))
    with strategy.scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse", jit_compile=True)
    model.fit(np.ones((4, 2)), np.ones((4, 1)), batch_size=2, verbose=0)
    alive = [weakref.ref(model), weakref.ref(strategy)]
    del model, strategy
    keras.backend.clear_session()
    gc.collect()
    assert [reference() for reference in alive] == [None, None]
