"""A ps dies at a moment, in which nothing or something runs in the chief. Usage: lost_ps.py MOMENT

MOMENT: start (before it is connected to), model, fit, trace, validation, evaluate or between.
Prints ERROR: what was raised then; LATER where nothing was.
"""

import json
import sys

import keras
import numpy as np

import tf_dsgd
from tests import faults

MOMENT = sys.argv[1]
struck = []


def now(moment):
    if moment == MOMENT and moment not in struck:
        struck.append(moment)
        faults.task("ps", 0).kill()


class KillsInTrace(keras.layers.Layer):
    """Its second call with a strategy's batch is traced by the strategy."""

    calls = 0

    def call(self, x, training=False):
        KillsInTrace.calls += 1
        if training and KillsInTrace.calls > 1:
            now("trace")
        return x


class KillsInTest(keras.callbacks.Callback):
    def __init__(self, moment):
        super().__init__()
        self.moment = moment

    def on_test_batch_begin(self, batch, logs=None):
        if batch == 3:
            now(self.moment)


def run():
    now("start")
    strategy = tf_dsgd.DownpourStrategy()
    now("model")
    with strategy.scope():
        layers = [keras.Input((4,)), KillsInTrace(), keras.layers.Dense(3), keras.layers.Dense(1)]
        model = keras.Sequential(layers)
        model.compile("sgd", "mse")
    x = np.ones((200, 4), "float32")
    data = (x, x[:, :1])
    now("fit")
    validation = {"validation_data": data, "validation_batch_size": 2}
    callbacks = [KillsInTest("validation")]
    model.fit(*data, batch_size=2, verbose=0, callbacks=callbacks, **validation)
    model.evaluate(*data, batch_size=2, verbose=0, callbacks=[KillsInTest("evaluate")])
    now("between")
    model.evaluate(*data, batch_size=2, verbose=0)


try:
    run()
except RuntimeError as error:
    print("ERROR", json.dumps(str(error)), flush=True)
    raise
print("LATER", flush=True)
