"""A task that is there and answers no calls: others hold all threads by which it would.

Usage: unresponsive.py worker|ps, of which number 0 is such a task. Prints RESULT: mini-batches that
the shards counted and those expected; or ERROR: what `fit` raised.
"""

import json
import os
import sys

import keras
import numpy as np
import tensorflow as tf

import tf_dsgd
from tf_dsgd.transport.aside import Aside

DEVICE = f"/job:{sys.argv[1]}/task:0"
EXAMPLES, EPOCHS = 200, 4


@tf.function
def wait():
    return queue.dequeue()


strategy = tf_dsgd.DownpourStrategy(
    tf_dsgd.TFCluster(worker_timeout_seconds=2.0, late_after_seconds=None)
)
with strategy.scope():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
x = np.ones((EXAMPLES, 2), "float32")
model.fit(x, x[:, :1], batch_size=2, verbose=0)
with tf.device(DEVICE):
    queue = tf.queue.FIFOQueue(1, [tf.float32], [[]])
    waits = wait.get_concrete_function()


def hold():
    with tf.device(DEVICE):
        waits()


held = [Aside(hold, f"holds {k}") for k in range(max(16, os.cpu_count()))]
try:
    model.fit(x, x[:, :1], batch_size=2, epochs=EPOCHS, verbose=0)
    print("RESULT", json.dumps([strategy.steps, (1 + EPOCHS) * EXAMPLES // 2]), flush=True)
except RuntimeError as error:
    print("ERROR", json.dumps(str(error)), flush=True)
