"""With `enable_op_determinism`, which is for a whole process: hence one of its own."""

from tests import helpers

SCRIPT = """
import contextlib

import keras
import numpy as np
import tensorflow as tf

import tf_dsgd

tf.config.experimental.enable_op_determinism()


def trained(strategy=None, callbacks=()):
    keras.utils.set_random_seed(1)
    with contextlib.nullcontext() if strategy is None else strategy.scope():
        layers = [keras.Input((4,)), keras.layers.Dense(8, "relu"), keras.layers.Dense(1)]
        model = keras.Sequential(layers)
        model.compile(keras.optimizers.Adam(0.01), "mse")
    x = np.random.default_rng(0).standard_normal((64, 4)).astype("float32")
    model.fit(x, x[:, :1], batch_size=8, verbose=0, shuffle=False, callbacks=callbacks)
    return model.get_weights()


plain = trained()
monitor = tf_dsgd.callbacks.StalenessMonitor()
for cluster in (tf_dsgd.LocalCluster(1), tf_dsgd.SimulatedCluster(1)):
    for weight, same in zip(trained(tf_dsgd.DownpourStrategy(cluster), [monitor]), plain):
        np.testing.assert_array_equal(weight, same)
two = [
    trained(tf_dsgd.DownpourStrategy(tf_dsgd.SimulatedCluster(2), push_every=2, fetch_every=2))
    for _ in range(2)
]
for weight, same in zip(*two):
    np.testing.assert_array_equal(weight, same)
print("DONE")
"""


def test_training_goes_on_without_clocks():
    """TensorFlow refuses operations that read one then. One worker is plain Keras to the bit."""
    process = helpers.python(SCRIPT, timeout=200)
    assert process.returncode == 0, process.stderr
    assert "DONE" in process.stdout
