"""A chief of workers that wait for each other, one of which is stopped for a while.

Usage: straggler.py STRATEGY [reading]. Prints DONE with the seconds it was stopped for and what was
counted. It is stopped as the chief calls it to compute; with `reading` as the chief reads what it
shows, between two mini-batches; with more patience then, as no other worker may count as late.
"""

import json
import signal
import sys
import time

import keras

import tf_dsgd
from tests import faults
from tf_dsgd.engine.outputs import Outputs
from tf_dsgd.engine.remote import RemoteRounds

EXAMPLES, BATCH, EPOCHS = 2400, 4, 2
MAKE = {
    "averaging": lambda c: tf_dsgd.PeriodicAveragingStrategy(c, average_every=3),
    "bounded": lambda c: tf_dsgd.DownpourStrategy(c, max_staleness=1),
}


class Stops(keras.callbacks.Callback):
    """Stops a worker once each has done 50 mini-batches, until the others have done 150 more.

    Args:
        strategy: whose worker it is.
        at: what the chief does with that worker as it is stopped, a class and the name of a method
            of it that is called with the worker's task first.
    """

    def __init__(self, strategy, at):
        super().__init__()
        self.strategy, self.waits = strategy, False
        self.begun = self.process = self.seconds = None
        owner, name = at
        method = getattr(owner, name)

        def stopped_first(rounds, task, *arguments):
            if self.waits and self.begun is None and task.index == 1:
                self.stop()
            return method(rounds, task, *arguments)

        setattr(owner, name, stopped_first)

    def done(self):
        return [worker.steps for worker in self.strategy.ledger().workers]

    def on_train_batch_end(self, batch, logs=None):
        if self.seconds is not None:
            return
        done = self.done()
        if self.begun is None:
            self.waits = min(done) >= 50
        elif self.process is not None and sum(done) >= self.least:
            self.seconds = time.monotonic() - self.begun
            self.process.send_signal(signal.SIGCONT)

    def stop(self):
        self.begun, self.least = time.monotonic(), sum(self.done()) + 150
        process = faults.task("worker", 1)
        process.send_signal(signal.SIGSTOP)
        self.process = process


if __name__ == "__main__":
    reading = "reading" in sys.argv
    cluster = tf_dsgd.TFCluster(
        worker_timeout_seconds=120.0, late_after_seconds=6.0 if reading else 1.0
    )
    strategy = MAKE[sys.argv[1]](cluster)
    with strategy.scope():
        model = faults.seen_model(EXAMPLES, keras.optimizers.SGD(0.01))
    x, y = faults.data(EXAMPLES)
    stops = Stops(strategy, (Outputs, "bring") if reading else (RemoteRounds, "round"))
    model.fit(x, y, batch_size=BATCH, epochs=EPOCHS, verbose=0, callbacks=[stops])
    ledger = faults.assert_nothing_lost(strategy, model, EPOCHS, EXAMPLES // BATCH)
    print("DONE", json.dumps([stops.seconds, ledger.reasons]), flush=True)
