"""A wrong value of any public argument: one error that names it and a remedy. Nothing hangs."""

import contextlib
from functools import partial

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_dsgd
from tests import helpers
from tf_dsgd import console


def simulated(**changes):
    good = {"num_workers": 2, "compute_seconds": 1.0, "network_seconds": 0.0, "seed": 0}
    return tf_dsgd.SimulatedCluster(**{**good, **changes})


downpour, local = tf_dsgd.DownpourStrategy, tf_dsgd.LocalCluster
softsync = partial(tf_dsgd.SoftsyncStrategy, gradients_per_update=2)


@pytest.mark.parametrize(
    ("scaling", "shown"),
    [
        (lambda: 1.0, "fails at 0"),
        (lambda tau: "half", "fails at 0"),
        (lambda tau: None, "fails at 0"),
        (lambda tau: 1.0 if tau == 0 else 0.5, "fails at 0"),
        (float, "fails at 0"),
        (lambda tau: 1 / 0, "fails at 0"),
        (lambda tau: 1 / tau, "inf at 0"),
        (lambda tau: 1.0 - tf.cast(tau, tf.float32), "at 2"),
        (lambda tau: tf.where(tau == 7, float("nan"), 1.0), "nan at 7"),
        (lambda tau: tf.where(tau > 99, -1.0, 1.0), "at 100"),
    ],
)
@pytest.mark.parametrize("strategy", [downpour, softsync], ids=["downpour", "softsync"])
def test_a_scaling_that_is_no_factor(strategy, scaling, shown):
    with pytest.raises(ValueError, match=f"staleness_scaling must .*{shown}"):
        strategy(local(1), staleness_scaling=scaling)


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    ("made", "argument"),
    [
        (tf_dsgd.DownpourStrategy, "push_evry"),
        (softsync, "push_every"),
        (tf_dsgd.LocalCluster, "workers"),
        (simulated, "latency"),
    ],
)
def test_unknown_argument(made, argument):
    with pytest.raises(TypeError, match=argument):
        made(**{argument: 1})


def test_options_are_keywords_only():
    with pytest.raises(TypeError):
        tf_dsgd.DownpourStrategy(None, 4)
    with pytest.raises(TypeError):
        tf_dsgd.SoftsyncStrategy(None, 4)
    with pytest.raises(TypeError, match="gradients_per_update"):
        tf_dsgd.SoftsyncStrategy(local(1))
    with pytest.raises(TypeError):
        tf_dsgd.SimulatedCluster(2, 1.0, 0.0, 0)


def data():
    return helpers.ones(16)


@pytest.mark.timeout(60)
def test_a_model_from_outside_the_scope():
    """Made outside and trained inside: this strategy trains it, or the error names the scope."""
    strategy = tf_dsgd.DownpourStrategy(tf_dsgd.LocalCluster(2))
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1, use_bias=False)])
    model.set_weights([np.zeros((3, 1))])
    with helpers.works_or_explains("scope"), strategy.scope():
        model.compile(keras.optimizers.SGD(1.0), helpers.mean_output)
        model.fit(*data(), batch_size=2, verbose=0)
        assert strategy.steps == 8
        np.testing.assert_array_equal(model.get_weights()[0], np.full((3, 1), -8.0, "f"))


@pytest.mark.timeout(60)
def test_an_optimizer_from_outside_the_scope():
    strategy = tf_dsgd.DownpourStrategy(tf_dsgd.LocalCluster(2))
    optimizer = keras.optimizers.SGD(1.0, momentum=1.0)
    with helpers.works_or_explains("optimizer", "scope"):
        with strategy.scope():
            model = helpers.constant_gradient_model(optimizer)
        model.fit(*data(), batch_size=2, verbose=0)
        assert strategy.steps == int(optimizer.iterations) == 8
        np.testing.assert_array_equal(model.get_weights()[0], np.full((3, 1), -36.0, "f"))


@pytest.mark.timeout(60)
def test_an_optimizer_from_outside_whose_loss_is_scaled():
    strategy = tf_dsgd.DownpourStrategy(tf_dsgd.LocalCluster(2))
    inner = keras.optimizers.SGD(1.0, name="mine")
    with strategy.scope():
        scaled = keras.optimizers.LossScaleOptimizer(inner)
        model = helpers.constant_gradient_model(scaled)
    with pytest.raises(ValueError, match=r"its optimizer 'mine' was not created .*scope"):
        model.fit(*data(), batch_size=2, verbose=0)


