"""One worker, periods above 1: closed forms that hold whatever the engine."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import optimizers

import tf_dsgd
from tests import helpers
from tests.equivalence import twin


@pytest.mark.few(1)
@pytest.mark.thin
@pytest.mark.parametrize("engine", twin.ENGINES)
@pytest.mark.parametrize("period", [2, 3, 4])
def test_sgd_is_plain_sgd_at_any_period(period, engine):
    """The local copy takes the very steps that the server takes later in one sum."""
    strategy = tf_dsgd.DownpourStrategy(
        twin.ENGINES[engine](), push_every=period, fetch_every=period
    )
    make, (x, y) = twin.mlp(lambda: optimizers.SGD(0.05)), twin.data()
    plain, _, logs = twin.fit(make, x, y)
    with strategy.scope():
        model, _, got = twin.fit(make, x, y)
    helpers.assert_close(twin.state(model.weights), twin.state(plain.weights), 2e-6)
    np.testing.assert_allclose(got["loss"], logs["loss"], rtol=1e-5)
    # The epoch's end pushes the rest.
    pushes = twin.EPOCHS * -(-twin.STEPS // twin.EPOCHS // period)
    assert strategy.updates == int(model.optimizer.iterations) == pushes
    assert strategy.steps == twin.STEPS


OPTIONS = {
    "loss_scale_factor": {"loss_scale_factor": 64.0},
    "loss_scale_factor_clipnorm": {"loss_scale_factor": 64.0, "clipnorm": 0.05},
    "clipnorm": {"clipnorm": 0.05},
}


@pytest.mark.few(4)
@pytest.mark.parametrize("periods", [(1, 3), (3, 1), (3, 3)], ids=str)
@pytest.mark.parametrize("name", OPTIONS)
def test_options_of_sgd_at_any_period(name, periods):
    """Of a local step, too: a scaled or unclipped one is far off at the next gradient.

    Where a worker fetches before it sends, the gradients of a message are all of the same weights.
    """
    push_every, fetch_every = periods
    strategy = tf_dsgd.DownpourStrategy(
        helpers.workers(1), push_every=push_every, fetch_every=fetch_every
    )
    make, (x, y) = twin.mlp(lambda: optimizers.SGD(0.05, **OPTIONS[name])), twin.data()
    with strategy.scope():
        model, _, _ = twin.fit(make, x, y)
    if fetch_every == 1:
        want = sums_of_clipped(push_every, OPTIONS[name].get("clipnorm"))
    else:
        want = twin.state(twin.fit(make, x, y)[0].weights)
    helpers.assert_close(twin.state(model.weights), want, 2e-6)


@pytest.mark.parametrize("clipping", ["clipnorm", "clipvalue", "global_clipnorm"])
def test_a_local_step_that_is_clipped_does_not_explode(clipping):
    """From 1 in steps of 0.01 down to 0.5, as plain Keras; unclipped each step is one of 200."""
    strategy = tf_dsgd.DownpourStrategy(helpers.workers(1), push_every=1, fetch_every=50)

    def make():
        layer = keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")
        model = keras.Sequential([keras.Input((1,)), layer])
        model.compile(optimizers.SGD(1.0, **{clipping: 0.01}), "mse")
        return model

    x, y = np.full((50, 1), 10.0, "float32"), np.zeros((50, 1), "float32")
    plain, _, _ = twin.fit(make, x, y, batch_size=1, epochs=1)
    with strategy.scope():
        model, _, _ = twin.fit(make, x, y, batch_size=1, epochs=1)
    helpers.assert_close(twin.state(model.weights), twin.state(plain.weights), 1e-5)
    helpers.assert_close(model.get_weights(), [[[0.5]]], 1e-5)


def test_a_local_step_is_clipped_where_the_shard_clips_what_is_accumulated():
    """Local steps of 0.01 for 4 mini-batches, while nothing is applied: four different losses."""
    strategy = tf_dsgd.DownpourStrategy(helpers.workers(1), fetch_every=4)
    with strategy.scope():
        layer = keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")
        model = keras.Sequential([keras.Input((1,)), layer])
        optimizer = optimizers.SGD(1.0, clipnorm=0.01, gradient_accumulation_steps=4)
        model.compile(optimizer, "mse")
    x, y = np.full((4, 1), 10.0, "float32"), np.zeros((4, 1), "float32")
    loss = model.fit(x, y, batch_size=1, verbose=0).history["loss"][0]
    np.testing.assert_allclose(
        loss, np.mean([(10.0 * (1 - 0.01 * k)) ** 2 for k in range(4)]), 1e-5
    )
    helpers.assert_close(model.get_weights(), [[[0.99]]], 1e-5)


@pytest.mark.parametrize("periods", [(1, 2), (2, 2)], ids=str)
def test_clipvalue_does_not_hide_an_overflow(periods):
    """Float16 overflows at both mini-batches, and what is infinite is no step of 0.01."""
    push_every, fetch_every = periods
    keras.config.set_dtype_policy("mixed_float16")
    strategy = tf_dsgd.DownpourStrategy(
        helpers.workers(1), push_every=push_every, fetch_every=fetch_every
    )
    with strategy.scope():
        layer = keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")
        model = keras.Sequential([keras.Input((1,)), layer])
        model.compile(optimizers.SGD(1.0, clipvalue=0.01), "mse")
    x, y = np.full((2, 1), 100.0, "float32"), np.zeros((2, 1), "float32")
    model.fit(x, y, batch_size=1, verbose=0)
    assert model.get_weights() == [[[1.0]]]
    assert int(model.optimizer.iterations) == 0
    assert float(model.optimizer.dynamic_scale) == 2.0**15 / 2**strategy.updates


def sums_of_clipped(push_every, clipnorm, rate=0.05):
    """A tape's gradients at weights that move by `push_every` clipped ones at once."""
    x, y = twin.data()
    keras.utils.set_random_seed(7)
    model = twin.mlp(lambda: optimizers.SGD(rate))()
    batches = range(0, twin.EXAMPLES, twin.BATCH)
    for _ in range(twin.EPOCHS):
        for first in range(0, len(batches), push_every):
            moves = [0.0] * len(model.trainable_variables)
            for begin in batches[first : first + push_every]:
                batch = slice(begin, begin + twin.BATCH)
                with tf.GradientTape() as tape:
                    loss = tf.reduce_mean((model(x[batch]) - y[batch]) ** 2)
                gradients = tape.gradient(loss, model.trainable_variables)
                if clipnorm is not None:
                    gradients = [tf.clip_by_norm(g, clipnorm) for g in gradients]
                moves = [m - rate * g for m, g in zip(moves, gradients, strict=True)]
            for variable, move in zip(model.trainable_variables, moves, strict=True):
                variable.assign_add(move)
    return twin.state(model.weights)


