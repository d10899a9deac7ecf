"""`keras.random` without a seed, under one strategy after another of a process."""

import keras
import numpy as np
import pytest

import tf_dsgd
from tests import helpers

pytestmark = pytest.mark.medium


class Noise(keras.layers.Layer):
    """Adds random numbers, for which nobody gave a seed."""

    def call(self, x):
        return x + keras.random.normal(keras.ops.shape(x))


def test_each_strategy_has_a_generator_of_its_own():
    """As where a notebook's cells run twice."""
    x = helpers.ones(8)
    for _ in range(3):
        with tf_dsgd.DownpourStrategy(tf_dsgd.LocalCluster(1)).scope():
            model = keras.Sequential([keras.Input((1,)), Noise(), keras.layers.Dense(1)])
            model.compile(keras.optimizers.SGD(0.0), "mse")
        seen = []
        note = keras.callbacks.LambdaCallback(
            on_train_batch_end=lambda batch, logs, seen=seen: seen.append(logs["loss"])
        )
        model.fit(x, x, batch_size=1, verbose=0, callbacks=[note])
        assert len(set(np.round(seen, 6))) > 4
