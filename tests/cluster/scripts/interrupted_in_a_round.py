"""Ctrl-C ends a script while a worker, which was stopped, has a call that it never answers.

Prints CLOSED and after how many seconds of the script's ending its engine was closed.
"""

import atexit
import os
import signal
import threading
import time

import keras
import numpy as np

import tf_dsgd
from tests import faults

ended = []


def closed():  # before the strategy's, so that it is called after it
    print("CLOSED", round(time.monotonic() - ended[0], 2), flush=True)
    faults.task("worker", 0).resume()  # or the launcher would wait for it


class StopsWorker(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if batch == 20:
            faults.task("worker", 0).suspend()
            threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT)).start()


atexit.register(closed)
with tf_dsgd.DownpourStrategy().scope():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
    model.compile("sgd", "mse")
atexit.register(lambda: ended.append(time.monotonic()))
x = np.ones((100_000, 4), "float32")
model.fit(x, x[:, :3], batch_size=2, verbose=0, callbacks=[StopsWorker()])
