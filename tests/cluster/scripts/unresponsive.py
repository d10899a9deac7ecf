"""A task that is there and answers no calls: others hold all threads by which it would.

Usage: unresponsive.py worker|ps, of which number 0 is such a task. The calls that hold it end as
the chief gives it up. Prints RESULT: whether it took part again, the mini-batches that the shards
counted, and those expected; or ERROR: what `fit` raised.
"""

import json
import os
import sys
import time

import keras
import numpy as np
import tensorflow as tf

import tf_dsgd
from tf_dsgd import channels
from tf_dsgd.aside import Aside

DEVICE = f"/job:{sys.argv[1]}/task:0"
EXAMPLES = 200
SECONDS = 60.0

channels.ASK_SECONDS = 4.0


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


class Watches(keras.callbacks.Callback):
    """Ends when the task was lost and takes part again."""

    epochs = 0
    lost = None  # how many steps it had done by then
    back = False

    def on_train_begin(self, logs=None):
        self.deadline = time.monotonic() + SECONDS

    def on_epoch_end(self, epoch, logs=None):
        self.epochs += 1
        done = strategy.ledger().workers[0].steps
        if self.lost is None and any(strategy.engine.store.incarnations):
            self.lost = done
        self.back = self.lost is not None and done > self.lost + 10
        self.model.stop_training = self.back or time.monotonic() > self.deadline


held = [Aside(hold, f"holds {k}") for k in range(max(16, os.cpu_count()))]
watches = Watches()
try:
    model.fit(x, x[:, :1], batch_size=2, epochs=100_000, verbose=0, callbacks=[watches])
    expected = (1 + watches.epochs) * EXAMPLES // 2
    print("RESULT", json.dumps([watches.back, strategy.steps, expected]), flush=True)
except RuntimeError as error:
    print("ERROR", json.dumps(str(error)), flush=True)
