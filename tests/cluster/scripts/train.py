"""A chief that says how far it is, and stops at the end of an epoch once it is sent a line.

Usage: train.py '{"epochs": 3, "steps": 400, ...}'. Lines: FIT, EPOCH n (begins), STEPS per worker,
and DONE with what the model counted.
"""

import faulthandler
import json
import os
import signal
import sys
import threading
import time

import keras
import numpy as np
import witness

import tf_dsgd


class Progress(keras.callbacks.Callback):
    def __init__(self, strategy):
        super().__init__()
        self.strategy = strategy
        self.said = 0.0
        self.stop = False
        self.epochs = 0

    def on_epoch_begin(self, epoch, logs=None):
        print("EPOCH", epoch, flush=True)

    def on_train_batch_end(self, batch, logs=None):
        if time.monotonic() - self.said > 0.1:
            self.said = time.monotonic()
            print(
                "STEPS", json.dumps([w.steps for w in self.strategy.ledger().workers]), flush=True
            )

    def on_epoch_end(self, epoch, logs=None):
        self.epochs = epoch + 1
        self.model.stop_training = self.stop


def stop_when_told(progress):
    sys.stdin.readline()
    progress.stop = True


def model_of(strategy, steps):
    with strategy.scope():
        model = keras.Sequential([keras.Input((1,)), witness.Counters(witness.BATCH * steps)])
        model.compile(keras.optimizers.SGD(1.0), witness.minus_output)
    return model


def fit(model, steps, epochs, callbacks):
    x = np.arange(witness.BATCH * steps, dtype="float32")[:, None]
    model.fit(x, x, batch_size=witness.BATCH, epochs=epochs, verbose=0, callbacks=callbacks)


def counts(model):
    """The different counts of examples by each table."""
    layer = model.layers[0]
    return {
        name: [times for times, _ in witness.tally(getattr(layer, name), witness.BATCH)]
        for name in ("sparse", "dense")
    }


def interrupt(seconds):
    """Ctrl-C in this process after a while."""
    threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGINT)).start()


def main(steps=400, epochs=3, cluster=None, backup=None, interrupt_after=None, monitor=None):
    strategy = tf_dsgd.DownpourStrategy(
        tf_dsgd.TFCluster(**(cluster or {})), push_every=2, fetch_every=2
    )
    model = model_of(strategy, steps)
    progress = Progress(strategy)
    threading.Thread(target=stop_when_told, args=(progress,), daemon=True).start()
    callbacks = [progress]
    if backup:
        callbacks.append(tf_dsgd.callbacks.BackupAndRestore(backup))
    if monitor:
        callbacks.append(
            tf_dsgd.callbacks.StalenessMonitor(monitor, every_seconds=0.1, tensorboard=False)
        )
    print("FIT", flush=True)
    if interrupt_after is not None:
        interrupt(interrupt_after)
        try:
            fit(model, steps, 10_000, callbacks)
        except KeyboardInterrupt:
            before = [model.layers[0].sparse.numpy(), model.layers[0].dense.numpy()]
            print("CAUGHT", json.dumps([progress.epochs, counts(model)]), flush=True)
            fit(model, steps, 2, callbacks)
            after = [model.layers[0].sparse.numpy(), model.layers[0].dense.numpy()]
            more = [np.unique(b - a).tolist() for a, b in zip(before, after, strict=True)]
            ledger = strategy.ledger()
            balance = ledger.sent - ledger.applied - ledger.refused
            print("SECOND", json.dumps([more, balance, strategy.steps]), flush=True)
    fit(model, steps, epochs, callbacks)
    done = {"epochs": progress.epochs, "steps": strategy.steps, **counts(model)}
    print("DONE", json.dumps(done), flush=True)
    faulthandler.dump_traceback_later(15.0)  # what a process that does not end is doing


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
