"""A task is stopped while others train, and stays so while much is done for the first time.

Usage: stopped.py JOB AFTER SECONDS      (task 1 of the job; after the first `fit` has begun)

Prints RESULT: the seconds that each thing took; the longest time for which no thread of Python ran;
whether the task was still stopped after all of them; how often each example was trained on, by
what weights count in each model; and how often it should have been.
"""

import contextlib
import json
import sys
import threading
import time

import keras
import numpy as np
import psutil
import tensorflow as tf

import tf_dsgd
from tests import faults

TIMEOUT = 120.0
LOOK_SECONDS = 0.02
EXAMPLES, BATCH = 400, 2


class Clock(threading.Thread):
    """Notes the longest time for which it did not run."""

    def __init__(self):
        super().__init__(daemon=True)
        self.longest = 0.0
        self.ended = threading.Event()

    def run(self):
        last = time.monotonic()
        while not self.ended.wait(LOOK_SECONDS):
            now = time.monotonic()
            self.longest, last = max(self.longest, now - last), now


def make(strategy, units):
    """Weights fall by one for each example that was trained on."""
    with strategy.scope():
        inputs = keras.Input((EXAMPLES,))
        dense = keras.layers.Dense(units, use_bias=False, kernel_initializer="zeros")
        model = keras.Model(inputs, dense(inputs))
        model.compile(
            keras.optimizers.SGD(1.0), lambda _, y: keras.ops.sum(y, axis=-1), metrics=["mae"]
        )
    return model


def counts(model):
    return -BATCH * model.trainable_variables[0].numpy()  # a batch's gradient is the mean


cluster = tf_dsgd.TFCluster(worker_timeout_seconds=TIMEOUT, late_after_seconds=0.5)
strategy = tf_dsgd.DownpourStrategy(cluster)
models = [make(strategy, 1)]
x = np.eye(EXAMPLES, dtype="float32")
y = np.zeros((EXAMPLES, 1), "float32")
took = {}
clock = Clock()


@contextlib.contextmanager
def timed(name):
    start = time.monotonic()
    yield
    took[name] = round(time.monotonic() - start, 2)


def fit(model, epochs=1):
    model.fit(x, y, batch_size=BATCH, epochs=epochs, verbose=0)


job, after, seconds = sys.argv[1], float(sys.argv[2]), float(sys.argv[3])
victim = psutil.Process(faults.task(job, 1).pid)
clock.start()
striking = faults.is_stopped_after(victim.pid, after)
going_on = faults.goes_on_after(victim.pid, after + seconds)
with timed("first fit"):
    fit(models[0])
striking.wait(timeout=30.0)
with timed("second fit"):
    fit(models[0], epochs=3)
with timed("evaluate"):
    models[0].evaluate(x, y, batch_size=BATCH, verbose=0)
with timed("predict"):
    models[0].predict(x, batch_size=BATCH, verbose=0)
with timed("an operation and a function"):
    tf.function(lambda t: tf.math.igamma(t, t))(tf.math.polygamma(tf.ones([3]), tf.ones([3])))
models.append(make(strategy, 2))
with timed("another model"):
    fit(models[1])
stopped = victim.status() == psutil.STATUS_STOPPED
victim.resume()
going_on.terminate()
going_on.wait(timeout=10.0)
with timed("all together"):
    fit(models[0])
    fit(models[1], epochs=4)
clock.ended.set()
clock.join(timeout=10.0)
counted = [strategy.steps * BATCH / len(models) / EXAMPLES]
for each in models:
    counted += [counts(each).min().item(), counts(each).max().item()]
result = [took, round(clock.longest, 2), stopped, counted]
print("RESULT", json.dumps([*result, 5.0]), flush=True)
