"""A worker of equal processes that trains until it learns that another is lost, or is told to end.

Usage: endless.py TIMEOUT_SECONDS [STEPS | busy], where STEPS ends it by itself; with busy, worker 1
does something else for a minute. Lines: BEGINS, TRAINS, and then ENDED with the weights, or RAISED
with the error.
"""

import json
import sys
import time

import keras
import numpy as np
import tensorflow as tf

import tf_dsgd

averaging = tf_dsgd.callbacks.PeriodicAveraging(5, timeout_seconds=float(sys.argv[1]))
busy = sys.argv[2:] == ["busy"]
steps = int(sys.argv[2]) if sys.argv[2:] and not busy else 10**9
keras.utils.set_random_seed(averaging.worker_index)
model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
model.compile("adam", "mse")


class Say(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if batch == 20:
            print("TRAINS", averaging.worker_index, averaging.num_workers, flush=True)
            if busy and averaging.worker_index == 1:
                time.sleep(60.0)


x = np.random.default_rng(averaging.worker_index).standard_normal((4, 2))
dataset = tf.data.Dataset.from_tensors((x, x.sum(1, keepdims=True))).repeat()
print("BEGINS", flush=True)
start = time.monotonic()
try:
    model.fit(dataset, steps_per_epoch=steps, verbose=0, callbacks=[averaging, Say()])
    weights = [w.numpy().tolist() for w in model.weights]
    print("ENDED", json.dumps([averaging.averages, weights]), flush=True)
except (ConnectionError, TimeoutError, ValueError) as error:
    seconds = time.monotonic() - start
    print("RAISED", json.dumps([type(error).__name__, str(error), seconds]), flush=True)
    sys.exit(3)
except KeyboardInterrupt:
    print("INTERRUPTED", flush=True)
