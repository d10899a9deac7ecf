"""A chief of workers that wait for each other, one of which is stopped for a while.

Usage: late.py STRATEGY [reading]. Prints DONE with the seconds it was stopped for and what was
counted. With `reading` it is stopped as the chief reads what it shows, between two mini-batches.
"""

import json
import signal
import sys
import time

import keras

import tf_dsgd
from tests import faults
from tf_dsgd.engine.outputs import Outputs

EXAMPLES, BATCH, EPOCHS = 2400, 4, 2
MAKE = {
    "averaging": lambda c: tf_dsgd.PeriodicAveragingStrategy(c, average_every=3),
    "bounded": lambda c: tf_dsgd.DownpourStrategy(c, max_staleness=1),
}


class Stops(keras.callbacks.Callback):
    """Stops a worker once each has done 50 mini-batches, until the others have done 150 more."""

    def __init__(self, strategy):
        super().__init__()
        self.strategy, self.process, self.seconds = strategy, None, None
        self.waits = False

    def on_train_batch_end(self, batch, logs=None):
        if self.seconds is not None:
            return
        done = [worker.steps for worker in self.strategy.ledger().workers]
        if self.process is None and min(done) >= 50:
            self.waits = "reading" in sys.argv
            if not self.waits:
                self.stop_at_work(sum(done))
        elif self.process is not None and sum(done) >= self.least:
            self.seconds = time.monotonic() - self.begun
            self.process.send_signal(signal.SIGCONT)

    def stop_at_work(self, done):
        """With mini-batches of its own, if it has any now; else at another batch's end."""
        process, task = faults.task("worker", 1), self.strategy.engine.tasks[1]
        with self.strategy.engine.changed:
            if task.leases and task.read_since is None:
                self.stop(process, done)

    def stop(self, process, done):
        process.send_signal(signal.SIGSTOP)
        self.waits, self.least, self.process = False, done + 150, process
        self.begun = time.monotonic()


def stopped_as_it_is_read(stops):
    bring = Outputs.bring

    def stops_first(self, task):
        if task.index == 1 and stops.waits:
            done = sum(worker.steps for worker in stops.strategy.ledger().workers)
            stops.stop(faults.task("worker", 1), done)
        bring(self, task)

    Outputs.bring = stops_first


if __name__ == "__main__":
    cluster = tf_dsgd.TFCluster(worker_timeout_seconds=120.0, late_after_seconds=1.0)
    strategy = MAKE[sys.argv[1]](cluster)
    with strategy.scope():
        model = faults.seen_model(EXAMPLES, keras.optimizers.SGD(0.01))
    x, y = faults.data(EXAMPLES)
    stops = Stops(strategy)
    stopped_as_it_is_read(stops)
    model.fit(x, y, batch_size=BATCH, epochs=EPOCHS, verbose=0, callbacks=[stops])
    ledger = faults.assert_nothing_lost(strategy, model, EPOCHS, EXAMPLES // BATCH)
    print("DONE", json.dumps([stops.seconds, ledger.reasons]), flush=True)
