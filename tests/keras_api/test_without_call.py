"""A GAN as keras.io writes it: two models, two optimizers, a `train_step`, and no `call`."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_dsgd
from tests import helpers

LATENT = 3


class GAN(keras.Model):
    def __init__(self, built=True):
        super().__init__()
        inputs = [keras.Input((n,)) for n in (2, LATENT)] if built else [None, None]
        self.discriminator, self.generator = (
            keras.Sequential([*filter(lambda each: each is not None, [first]), *layers])
            for first, layers in zip(
                inputs,
                (
                    [keras.layers.Dense(8, "relu"), keras.layers.Dense(1)],
                    [keras.layers.Dense(8, "relu"), keras.layers.Dense(2)],
                ),
                strict=True,
            )
        )
        self.seeds = keras.random.SeedGenerator(5)

    def compile(self, d_optimizer, g_optimizer, loss_fn):
        super().compile(optimizer=None)
        self.d_optimizer, self.g_optimizer, self.loss_fn = d_optimizer, g_optimizer, loss_fn
        self.d_loss = keras.metrics.Mean(name="d_loss")
        self.g_loss = keras.metrics.Mean(name="g_loss")

    @property
    def metrics(self):
        return [self.d_loss, self.g_loss]

    def _fake(self, size):
        return self.generator(keras.random.normal((size, LATENT), seed=self.seeds))

    def train_step(self, real):
        size = tf.shape(real)[0]
        labels = tf.concat([tf.ones((size, 1)), tf.zeros((size, 1))], 0)
        images = tf.concat([self._fake(size), real], 0)
        with tf.GradientTape() as tape:
            d_loss = self.loss_fn(labels, self.discriminator(images))
        weights = self.discriminator.trainable_weights
        self.d_optimizer.apply_gradients(zip(tape.gradient(d_loss, weights), weights, strict=True))
        with tf.GradientTape() as tape:
            g_loss = self.loss_fn(tf.zeros((size, 1)), self.discriminator(self._fake(size)))
        weights = self.generator.trainable_weights
        self.g_optimizer.apply_gradients(zip(tape.gradient(g_loss, weights), weights, strict=True))
        self.d_loss.update_state(d_loss)
        self.g_loss.update_state(g_loss)
        return {m.name: m.result() for m in self.metrics}


def made(**options):
    keras.utils.set_random_seed(3)
    gan = GAN(**options)
    loss = keras.losses.BinaryCrossentropy(from_logits=True)
    gan.compile(keras.optimizers.Adam(0.01), keras.optimizers.Adam(0.01), loss)
    return gan


def fit(gan, **options):
    data = np.random.default_rng(1).normal(3.0, 1.0, (64, 2)).astype("float32")
    return gan.fit(data, batch_size=8, shuffle=False, verbose=0, **options).history


def test_one_worker_is_plain_keras():
    plain = made()
    history = fit(plain, epochs=2)
    strategy = tf_dsgd.DownpourStrategy(helpers.workers(1), local_rule="optimizer")
    with strategy.scope():
        gan = made()
    found = fit(gan, epochs=2)
    for one, other in zip(gan.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
    for name, values in history.items():
        np.testing.assert_allclose(found[name], values, rtol=1e-5)


def test_two_workers_train_both_models():
    strategy = tf_dsgd.DownpourStrategy(tf_dsgd.LocalCluster(2), local_rule="optimizer")
    with strategy.scope():
        gan = made()
    before = gan.get_weights()
    history = fit(gan, epochs=3)
    assert strategy.steps == 24 and np.isfinite(history["d_loss"]).all()
    assert all((a != b).any() for a, b in zip(gan.get_weights(), before, strict=True) if a.size > 1)


def test_models_that_are_not_built_are_left_to_keras():
    """Nobody can build them without being told of a call: Keras's own error, or a built model."""
    strategy = tf_dsgd.DownpourStrategy(tf_dsgd.LocalCluster(2), local_rule="optimizer")
    with strategy.scope():
        gan = made(built=False)
    with pytest.raises((RuntimeError, NotImplementedError, ValueError), match=r"build|call"):
        fit(gan)
