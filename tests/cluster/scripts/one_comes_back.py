"""Two of three workers are killed; one is started again, the other stays away.

Prints RESULT: whether the one took part again, the longest time between two mini-batches from the
kill on, and the steps counted and expected.
"""

import json
import os
import subprocess
import sys
import time

import keras
import numpy as np
import witness

import tf_dsgd

STEPS = 200

strategy = tf_dsgd.DownpourStrategy(push_every=2, fetch_every=2)
with strategy.scope():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.0), "mse")


class OneComesBack(keras.callbacks.Callback):
    """Ends training when worker 1 has taken part again, or after 100 s."""

    process = None
    came_back = False
    longest = 0.0
    epochs = 0

    def steps(self):
        return [worker.steps for worker in strategy.ledger().workers]

    def on_train_batch_end(self, batch, logs=None):
        now = time.monotonic()
        if self.process is None:
            if min(self.steps()) < 10:
                return
            environment = witness.worker_processes()[1].environ()
            del environment["TF_DSGD_PARENT_FD"]  # a pipe that its launcher gave to that one
            witness.kill([1, 2])
            serve = [sys.executable, "-m", "tf_dsgd.serve"]
            self.process = subprocess.Popen(serve, env={**os.environ, **environment})
            self.before, self.last, self.deadline = self.steps()[1], now, now + 100.0
        self.longest, self.last = max(self.longest, now - self.last), now

    def on_epoch_end(self, epoch, logs=None):
        self.epochs = epoch + 1
        if self.process is not None:
            self.came_back = self.steps()[1] > self.before + 10
            self.model.stop_training = self.came_back or time.monotonic() > self.deadline


x = np.ones((2 * STEPS, 2))
one = OneComesBack()
try:
    model.fit(x, x[:, :1], batch_size=2, epochs=100_000, verbose=0, callbacks=[one])
finally:
    one.process.kill()
    one.process.wait(10)
result = [one.came_back, one.longest, strategy.steps, STEPS * one.epochs]
print("RESULT", json.dumps(result), flush=True)