@pytest.mark.timeout(60)
def test_an_optimizer_of_another_strategy():
    first = tf_dsgd.DownpourStrategy(tf_dsgd.LocalCluster(2))
    second = tf_dsgd.DownpourStrategy(tf_dsgd.LocalCluster(2))
    with first.scope():
        optimizer = keras.optimizers.SGD(1.0)
    with helpers.works_or_explains("optimizer", "scope"):
        with second.scope():
            model = helpers.constant_gradient_model(optimizer)
        model.fit(*data(), batch_size=2, verbose=0)
        assert (first.steps, second.steps) == (0, 8)
        np.testing.assert_array_equal(model.get_weights()[0], np.full((3, 1), -8.0, "f"))


@pytest.mark.timeout(60)
def test_one_scope_inside_another_is_refused():
    outer = tf_dsgd.DownpourStrategy(tf_dsgd.LocalCluster(2))
    inner = tf_dsgd.DownpourStrategy(tf_dsgd.LocalCluster(2))
    with outer.scope(), pytest.raises((RuntimeError, ValueError), match="scope"), inner.scope():
        pass


@pytest.mark.timeout(60)
def test_two_strategies_train_side_by_side():
    """Each with its own model, their fits in turn: neither sees the other's workers or counts."""
    strategies = [
        tf_dsgd.DownpourStrategy(tf_dsgd.LocalCluster(2)),
        tf_dsgd.DownpourStrategy(simulated(), push_every=2),
    ]
    models = []
    for strategy in strategies:
        with strategy.scope():
            models.append(helpers.constant_gradient_model(keras.optimizers.SGD(1.0)))
    for turn in range(1, 3):
        for strategy, model in zip(strategies, models, strict=True):
            model.fit(*data(), batch_size=2, verbose=0)
            assert strategy.steps == 8 * turn
            np.testing.assert_array_equal(model.get_weights()[0], np.full((3, 1), -8.0 * turn, "f"))


@pytest.mark.timeout(60)
def test_two_models_under_one_strategy():
    """One scope, two models, fits in turn: it works, or the error says how to do it."""
    strategy = tf_dsgd.DownpourStrategy(tf_dsgd.LocalCluster(2))
    with helpers.works_or_explains("strategy", "model"):
        with strategy.scope():
            models = [
                helpers.constant_gradient_model(keras.optimizers.SGD(rate)) for rate in (1.0, 2.0)
            ]
        for turn in (1, 2):
            for model, rate in zip(models, (1.0, 2.0), strict=True):
                model.fit(*data(), batch_size=2, verbose=0)
                np.testing.assert_array_equal(
                    model.get_weights()[0], np.full((3, 1), -8.0 * turn * rate, "f")
                )


@pytest.mark.timeout(60)
def test_a_fit_that_keras_refuses_leaves_a_working_strategy():
    """Wrong data of a user's: Keras's own error comes out, and the next fit trains."""
    strategy = tf_dsgd.DownpourStrategy(tf_dsgd.LocalCluster(2))
    with strategy.scope():
        model = helpers.constant_gradient_model(keras.optimizers.SGD(1.0))
    with pytest.raises(Exception, match=r"shape|incompatible"):
        model.fit(np.ones((16, 5), "f"), np.ones((16, 1), "f"), batch_size=2, verbose=0)
    model.fit(*data(), batch_size=2, verbose=0)
    assert strategy.steps == 8


@pytest.mark.timeout(60)
def test_more_workers_than_batches():
    """Most of sixteen workers never get a batch, and nobody waits for them."""
    for cluster in (tf_dsgd.LocalCluster(4), simulated(num_workers=16)):
        strategy = tf_dsgd.DownpourStrategy(cluster, push_every=5, fetch_every=7)
        with strategy.scope():
            model = helpers.constant_gradient_model(keras.optimizers.SGD(1.0))
        x, y = helpers.ones(3)
        model.fit(x, y, batch_size=2, epochs=2, verbose=0)
        assert strategy.steps == 4
        np.testing.assert_array_equal(model.get_weights()[0], np.full((3, 1), -4.0, "f"))


