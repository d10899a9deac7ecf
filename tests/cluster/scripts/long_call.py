"""A round that takes longer than TensorFlow's servers let a client ping them in vain.

Usage: long_call.py SECONDS; worker 0 waits for as long in the second of its mini-batches. Prints
RESULT: the mini-batches that the shards counted, those expected, and how often it was lost.
"""

import json
import sys
import threading

import keras
import numpy as np
import tensorflow as tf

import tf_dsgd

WORKER = "/job:worker/task:0"
STEPS = 4


class Waits(keras.layers.Layer):
    """Waits in training until there is something in a queue on the worker."""

    def call(self, x, training=False):
        if training:
            with tf.device(WORKER):
                x = x + queue.dequeue()
        return x


def gives(count):
    with tf.device(WORKER):
        for _ in range(count):
            queue.enqueue(0.0)


strategy = tf_dsgd.DownpourStrategy(
    tf_dsgd.TFCluster(worker_timeout_seconds=2.0, late_after_seconds=None)
)
with tf.device(WORKER):
    queue = tf.queue.FIFOQueue(100, [tf.float32], [[]])
with strategy.scope():
    model = keras.Sequential([keras.Input((2,)), Waits(), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
gives(1)
timer = threading.Timer(float(sys.argv[1]), gives, [STEPS])
timer.start()
x = np.ones((2 * STEPS, 2), "float32")
model.fit(x, x[:, :1], batch_size=2, verbose=0)
timer.join()
print("RESULT", json.dumps([strategy.steps, STEPS, strategy.engine.store.incarnations[0]]))
