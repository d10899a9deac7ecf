"""`MultiOptimizer`: one optimizer for some variables, another for others."""

import contextlib

import keras
import pytest
import tensorflow as tf
from keras import optimizers

import tf_dsgd
from tests import helpers
from tests.equivalence import twin


def multi(default, kernels, **options):
    return optimizers.MultiOptimizer(
        optimizers.OptimizerMap(default, {".*/kernel": kernels}), **options
    )


@pytest.mark.few(3)
@pytest.mark.parametrize("periods", [(1, 3), (3, 3)], ids=str)
@pytest.mark.parametrize("option", ["plain", "clipnorm", "loss_scale_factor"])
def test_sgd_of_two_rates_is_plain_keras_at_any_period(option, periods):
    """A local step has each variable's own rate, and clips by its own optimizer's norm."""
    clipnorm = 0.05 if option == "clipnorm" else None
    scale = 64.0 if option == "loss_scale_factor" else None
    push_every, fetch_every = periods

    def optimizer():
        kernels = optimizers.SGD(0.05, clipnorm=clipnorm)
        return multi(optimizers.SGD(0.02), kernels, loss_scale_factor=scale)

    strategy = tf_dsgd.DownpourStrategy(
        helpers.workers(1), push_every=push_every, fetch_every=fetch_every
    )
    make, (x, y) = twin.mlp(optimizer), twin.data()
    plain, _, _ = twin.fit(make, x, y)
    with strategy.scope():
        model, _, _ = twin.fit(make, x, y)
    helpers.assert_close(twin.state(model.weights), twin.state(plain.weights), 2e-6)
    each = [model.optimizer, *model.optimizer.optimizers]
    assert [int(o.iterations) for o in each] == [strategy.updates] * 3


def simulated(**options):
    return tf_dsgd.SimulatedCluster(3, compute_seconds=[1.0, 1.7, 2.9], seed=0, **options)


# What asks for a rate, or for what a worker last fetched.
ALIKE = {
    "staleness_scaling": (
        lambda: tf_dsgd.DownpourStrategy(simulated(), staleness_scaling="inverse"),
        lambda: optimizers.SGD(0.05),
    ),
    "softsync": (
        lambda: tf_dsgd.SoftsyncStrategy(simulated(), gradients_per_update=2),
        lambda: optimizers.Adam(0.02),
    ),
    "adaptive_revision": (
        lambda: tf_dsgd.DownpourStrategy(simulated(), push_every=2, fetch_every=2),
        lambda: tf_dsgd.optimizers.AdaptiveRevision(0.1),
    ),
    "two_shards": (
        lambda: tf_dsgd.DownpourStrategy(simulated(num_shards=2), push_every=2),
        lambda: optimizers.Adam(0.02, use_ema=True, ema_momentum=0.8),
    ),
}


@pytest.mark.few(2)
@pytest.mark.parametrize("name", ALIKE)
def test_two_equal_parts_are_the_one_optimizer(name):
    start, optimizer = ALIKE[name]
    weights = []
    for make in (optimizer, lambda: multi(optimizer(), optimizer())):
        strategy = start()
        with strategy.scope():
            model, _, _ = twin.fit(twin.mlp(make), *twin.data())
        weights.append(twin.state(model.weights))
        assert int(model.optimizer.iterations) == strategy.updates
    helpers.assert_close(weights[1], weights[0], 0)


def test_side_by_side():
    strategy = tf_dsgd.HogwildStrategy(tf_dsgd.LocalCluster(1))
    make = twin.mlp(lambda: multi(optimizers.SGD(0.05), optimizers.Adagrad(0.05)))
    twin.assert_same_as_plain(make, strategy, *twin.data())


def test_a_loss_scale_around_it_is_refused():
    keras.config.set_dtype_policy("mixed_float16")
    strategy = tf_dsgd.DownpourStrategy(helpers.workers(1))
    with strategy.scope():
        model = twin.mlp(lambda: multi(optimizers.SGD(0.05), optimizers.SGD(0.05)))()
    with pytest.raises(ValueError, match=r"LossScaleOptimizer with MultiOptimizer.*bfloat16"):
        model.fit(*twin.data(), verbose=0)


def test_a_loss_scale_around_it_is_kerass_where_workers_run_it():
    keras.config.set_dtype_policy("mixed_float16")
    strategy = tf_dsgd.DownpourStrategy(helpers.workers(1), local_rule="optimizer")
    make = twin.mlp(lambda: multi(optimizers.SGD(0.05), optimizers.Adam(0.02)))
    x, y = twin.data()
    plain, _, _ = twin.fit(make, x, 100.0 * y)
    with strategy.scope():
        model, _, _ = twin.fit(make, x, 100.0 * y)
    scale = float(plain.optimizer.dynamic_scale)
    assert scale == float(model.optimizer.dynamic_scale) < 2.0**15
    helpers.assert_close(twin.state(model.weights), twin.state(plain.weights))


@pytest.mark.parametrize("built", [False, True])
def test_parts_that_are_made_by_a_function(built):
    strategy = tf_dsgd.DownpourStrategy(helpers.workers(1))
    with strategy.scope():
        variable = tf.Variable(1.0)
        optimizer = optimizers.MultiOptimizer(lambda variable: optimizers.SGD(0.25))
        if built:
            optimizer.build([variable])

    def step(batch):
        optimizer.apply([batch], [variable])

    dataset = tf.data.Dataset.from_tensors(1.0)
    refusal = pytest.raises(ValueError, match=r"a function .*Call optimizer.build\(variables\)")
    for batch in strategy.experimental_distribute_dataset(dataset):
        with contextlib.nullcontext() if built else refusal:
            strategy.run(step, args=(batch,))
    strategy.settle()
    assert float(variable) == (0.75 if built else 1.0)
