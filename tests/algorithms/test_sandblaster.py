"""Sandblaster on the simulator: the iterates of a NumPy twin, whoever computes which portion."""

import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf
from scipy import optimize

import tf_dsgd
from tests.algorithms import batch_twin
from tf_dsgd.algorithms.batch_methods import Settings
from tf_dsgd.algorithms.sandblaster import products

pytestmark = pytest.mark.medium

EXAMPLES, FEATURES, HIDDEN = 45, 3, 2
ITERATIONS = 10


@pytest.fixture
def float64():
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    yield
    keras.config.set_floatx("float32")
    keras.config.set_dtype_policy("float32")


def _data():
    random = np.random.default_rng(4)
    x = random.standard_normal((EXAMPLES, FEATURES))
    return x, np.tanh(x @ random.standard_normal((FEATURES, 1))) + 0.1


def _start():
    random = np.random.default_rng(9)
    shapes = [(FEATURES, HIDDEN), (HIDDEN,), (HIDDEN, 1), (1,)]
    return [random.standard_normal(shape) for shape in shapes]


DECAY = 2.0**-7  # Keras may have it in float32


def _function(x, y, weights):
    """Mean squared error of a small MLP and its decay, with its gradient, by hand."""
    shapes = [w.shape for w in _start()]

    def split(flat):
        parts = np.split(flat, np.cumsum([np.prod(s, dtype=int) for s in shapes])[:-1])
        return [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]

    def function(flat):
        k1, b1, k2, b2 = split(flat)
        hidden = np.tanh(x @ k1 + b1)
        error = hidden @ k2 + b2 - y
        loss = np.sum(weights * error**2) / len(x) + DECAY * np.sum(k1**2)
        back = 2 * weights * error / len(x)
        inner = (back @ k2.T) * (1 - hidden**2)
        parts = [x.T @ inner + 2 * DECAY * k1, inner.sum(0), hidden.T @ back, back.sum(0)]
        return loss, np.concatenate([part.ravel() for part in parts])

    return function


def _flat(weights):
    return np.concatenate([w.ravel() for w in weights])


def _fit(
    cluster,
    batch_size,
    iterations=ITERATIONS,
    *,
    sample_weight=None,
    note=id,
    second=None,
    **options,
):
    """(weights after each iteration, the losses of the logs, the strategy)."""
    strategy = tf_dsgd.SandblasterStrategy(cluster, **options)
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((FEATURES,)),
                keras.layers.Dense(HIDDEN, "tanh", kernel_regularizer=keras.regularizers.L2(DECAY)),
                keras.layers.Dense(1, kernel_regularizer=second),
            ]
        )
        model.compile(loss="mse")
    model.set_weights(_start())
    found = []

    def seen(epoch, logs):
        found.append(_flat(model.get_weights()))
        note(strategy)

    x, y = _data()
    history = model.fit(
        x,
        y,
        sample_weight=sample_weight,
        batch_size=batch_size,
        epochs=iterations,
        verbose=0,
        callbacks=[keras.callbacks.LambdaCallback(on_epoch_end=seen)],
    )
    return found, history.history["loss"], strategy


def _cluster(workers, shards=1, **options):
    return tf_dsgd.SimulatedCluster(
        workers,
        compute_seconds=tf_dsgd.Exponential(1.0),
        network_seconds=0.2,
        num_shards=shards,
        seed=workers,
        **options,
    )


@pytest.mark.few(1)
@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(
    ("workers", "shards", "batch_size", "method"),
    [
        (2, 1, 7, "lbfgs"),
        (4, 3, 2, "lbfgs"),
        (1, 3, 10, "cg-hs"),
        pytest.param(1, 1, 45, "lbfgs", marks=pytest.mark.slow),
        pytest.param(2, 3, 20, "cg-fr", marks=pytest.mark.slow),
        pytest.param(4, 1, 7, "cg-pr", marks=pytest.mark.slow),
        pytest.param(4, 3, 4, "gd", marks=pytest.mark.slow),
    ],
)
def test_iterates_are_the_twin_s(workers, shards, batch_size, method):
    weights = 0.5 + 0.25 * (np.arange(EXAMPLES)[:, None] % 7)  # Keras has them in float32
    found, losses, strategy = _fit(
        _cluster(workers, shards), batch_size, sample_weight=weights[:, 0], method=method
    )
    function = _function(*_data(), weights)
    expected, last = batch_twin.run(function, _flat(_start()), Settings(method=method), ITERATIONS)
    np.testing.assert_allclose(found, expected, rtol=1e-10)
    np.testing.assert_allclose(losses, [function(w)[0] for w in expected], rtol=1e-10)
    got = strategy.last_iteration()
    assert (got.number, got.evaluations) == (ITERATIONS, last.evaluations)
    np.testing.assert_allclose(got.loss, last.loss, rtol=1e-10)
    assert strategy.updates == ITERATIONS
    assert strategy.staleness().max == 0