@pytest.mark.timeout(60)
@pytest.mark.parametrize("what", ["metric", "layer"])
def test_state_from_outside_the_scope_is_not_silently_shared(what):
    """Workers would overwrite each other's counts and statistics: refused, by name."""
    strategy = tf_dsgd.DownpourStrategy(tf_dsgd.LocalCluster(2))
    metric = keras.metrics.MeanAbsoluteError(name="outside")
    layer = keras.layers.BatchNormalization(center=False, scale=False, name="outside")
    layer.build((None, 3))
    with strategy.scope():
        layers = [layer] if what == "layer" else []
        model = keras.Sequential([keras.Input((3,)), *layers, keras.layers.Dense(1)])
        model.compile("sgd", "mse", metrics=[metric] if what == "metric" else ["mae"])
    with pytest.raises(ValueError, match=r"outside/.*scope"):
        model.fit(*data(), batch_size=2, verbose=0)


@pytest.mark.few(2)
@pytest.mark.thin
@pytest.mark.parametrize("good", [0, 2, 11, 37])
@pytest.mark.parametrize("kind", ["generator", "tf_data"])
def test_batches_before_one_that_fails_are_trained_on(kind, good):
    """They are pulled several at a time; the error comes when those before it are used.

    Keras itself draws two of a generator before it begins.
    """
    x, y = helpers.regression(8 * 40)

    def batches():
        for b in range(40):
            if b == good:
                raise OSError("a disk is full")
            yield x[8 * b : 8 * b + 8], y[8 * b : 8 * b + 8]

    def check(number, a, b):
        with tf.control_dependencies([tf.debugging.Assert(number != good, ["a disk is full"])]):
            return tf.identity(a), tf.identity(b)

    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(8).enumerate()
    data = batches() if kind == "generator" else dataset.map(lambda n, batch: check(n, *batch))
    strategy = tf_dsgd.DownpourStrategy(tf_dsgd.LocalCluster(2))
    with strategy.scope():
        model = helpers.recording_model(keras.optimizers.SGD(0.01))
    ids = model.get_layer("ids").ids
    with pytest.raises(Exception, match="a disk is full"):
        model.fit(data, shuffle=False, verbose=0)
    assert strategy.steps == good
    np.testing.assert_array_equal(ids.take(), np.arange(8 * good))
    model.fit(x, y, batch_size=8, verbose=0)
    assert strategy.steps == good + 40


def test_a_model_that_was_compiled_in_another_strategys_scope_is_named():
    one, other = (tf_dsgd.DownpourStrategy(tf_dsgd.LocalCluster(2)) for _ in range(2))
    with one.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)], name="mine")
    with other.scope():
        model.compile("sgd", "mse")
    with pytest.raises(ValueError, match=r"model 'mine' was made in .* optimizer 'sgd\w*' was not"):
        model.fit(np.ones((4, 3)), np.ones((4, 1)), verbose=0)


def test_functions_that_run_eagerly_are_refused():
    strategy = tf_dsgd.DownpourStrategy(tf_dsgd.LocalCluster(2))
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    data = tf.data.Dataset.from_tensors((np.ones((4, 3)), np.ones((4, 1))))
    tf.config.run_functions_eagerly(True)
    try:
        with pytest.raises(ValueError, match="run_functions_eagerly is not possible"):
            model.fit(data, shuffle=False, verbose=0)
    finally:
        tf.config.run_functions_eagerly(False)
    model.fit(data, shuffle=False, verbose=0)


TURNS = [(m, action) for m in (0, 1) * 2 for action in ("fetch", "push")]


@pytest.mark.parametrize(
    "cluster",
    [
        tf_dsgd.LocalCluster(2),
        tf_dsgd.SimulatedCluster(2, compute_seconds=1.0, network_seconds=0.0, seed=0),
        tf_dsgd.SimulatedCluster(2, schedule=TURNS),
    ],
    ids=["local", "simulated", "scheduled"],
)
def test_an_operation_that_fails_on_a_worker_says_why_in_one_line(cluster):
    """Without the dozens of lines that name the code which made each node on the way."""
    strategy = tf_dsgd.DownpourStrategy(cluster)
    with strategy.scope():
        inputs = keras.Input((1,), dtype="int32")
        rows = keras.layers.Flatten()(keras.layers.Embedding(5, 2, name="table")(inputs))
        model = keras.Model(inputs, keras.layers.Dense(1)(rows))
        model.compile("sgd", "mse")
    ids = np.array([[1], [7], [2], [3]])
    with pytest.raises(tf.errors.InvalidArgumentError) as caught:
        model.fit(ids, np.ones((4, 1)), batch_size=1, verbose=0)
    assert len(str(caught.value).splitlines()) == 1
    assert "7 is not in [0, 5)" in str(caught.value) and "table" in str(caught.value)