@pytest.mark.few(1)
@pytest.mark.parametrize("engine", twin.ENGINES)
def test_a_local_rate_of_zero_is_the_rule_none(engine):
    """Neither moves between fetches, so both are one step on the sum of the gradients."""
    x, y = twin.data()
    weights = []
    for rule in ("none", tf_dsgd.LocalSGD(0.0)):
        strategy = tf_dsgd.DownpourStrategy(
            twin.ENGINES[engine](), push_every=3, fetch_every=3, local_rule=rule
        )
        with strategy.scope():
            model, _, _ = twin.fit(twin.mlp(lambda: optimizers.SGD(0.02)), x, y)
        weights.append(twin.state(model.weights))
    helpers.assert_close(weights[0], weights[1], 0)
    # Plain Keras on batches of three times the size sees the mean of what is summed here.
    plain, _, _ = twin.fit(twin.mlp(lambda: optimizers.SGD(0.06)), x, y, batch_size=3 * twin.BATCH)
    helpers.assert_close(weights[0], twin.state(plain.weights), 2e-6)


@pytest.mark.parametrize(
    ("local_rule", "weight"), [("sgd", -20.0), ("none", -20.0), ("optimizer", -17.0)]
)
def test_a_schedule_follows_mini_batches_not_updates(local_rule, weight):
    """Rate 1 at steps 0 to 16, then 0; 8 pushes of 4 gradients of 1 each.

    Pushes that arrive at steps 0, 4, 8, 12 and 16 move the weight by 4 each. A worker that runs the
    optimizer moves it at each of steps 0 to 16. By updates, of which there are 8, the rate would
    stay at 1 and the weight end at -32.
    """
    strategy = tf_dsgd.DownpourStrategy(
        helpers.workers(1), push_every=4, fetch_every=4, local_rule=local_rule
    )
    rate = optimizers.schedules.PiecewiseConstantDecay([16], [1.0, 0.0])
    x, y = helpers.ones(8 * 32)
    with strategy.scope():
        model = helpers.constant_gradient_model(optimizers.SGD(rate))
    model.fit(x, y, batch_size=8, verbose=0)
    assert strategy.updates == 8
    assert int(model.optimizer.iterations) == (32 if local_rule == "optimizer" else 8)
    assert float(model.get_weights()[0][0, 0]) == weight


@pytest.mark.parametrize("local_rule", ["sgd", "none", "optimizer"])
def test_adam_corrects_its_bias_by_updates(local_rule):
    """Adam on a constant gradient moves by exactly its rate at each update, if it counts updates.

    A worker that runs the optimizer itself takes one such step for each mini-batch.
    """
    strategy = tf_dsgd.DownpourStrategy(
        helpers.workers(1), push_every=4, fetch_every=4, local_rule=local_rule
    )
    x, y = helpers.ones(8 * 32)
    with strategy.scope():
        model = helpers.constant_gradient_model(optimizers.Adam(0.125, epsilon=0.0))
    model.fit(x, y, batch_size=8, verbose=0)
    moves = 32 if local_rule == "optimizer" else 8
    np.testing.assert_allclose(model.get_weights()[0], np.full((3, 1), -0.125 * moves), rtol=1e-4)
