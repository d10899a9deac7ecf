"""A ps dies as a step is traced, or while one runs in the chief. Usage: lost_ps.py trace|evaluate

Prints LATER where training ended, but for the reason that was to be shown.
"""

import sys

import keras
import numpy as np

import tf_dsgd
from tests import faults


def kill():
    process = faults.task("ps", 0)
    process.kill()


class KillsInTrace(keras.layers.Layer):
    """Its second call with a strategy's batch is traced by the strategy."""

    calls = 0

    def call(self, x, training=False):
        KillsInTrace.calls += 1
        if sys.argv[1] == "trace" and training and KillsInTrace.calls > 1:
            kill()
        return x


class KillsInEvaluate(keras.callbacks.Callback):
    def on_test_batch_begin(self, batch, logs=None):
        if batch == 3:
            kill()


strategy = tf_dsgd.DownpourStrategy()
with strategy.scope():
    layers = [keras.Input((4,)), KillsInTrace(), keras.layers.Dense(3), keras.layers.Dense(1)]
    model = keras.Sequential(layers)
    model.compile("sgd", "mse")
x = np.ones((200, 4), "float32")
model.fit(x, x[:, :1], batch_size=2, verbose=0)
model.evaluate(x, x[:, :1], batch_size=2, verbose=0, callbacks=[KillsInEvaluate()])
model.evaluate(x, x[:, :1], batch_size=2, verbose=0)
print("LATER", flush=True)
