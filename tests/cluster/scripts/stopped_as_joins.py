"""A worker is stopped in the very moment in which TensorFlow is told that another joins.

Prints RESULT: the longest epoch from then on, in seconds, while it was stopped; whether both took
part again; how often each example was trained on, by what weights count; and how often it should.
"""

import json
import time

import keras
import numpy as np
import psutil

import tf_dsgd
from tests import faults
from tf_dsgd import _tf_remote

EXAMPLES, BATCH = 400, 2
STOPPED_SECONDS = 15.0

cluster = tf_dsgd.TFCluster(worker_timeout_seconds=60.0, late_after_seconds=0.5)
strategy = tf_dsgd.DownpourStrategy(cluster, push_every=2, fetch_every=2)
with strategy.scope():
    inputs = keras.Input((EXAMPLES,))
    dense = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
    model = keras.Model(inputs, dense(inputs))
    model.compile(keras.optimizers.SGD(1.0), lambda _, y: keras.ops.sum(y, axis=-1))
x, y = np.eye(EXAMPLES, dtype="float32"), np.zeros((EXAMPLES, 1), "float32")
victim = psutil.Process(faults.task("worker", 1).pid)
change_tasks = _tf_remote.change_tasks
stopped = None  # since when


def stop_and_change(*args):
    global stopped
    if stopped is None:
        victim.suspend()
        stopped = time.monotonic()
    change_tasks(*args)


def steps():
    return [worker.steps for worker in strategy.ledger().workers]


class Watches(keras.callbacks.Callback):
    """Kills worker 0; lets worker 1 go on after some seconds; ends when both take part again."""

    epochs = 0
    goes_on = None
    longest = 0.0
    back = False

    def on_epoch_begin(self, epoch, logs=None):
        self.began = time.monotonic()

    def on_epoch_end(self, epoch, logs=None):
        self.epochs += 1
        now, done = time.monotonic(), steps()
        if self.epochs == 2:
            _tf_remote.change_tasks = stop_and_change
            faults.task("worker", 0).kill()
            self.started = now
        if not stopped:
            return
        if self.goes_on is None:
            self.longest = max(self.longest, now - self.began)
            if now - stopped > STOPPED_SECONDS:
                self.goes_on = done
                victim.resume()
            return
        self.back = min(done[0] - self.goes_on[0], done[1] - self.goes_on[1]) > 10
        self.model.stop_training = self.back or now - self.started > 120.0


watches = Watches()
model.fit(x, y, batch_size=BATCH, epochs=100_000, verbose=0, callbacks=[watches])
weights = -BATCH * model.trainable_variables[0].numpy()  # a batch's gradient is the mean
counted = [weights.min().item(), weights.max().item(), strategy.steps * BATCH / EXAMPLES]
print("RESULT", json.dumps([watches.longest, watches.back, counted, watches.epochs]), flush=True)