@pytest.mark.parametrize("in_function", [False, True])
def test_a_loop_over_data_that_are_not_distributed_is_refused(in_function):
    """Else the optimizer would train in the main thread, and no worker would take part."""
    strategy = tf_dsgd.DownpourStrategy(tf_dsgd.LocalCluster(2))
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        optimizer = keras.optimizers.SGD(0.1)
        optimizer.build(model.trainable_variables)

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(x) ** 2)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply(gradients, model.trainable_variables)

    def run(x):
        strategy.run(step, (x,))

    before = model.get_weights()
    with pytest.raises(ValueError, match="dataset that is not distributed") as caught:
        (tf.function(run) if in_function else run)(tf.ones((4, 3)))
    if not in_function:  # AutoGraph raises another
        assert console.NOTHING_TRAINED in caught.value.__notes__
    for a, b in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(a, b)
    assert strategy.steps == 0


def in_float8(strategy, optimizer=None):
    keras.utils.set_random_seed(0)
    with strategy.scope() if strategy else contextlib.nullcontext():
        model = keras.Sequential([keras.Input((16,)), keras.layers.Dense(16)])
        model.layers[0].quantize("float8")
        model.compile(optimizer or keras.optimizers.SGD(0.01), "mse")
    x = np.random.default_rng(0).standard_normal((160, 16)).astype("float32")
    losses = model.fit(x, x, batch_size=8, epochs=2, verbose=0, shuffle=False).history["loss"]
    return losses, [weight.numpy() for weight in model.layers[0].weights]


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "make",
    [
        lambda: downpour(local(1), push_every=5, fetch_every=5),
        lambda: downpour(local(1), push_every=5, fetch_every=5, local_rule="none"),
        lambda: downpour(local(1), fetch_every=5),
        lambda: downpour(local(1), compression=tf_dsgd.compression.Threshold(0.01)),
        lambda: downpour(local(1), wire_dtype="float16"),
        lambda: downpour(
            local(1), local_rule="optimizer", compression=tf_dsgd.compression.Threshold(0.01)
        ),
        lambda: downpour(local(2), local_rule="optimizer"),
        lambda: softsync(local(2)),
    ],
)
def test_gradients_that_are_new_values_are_not_added_up(make):
    """Keras assigns the gradients of float8's scales."""
    with pytest.raises(ValueError, match=r"inputs_scale.* takes its gradient for its new value"):
        in_float8(make())


@pytest.mark.slow
@pytest.mark.parametrize(
    "make",
    [
        lambda: downpour(local(1)),
        lambda: downpour(local(1), push_every=5, fetch_every=5, local_rule="optimizer"),
        lambda: tf_dsgd.PeriodicAveragingStrategy(local(1), average_every=5),
    ],
)
def test_float8_trains_as_in_plain_keras_where_they_are_not(make):
    (losses, weights), (plain, expected) = in_float8(make()), in_float8(None)
    # Eight bits: a last bit of a weight may be a whole step of what it is rounded to.
    np.testing.assert_allclose(losses, plain, rtol=1e-3)
    for mine, other in zip(weights, expected, strict=True):
        np.testing.assert_allclose(mine, other, rtol=0.02, atol=2e-3)


def test_a_dataset_with_the_options_of_keras_queues_is_told_which():
    def with_threads(number):
        options = tf.data.Options()
        options.autotune.enabled = False
        options.threading.private_threadpool_size = number
        return data.with_options(options)

    data = tf.data.Dataset.from_tensor_slices((np.ones((8, 1)), np.ones((8, 1)))).batch(4)
    with downpour(local(1)).scope():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    with pytest.raises(ValueError, match="leave one of them out"):
        model.fit(with_threads(1), shuffle=False, verbose=0)
    model.fit(with_threads(2), shuffle=False, verbose=0)
