"""A chief whose workers are bound to each other, and which says how far each is.

First it trains without end, until it is sent a line; then it makes collections of messages, kills a
worker meanwhile, and counts how often each example was applied. Lines: STEPS per worker, STOPPED,
and COLLECTED with the counts.
"""

import faulthandler
import json
import sys
import threading
import time

import keras
import numpy as np
import tensorflow as tf
import witness

import tf_dsgd

COLLECTED = 4  # messages in an update
STEPS = 400


class StopWhenTold(keras.callbacks.Callback):
    """Ends training at the next mini-batch after a line came."""

    def __init__(self):
        super().__init__()
        self.told = threading.Event()
        threading.Thread(target=self.listen, daemon=True).start()

    def listen(self):
        sys.stdin.readline()
        self.told.set()

    def on_train_batch_end(self, batch, logs=None):
        self.model.stop_training = self.told.is_set()


def say_steps(strategy, end):
    while not end.wait(0.1):
        steps = [worker.steps for worker in strategy.ledger().workers]
        print("STEPS", json.dumps(steps), time.process_time(), flush=True)


def train_without_end(max_staleness):
    strategy = tf_dsgd.DownpourStrategy(max_staleness=max_staleness)
    with strategy.scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.0), "mse")
    dataset = tf.data.Dataset.from_tensors((np.ones((4, 2)), np.ones((4, 1)))).repeat()
    end = threading.Event()
    speaker = threading.Thread(target=say_steps, args=(strategy, end))
    speaker.start()
    model.fit(dataset, steps_per_epoch=10**9, verbose=0, callbacks=[StopWhenTold()])
    end.set()
    speaker.join()
    ledger = strategy.ledger()
    counts = [strategy.steps, ledger.sent, ledger.applied, ledger.refused]
    print("STOPPED", json.dumps(counts), flush=True)


def collect(seed):
    strategy = tf_dsgd.SoftsyncStrategy(
        gradients_per_update=COLLECTED, staleness_scaling=None, max_staleness=2
    )
    examples = witness.BATCH * STEPS
    with strategy.scope():
        model = keras.Sequential([keras.Input((1,)), witness.Counters(examples)])
        model.compile(keras.optimizers.SGD(1.0), witness.minus_output)
    x = np.arange(examples, dtype="float32")[:, None]
    killer = witness.Killer(strategy, ["one"], seed)
    model.fit(x, x, batch_size=witness.BATCH, epochs=10_000, verbose=0, callbacks=[killer])
    layer = model.layers[0]
    result = {
        "epochs": killer.epochs,
        "killed": killer.killed,
        "came_back": killer.came_back,
        "updates": strategy.updates,
        "steps": strategy.steps,
        "applied": strategy.ledger().applied,
        "times": {
            name: witness.tally(getattr(layer, name), witness.BATCH * COLLECTED)
            for name in ("sparse", "dense")
        },
        "every": float(layer.every.numpy()[0]),
    }
    print("COLLECTED", json.dumps(result), flush=True)


if __name__ == "__main__":
    options = json.loads(sys.argv[1])
    train_without_end(options["max_staleness"])
    collect(options["seed"])
    faulthandler.dump_traceback_later(15.0)  # what a process that does not end is doing
