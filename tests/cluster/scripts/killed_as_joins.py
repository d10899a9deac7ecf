"""A worker ends for good in the very moment in which TensorFlow is told that another joins.

Each is started again once: worker 1 after it was killed for the first time. Prints RESULT: whether
worker 0 took part again; how often each example was trained on, by what weights count; and how
often it should.
"""

import json
import time

import keras
import numpy as np

import tf_dsgd
from tests import faults
from tf_dsgd import _tf_remote

EXAMPLES, BATCH = 400, 2
SECONDS = 60.0

strategy = tf_dsgd.DownpourStrategy(tf_dsgd.TFCluster(), push_every=2, fetch_every=2)
with strategy.scope():
    inputs = keras.Input((EXAMPLES,))
    dense = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
    model = keras.Model(inputs, dense(inputs))
    model.compile(keras.optimizers.SGD(1.0), lambda _, y: keras.ops.sum(y, axis=-1))
x, y = np.eye(EXAMPLES, dtype="float32"), np.zeros((EXAMPLES, 1), "float32")
change_tasks = _tf_remote.change_tasks
killed = False


def steps():
    return [worker.steps for worker in strategy.ledger().workers]


def kill_and_change(*args):
    global killed
    if not killed:
        killed = True
        faults.task("worker", 1).kill()
    change_tasks(*args)


class Until(keras.callbacks.Callback):
    """Trains until that holds at the end of an epoch."""

    def __init__(self, condition):
        super().__init__()
        self.condition = condition
        self.deadline = time.monotonic() + SECONDS

    def on_epoch_end(self, epoch, logs=None):
        self.model.stop_training = self.condition() or time.monotonic() > self.deadline


def fit(condition):
    model.fit(x, y, batch_size=BATCH, epochs=100_000, verbose=0, callbacks=[Until(condition)])


def kill_and_wait(index, enough):
    faults.task("worker", index).kill()
    before = steps()[index]
    fit(lambda: enough() and steps()[index] > before + 10)
    return steps()[index] > before + 10


fit(lambda: True)
assert kill_and_wait(1, lambda: strategy.engine.store.incarnations[1])
_tf_remote.change_tasks = kill_and_change
back = kill_and_wait(0, lambda: killed and strategy.engine.store.incarnations[0])
weights = -BATCH * model.trainable_variables[0].numpy()  # a batch's gradient is the mean
counted = [weights.min().item(), weights.max().item()]
print("RESULT", json.dumps([back, counted, strategy.steps * BATCH / EXAMPLES]), flush=True)
