"""A worker is stopped: what it is late with is done by another; then it counts as lost.

Prints RESULT: the longest time between two mini-batches while it is stopped, whether it was lost,
the steps counted and expected.
"""

import json
import signal
import time

import keras
import numpy as np
import witness

import tf_dsgd

STEPS = 200
STOPPED_SECONDS = 30.0

strategy = tf_dsgd.DownpourStrategy(
    tf_dsgd.TFCluster(worker_timeout_seconds=6.0, late_after_seconds=3.0)
)
with strategy.scope():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.0), "mse")


class Stops(keras.callbacks.Callback):
    """Stops worker 0 in the third epoch; training ends with the epoch in which it goes on."""

    stopped = None
    longest = 0.0
    epochs = 0

    def on_train_batch_end(self, batch, logs=None):
        now = time.monotonic()
        if self.stopped is not None:
            self.longest = max(self.longest, now - self.last)
        elif self.epochs == 2 and batch == STEPS // 2:
            self.stopped, self.process = now, witness.worker_processes()[0]
            self.process.send_signal(signal.SIGSTOP)
        self.last = now

    def on_epoch_end(self, epoch, logs=None):
        self.epochs = epoch + 1
        if self.stopped is not None and self.last > self.stopped + STOPPED_SECONDS:
            self.model.stop_training = True


x = np.ones((2 * STEPS, 2))
stops = Stops()
try:
    model.fit(x, x[:, :1], batch_size=2, epochs=100_000, verbose=0, callbacks=[stops])
finally:
    stops.process.send_signal(signal.SIGCONT)
lost = strategy.engine.store.incarnations[0] > 0
print("RESULT", json.dumps([stops.longest, lost, strategy.steps, STEPS * stops.epochs]), flush=True)
