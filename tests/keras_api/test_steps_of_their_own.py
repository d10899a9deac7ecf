"""Steps that do more than compute one gradient: what equals plain Keras, and what is refused."""

import contextlib

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_dsgd
from tests import helpers


def data(count=24):
    random = np.random.default_rng(0)
    x = random.standard_normal((count, 3)).astype("float32")
    return x, x.sum(axis=1, keepdims=True)


class TwoOptimizers(keras.Model):
    """Its second gradient sees the first update, as in a GAN's step."""

    def __init__(self):
        super().__init__()
        self.first, self.second = keras.layers.Dense(4), keras.layers.Dense(1)
        self.one, self.two = keras.optimizers.SGD(0.1), keras.optimizers.Adam(0.01)
        self.first.build((None, 3))
        self.second.build((None, 4))
        self.built = True

    def call(self, x):
        return self.second(self.first(x))

    def train_step(self, batch):
        x, y = batch
        for layer, optimizer in ((self.first, self.one), (self.second, self.two)):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((self(x) - y) ** 2)
            weights = layer.trainable_variables
            optimizer.apply(tape.gradient(loss, weights), weights)
        return {"loss": loss}


def two_optimizers(scope):
    keras.utils.set_random_seed(0)
    with scope:
        model = TwoOptimizers()
        model.compile()
    return model


def test_local_optimizers_keep_the_order_of_two_updates():
    x, y = data()
    plain = two_optimizers(contextlib.nullcontext())
    strategy = tf_dsgd.DownpourStrategy(helpers.workers(1), local_rule="optimizer")
    ours = two_optimizers(strategy.scope())
    for model in (plain, ours):
        model.fit(x, y, batch_size=4, epochs=2, shuffle=False, verbose=0)
    for a, b in zip(plain.get_weights(), ours.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)


def test_gradient_rules_say_that_two_updates_go_together():
    strategy = tf_dsgd.DownpourStrategy(helpers.workers(1))
    model = two_optimizers(strategy.scope())
    with pytest.warns(UserWarning, match=r"applies gradients 2 times.*local_rule='optimizer'"):
        model.fit(*data(), batch_size=4, verbose=0)
    assert strategy.steps == int(model.one.iterations) == int(model.two.iterations) == 6


def normalised(scope):
    keras.utils.set_random_seed(0)
    with scope:
        layer = keras.layers.SpectralNormalization(keras.layers.Dense(2))
        model = keras.Sequential([keras.Input((3,)), layer, keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.05), "mse")
    return model


def test_a_step_that_assigns_a_weight():
    x, y = data()
    refused = normalised(tf_dsgd.DownpourStrategy(helpers.workers(1)).scope())
    with pytest.raises(ValueError, match=r"assigns the trainable variable.*local_rule='optimizer'"):
        refused.fit(x, y, batch_size=4, verbose=0)
    strategy = tf_dsgd.DownpourStrategy(helpers.workers(1), local_rule="optimizer")
    plain, ours = normalised(contextlib.nullcontext()), normalised(strategy.scope())
    for model in (plain, ours):
        model.fit(x, y, batch_size=4, shuffle=False, verbose=0)
    for a, b in zip(plain.get_weights(), ours.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)


@pytest.mark.parametrize("steps", [2, 8])
def test_predict_keeps_the_order_of_rows(steps):
    x = np.arange(203, dtype="float32")[:, None]
    with tf_dsgd.DownpourStrategy(helpers.workers(2)).scope():
        layer = keras.layers.Dense(1, kernel_initializer="ones")
        model = keras.Sequential([keras.Input((1,)), layer])
        model.compile("sgd", "mse", steps_per_execution=steps)
    for _ in range(5):
        np.testing.assert_array_equal(model.predict(x, batch_size=16, verbose=0), x)


def test_train_on_batch_and_fit_share_one_schedule():
    x, y = data()
    results = []
    for scope in (
        contextlib.nullcontext(),
        tf_dsgd.DownpourStrategy(helpers.workers(1)).scope(),
    ):
        keras.utils.set_random_seed(0)
        with scope:
            model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
            schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 1, 0.7)
            model.compile(keras.optimizers.Adam(schedule), "mse")
        for _ in range(5):
            model.train_on_batch(x[:8], y[:8])
        model.fit(x, y, batch_size=4, shuffle=False, verbose=0)
        model.train_on_batch(x[:8], y[:8])
        rate = float(keras.ops.convert_to_numpy(model.optimizer.learning_rate))
        results.append([*model.get_weights(), rate, int(model.optimizer.iterations)])
    for a, b in zip(*results, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_iterating_inside_a_function_is_explained():
    strategy = tf_dsgd.DownpourStrategy(helpers.workers(1))
    dataset = strategy.experimental_distribute_dataset(
        tf.data.Dataset.from_tensor_slices(data()).batch(4)
    )

    @tf.function
    def loop():
        for batch in dataset:
            strategy.run(lambda b: b, args=(batch,))

    with pytest.raises(RuntimeError, match="Loop outside"):
        loop()
