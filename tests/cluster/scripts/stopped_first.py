"""A worker is stopped before the strategy is made, or just as it is connected to.

Usage: stopped_first.py WHEN      (before, connecting)

Prints RESULT: the seconds until the strategy was made and had trained; whether the worker was still
stopped by then; whether it took part later; the steps counted; and those expected.
"""

import json
import sys
import time

import keras
import numpy as np
import psutil

import tf_dsgd
from tests import faults
from tf_dsgd.transport import opening

STEPS, TIMEOUT_SECONDS = 200, 20.0

victim = psutil.Process(faults.task("worker", 1).pid)
going_on = faults.goes_on_after(victim.pid, 3 * TIMEOUT_SECONDS)
connect = opening.connect


def stop_and_connect(*arguments):
    victim.suspend()
    connect(*arguments)


if sys.argv[1] == "before":
    victim.suspend()
else:
    opening.connect = stop_and_connect
start = time.monotonic()
try:
    strategy = tf_dsgd.DownpourStrategy(
        tf_dsgd.TFCluster(worker_timeout_seconds=TIMEOUT_SECONDS), push_every=2, fetch_every=2
    )
except TimeoutError as error:
    print("RESULT", json.dumps([time.monotonic() - start, str(error)]), flush=True)
    victim.resume()
    raise
finally:
    going_on.terminate()
    going_on.wait(timeout=10.0)
with strategy.scope():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.0), "mse")
x = np.ones((2 * STEPS, 2))


class TakesPart(keras.callbacks.Callback):
    """Ends training when worker 1 has, or after a minute."""

    epochs = 0

    def on_epoch_end(self, epoch, logs=None):
        self.epochs += 1
        late = time.monotonic() - start > 60.0
        self.model.stop_training = late or strategy.ledger().workers[1].steps > 10


model.fit(x, x[:, :1], batch_size=2, verbose=0)
took, stopped = time.monotonic() - start, victim.status() == psutil.STATUS_STOPPED
victim.resume()
part = TakesPart()
model.fit(x, x[:, :1], batch_size=2, epochs=100_000, verbose=0, callbacks=[part])
joined = strategy.ledger().workers[1].steps > 10
result = [took, stopped, joined, strategy.steps, STEPS * (1 + part.epochs)]
print("RESULT", json.dumps(result), flush=True)