@pytest.mark.usefixtures("float64")
def test_workers_that_die_and_stop_change_nothing():
    quiet, _, _ = _fit(_cluster(3), 4)
    faults = [
        tf_dsgd.faults.fail_at(1, step=12, back_after=5.0),
        tf_dsgd.faults.stop_at(2, step=25, seconds=40.0),
    ]
    struck, _, strategy = _fit(_cluster(3, faults=faults), 4)
    np.testing.assert_allclose(struck, quiet, rtol=1e-10)
    assert {fault for _, fault in strategy.engine.struck} == set(faults)
    ledger = strategy.ledger()
    assert ledger.in_flight == 0 and ledger.sent == ledger.applied + ledger.refused


def test_float32_comes_to_scipy_s_minimum_of_logistic_regression():
    x, y = _data()
    labels = (y > 0.1).astype(float)

    def function(flat):
        logits = x @ flat[:FEATURES, None] + flat[FEATURES]
        loss = np.mean(np.logaddexp(0, logits) - labels * logits)
        back = (1 / (1 + np.exp(-logits)) - labels) / EXAMPLES
        gradient = np.append(x.T @ back, back.sum())
        gradient[:FEATURES] += 2 * DECAY * flat[:FEATURES]
        return loss + DECAY * np.sum(flat[:FEATURES] ** 2), gradient

    expected = optimize.minimize(function, np.zeros(FEATURES + 1), jac=True, tol=1e-12)
    strategy = tf_dsgd.SandblasterStrategy(tf_dsgd.LocalCluster(2), gradient_tolerance=1e-5)
    with strategy.scope():
        decay = keras.regularizers.L2(DECAY)
        dense = keras.layers.Dense(1, kernel_regularizer=decay)
        model = keras.Sequential([keras.Input((FEATURES,)), dense])
        model.compile(loss=keras.losses.BinaryCrossentropy(from_logits=True))
    model.fit(x, labels, batch_size=8, epochs=60, verbose=0)
    assert strategy.last_iteration().is_last
    np.testing.assert_allclose(_flat(model.get_weights()), expected.x, atol=1e-4)
    np.testing.assert_allclose(strategy.last_iteration().loss, expected.fun, rtol=1e-5)


@pytest.mark.usefixtures("float64")
def test_a_small_mlp_comes_to_scipy_s_minimum():
    """From the same weights. Both kernels decay: else the minimum is where weights are infinite."""
    second = slice(-HIDDEN - 1, -1)
    inner = _function(*_data(), 1.0)

    def function(flat):
        loss, gradient = inner(flat)
        gradient[second] += 2 * DECAY * flat[second]
        return loss + DECAY * np.sum(flat[second] ** 2), gradient

    expected = optimize.minimize(function, _flat(_start()), jac=True, tol=1e-9)
    found, _, strategy = _fit(
        _cluster(2), 20, 200, gradient_tolerance=1e-7, second=keras.regularizers.L2(DECAY)
    )
    assert strategy.last_iteration().is_last
    np.testing.assert_allclose(strategy.last_iteration().loss, expected.fun, rtol=1e-9)
    np.testing.assert_allclose(found[-1], expected.x, atol=1e-4)


@pytest.mark.few(1)
@pytest.mark.parametrize("history", [1, 10])
def test_round_trips_to_the_shards_do_not_depend_on_the_history(history):
    """Three for a direction: moved?, aim, take (all dot products); and for each evaluation two."""
    seen = []

    def note(strategy):
        last = strategy.last_iteration()
        seen.append((strategy.shard_calls, last.evaluations))

    _fit(_cluster(2, 2), 15, 4, note=note, history=history)
    for (before, _), (after, evaluations) in itertools.pairwise(seen):
        assert after - before == 3 + 2 * evaluations


@pytest.mark.parametrize("size", [1, 8192, 8193, 70_001])
def test_dot_products_are_in_double_precision(size):
    """Of vectors that are taken in parts as well, the last of which is shorter."""
    random = np.random.default_rng(size)
    vectors = [random.standard_normal((size, 1), np.float32) for _ in range(3)]
    rows = random.standard_normal((10, size, 1), np.float32)
    found = products([tf.constant(v) for v in vectors], tf.constant(rows))
    expected = np.stack(vectors).astype(float)[:, :, 0] @ rows.astype(float)[:, :, 0].T
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-9)
