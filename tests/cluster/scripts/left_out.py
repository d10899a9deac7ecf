"""A worker is left out of the cluster while a call to it goes on, which would never end.

It is stopped as another joins, and goes on as soon as it is left out. Prints RESULT: whether both
took part again; how often each example was trained on, by what weights count; and how often it
should.
"""

import json
import time

import keras
import numpy as np
import psutil
import tensorflow as tf

import tf_dsgd
from tests import faults
from tf_dsgd import _tf_remote

EXAMPLES, BATCH = 400, 2
SECONDS = 90.0


@tf.function
def wait():
    return queue.dequeue()


cluster = tf_dsgd.TFCluster(worker_timeout_seconds=60.0, late_after_seconds=0.5)
strategy = tf_dsgd.DownpourStrategy(cluster, push_every=2, fetch_every=2)
with strategy.scope():
    inputs = keras.Input((EXAMPLES,))
    dense = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
    model = keras.Model(inputs, dense(inputs))
    model.compile(keras.optimizers.SGD(1.0), lambda _, y: keras.ops.sum(y, axis=-1))
x, y = np.eye(EXAMPLES, dtype="float32"), np.zeros((EXAMPLES, 1), "float32")
model.fit(x, y, batch_size=BATCH, verbose=0)
with tf.device("/job:worker/task:1"):
    queue = tf.queue.FIFOQueue(1, [tf.float32], [[]])
    waits = wait.get_concrete_function()
victim = psutil.Process(faults.task("worker", 1).pid)
engine = strategy.engine
inputs_of, change_tasks = engine.rounds.inputs, _tf_remote.change_tasks
waits_now = False
left_out = None  # the steps that were done by then


def waiting_first(worker, *args):
    global waits_now
    if worker.index == 1 and not waits_now:
        waits_now = True
        with tf.device("/job:worker/task:1"):
            waits()
    return inputs_of(worker, *args)


def changed(job, joining, absent=()):
    global left_out
    if 1 in absent and left_out is None:
        left_out = steps()
        victim.resume()
    change_tasks(job, joining, absent)


def steps():
    return [worker.steps for worker in strategy.ledger().workers]


engine.rounds.inputs, _tf_remote.change_tasks = waiting_first, changed


class Watches(keras.callbacks.Callback):
    """Stops worker 1 when nobody waits for it any more, kills 0; ends when both take part again."""

    stopped = back = False
    began = time.monotonic()

    def on_train_batch_end(self, batch, logs=None):
        if not self.stopped and engine.tasks[1].owes is not None:
            self.stopped = True
            victim.suspend()
            faults.task("worker", 0).kill()

    def on_epoch_end(self, epoch, logs=None):
        done = steps()
        self.back = left_out is not None and min(done[m] - left_out[m] for m in (0, 1)) > 10
        self.model.stop_training = self.back or time.monotonic() - self.began > SECONDS


watches = Watches()
model.fit(x, y, batch_size=BATCH, epochs=100_000, verbose=0, callbacks=[watches])
weights = -BATCH * model.trainable_variables[0].numpy()  # a batch's gradient is the mean
counted = [weights.min().item(), weights.max().item()]
print("RESULT", json.dumps([watches.back, counted, strategy.steps * BATCH / EXAMPLES]), flush=True)
