"""A chief that trains under one configuration after another, while its workers are struck.

Usage: faulty.py '["downpour", ...]'; prints a RESULT line for each. That each example was applied
once an epoch is asserted here.

Usage: faulty.py '"downpour"'; one worker is stopped, another killed, and neither is waited for.
"""

import gc
import json
import sys
import time

import keras
import numpy as np

import tf_dsgd
from tests import faults
from tests.conformance import registry

EXAMPLES, BATCH = 2000, 4
TIMEOUT = 5.0
# Two are killed and one is stopped until it counts as lost: all but one, at the same time. On a
# busy machine that takes longer than that takes.
SCRIPT = [
    faults.fail_at(0, 20),
    faults.fail_at(1, 35),
    faults.stop_at(2, 25, seconds=60.0),
]
SECONDS = 150.0

LONG_EPOCH, STOPPED_SECONDS = 40_000, 12.0


class UntilAllWorkAgain(keras.callbacks.Callback):
    """Ends training at the end of an epoch, once every fault struck and everybody works again."""

    def __init__(self, strategy, playing):
        super().__init__()
        self.strategy, self.playing = strategy, playing
        self.deadline = time.monotonic() + SECONDS
        self.epochs, self.back = 0, {}

    def missing(self):
        """What is waited for, in words; None when there is nothing."""
        if self.playing.script:
            return f"{self.playing.script} have not struck"
        if self.playing.stopped:
            return "a worker is stopped"
        here = self.strategy.engine.store.present
        absent = [m for m, present in enumerate(here) if not present]
        for m in absent:
            self.back.pop(m, None)
        if absent:
            return f"workers {absent} are not there"
        applied = [worker.applied for worker in self.strategy.ledger().workers]
        # One message may be another's, completed in a lost worker's name.
        idle = [m for m, n in enumerate(applied) if n < self.back.setdefault(m, n) + 3]
        return f"workers {idle} are there and do nothing" if idle else None

    def on_epoch_end(self, epoch, logs=None):
        self.epochs = epoch + 1
        missing = self.missing()
        self.model.stop_training = missing is None
        if missing and time.monotonic() > self.deadline:
            raise TimeoutError(f"within {SECONDS:g} s: {missing}")


class Pauses(keras.callbacks.Callback):
    """Measures the longest time between two mini-batches from the first fault to the last's end."""

    def __init__(self, playing):
        super().__init__()
        self.playing = playing
        self.longest, self.batches, self.last = 0.0, 0, None

    def on_train_batch_end(self, batch, logs=None):
        now = time.monotonic()
        if self.last is not None:
            self.longest = max(self.longest, now - self.last)
            self.batches += 1
        self.last = now if self.playing.struck else None
        self.model.stop_training = not self.playing.script and not self.playing.stopped


def make(configuration, examples, timeout):
    cluster = tf_dsgd.TFCluster(worker_timeout_seconds=timeout)
    strategy = registry.CONFIGURATIONS[configuration](cluster)
    with strategy.scope():
        model = faults.seen_model(
            examples,
            registry.optimizer(configuration),
            with_table=configuration in registry.WITH_TABLE,
        )
    return strategy, model, faults.data(examples)


def struck(configuration):
    """A run with faults: what happened."""
    began = time.monotonic()
    strategy, model, (x, y) = make(configuration, EXAMPLES, TIMEOUT)
    playing = faults.OnProcesses(strategy, SCRIPT, until_lost=True)
    until = UntilAllWorkAgain(strategy, playing)
    history = model.fit(
        x, y, batch_size=BATCH, epochs=10_000, verbose=0, callbacks=[playing, until]
    )
    faults.assert_metrics_whole(history, y)
    ledger = faults.assert_nothing_lost(strategy, model, until.epochs, EXAMPLES // BATCH)
    assert all(np.isfinite(w).all() for w in model.get_weights())
    return {
        "configuration": configuration,
        "seconds": round(time.monotonic() - began, 1),
        "expected": until.epochs * EXAMPLES // BATCH,
        "struck": sorted([fault.index, fault.stops] for fault in playing.struck),
        "incarnations": list(strategy.engine.store.incarnations),
        "steps": [worker.steps for worker in ledger.workers],
        "refused": ledger.refused,
    }


def not_held_up(configuration):
    """A part of an epoch, in which a worker is stopped, for less than the timeout."""
    strategy, model, (x, y) = make(configuration, LONG_EPOCH, 60.0)
    script = [faults.stop_at(1, 50, seconds=STOPPED_SECONDS), faults.fail_at(0, 55)]
    playing = faults.OnProcesses(strategy, script)
    pauses = Pauses(playing)
    model.fit(x, y, batch_size=BATCH, epochs=1, verbose=0, callbacks=[playing, pauses])
    return {
        "struck": sorted([fault.index, fault.stops] for fault in playing.struck),
        "longest": pauses.longest,
        "batches": pauses.batches,
        "lost": list(strategy.engine.store.incarnations),
    }


if __name__ == "__main__":
    asked = json.loads(sys.argv[1])
    if isinstance(asked, str):
        print("RESULT", json.dumps(not_held_up(asked)), flush=True)
        sys.exit()
    for configuration in asked:
        print("FIT", configuration, flush=True)
        print("RESULT", json.dumps(struck(configuration)), flush=True)
        gc.collect()  # while nobody is stopped
