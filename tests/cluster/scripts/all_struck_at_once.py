"""Of three workers two are killed as the third is stopped, until the two train again.

TensorFlow waits for the stopped one as the others leave its cluster and come back. Prints RESULT:
whether it was still stopped when they trained again; the mini-batches that a weight counts, for
each shard, and that the shards counted; and those expected.
"""

import json

import keras
import numpy as np
import psutil
import witness

import tf_dsgd
from tests import faults

STEPS, STRUCK_AT = 3000, 1000
STOPPED_SECONDS = 60.0


class Strikes(keras.callbacks.Callback):
    """Does it, and lets the stopped one go on once the others have done some mini-batches."""

    stopped = None
    held = True

    def on_train_batch_end(self, batch, logs=None):
        if batch == STRUCK_AT:
            self.before = [worker.steps for worker in strategy.ledger().workers]
            self.stopped = witness.worker_processes()[2]
            self.stopped.suspend()
            self.going_on = faults.goes_on_after(self.stopped.pid, STOPPED_SECONDS)
            witness.kill([0, 1])
        elif self.stopped is not None and self.held:
            done = [worker.steps for worker in strategy.ledger().workers]
            if max(now - then for now, then in zip(done[:2], self.before[:2], strict=True)) < 50:
                return
            self.held = False
            self.was_stopped = self.stopped.status() == psutil.STATUS_STOPPED
            self.stopped.resume()


cluster = tf_dsgd.TFCluster(worker_timeout_seconds=2.0)
strategy = tf_dsgd.DownpourStrategy(cluster, push_every=2, fetch_every=2)
with strategy.scope():
    inputs = keras.Input((3,))
    layers = [keras.layers.Dense(n, use_bias=False, kernel_initializer="zeros") for n in (1, 2)]
    outputs = keras.layers.Concatenate()([layer(inputs) for layer in layers])
    model = keras.Model(inputs, outputs)
    model.compile(keras.optimizers.SGD(1.0), lambda _, y: keras.ops.sum(y, axis=-1))
ones = np.ones((2 * STEPS, 3), "float32")
strikes = Strikes()
model.fit(ones, ones, batch_size=2, verbose=0, callbacks=[strikes])
strikes.going_on.terminate()
strikes.going_on.wait(timeout=10.0)
counted = [-float(w.numpy().mean()) for w in model.trainable_variables]
print("RESULT", json.dumps([strikes.was_stopped, [*counted, strategy.steps], STEPS]), flush=True)
