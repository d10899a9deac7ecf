"""A chief whose model counts how often each example was applied, and kills workers meanwhile.

Usage: witness.py '[{"push_every": 4, ...}, ...]', one fit for each; prints a RESULT line for each.
"""

import json
import os
import random
import sys
import threading
import time

import keras
import numpy as np
import psutil
import tensorflow as tf

import tf_dsgd

BATCH = 4  # with a power of two, sums of 1 / BATCH are exact


class Counters(keras.layers.Layer):
    """A row for each example, with a sparse and with a dense gradient, and one weight for all."""

    def __init__(self, examples):
        super().__init__()
        self.examples = examples

    def build(self, _):
        table = {"shape": (self.examples, 1), "initializer": "zeros"}
        self.sparse = self.add_weight(name="sparse", **table)
        self.dense = self.add_weight(name="dense", **table)
        self.every = self.add_weight(name="every", shape=(1,), initializer="zeros", dtype="float64")

    def call(self, x):
        rows = keras.ops.cast(x[:, 0], "int32")
        some = keras.ops.take(self.sparse, rows, axis=0)
        all_of_them = keras.ops.take(1.0 * self.dense, rows, axis=0)
        return some + all_of_them + keras.ops.cast(self.every, "float32")


@keras.saving.register_keras_serializable("tests")
def minus_output(y_true, y_pred):
    """A descent of rate 1 adds 1 / BATCH to an example's rows, and 1 to the weight of all."""
    return -keras.ops.sum(y_pred, axis=-1)


def worker_processes():
    """Worker index -> process, of this cluster's launcher."""
    found = {}
    for process in psutil.Process(os.getppid()).children():
        try:
            task = json.loads(process.environ()["TF_CONFIG"])["task"]
        except (psutil.Error, KeyError):
            continue
        if task["type"] == "worker":
            found[task["index"]] = process
    return found


def kill(indices):
    """Kills worker processes; the indices of those that were there."""
    here = worker_processes()
    victims = [m for m in indices if m in here]
    for m in victims:
        here[m].kill()
    return victims


class Killer(keras.callbacks.Callback):
    """Kills a worker, or all, at a random moment within epochs in which every worker takes part.

    Stops training at the end of an epoch, once all are killed and every worker takes part again.
    """

    def __init__(self, strategy, kills, seed, seconds=80.0):
        super().__init__()
        self.strategy, self.plan, self.random = strategy, list(kills), random.Random(seed)
        self.deadline = time.monotonic() + seconds
        self.killed = []
        self.thread = None

    def steps(self):
        return [worker.steps for worker in self.strategy.ledger().workers]

    def all_take_part(self):
        return all(now > then for now, then in zip(self.steps(), self.before, strict=True))

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch
        self.before = self.steps()
        self.at = self.random.randrange(self.params["steps"] // 5, self.params["steps"] * 3 // 5)
        self.done = False

    def on_train_batch_end(self, batch, logs=None):
        if self.done or batch < self.at or batch > self.params["steps"] * 4 // 5 or not self.plan:
            return
        if batch % 10 == 0 and self.all_take_part():
            self.done = True
            delay = self.random.uniform(0.0, 0.01)  # so that a kill meets every part of a round
            who = [0, 1] if self.plan.pop(0) == "all" else [self.random.randrange(2)]
            self.thread = threading.Thread(target=self.strike, args=(delay, who, batch))
            self.thread.start()

    def strike(self, delay, who, batch):
        time.sleep(delay)
        self.killed.append([self.epoch, batch, kill(who)])

    def on_epoch_end(self, epoch, logs=None):
        if self.thread:
            self.thread.join()
        self.epochs = epoch + 1
        ready = not self.plan and self.all_take_part() and not self.done
        self.model.stop_training = ready or time.monotonic() > self.deadline


def integers(variable, factor=1):
    values = factor * np.asarray(variable.numpy(), "float64").ravel()
    whole = np.rint(values).astype(int)
    return whole.tolist() if (values == whole).all() else values.tolist()


def books(shard):
    return [[w.steps, w.sent, w.applied, w.refused] for w in shard.workers]


def shard_of(variable):
    return tf.DeviceSpec.from_string(variable.value.device).task


def train(push_every, fetch_every, momentum, kills, seed, steps, local_rule="sgd"):
    strategy = tf_dsgd.DownpourStrategy(
        push_every=push_every, fetch_every=fetch_every, local_rule=local_rule
    )
    examples = BATCH * steps
    with strategy.scope():
        model = keras.Sequential([keras.Input((1,)), Counters(examples)])
        model.compile(keras.optimizers.SGD(1.0, momentum=momentum), minus_output)
    x = np.arange(examples, dtype="float32")[:, None]
    killer = Killer(strategy, kills, seed)
    model.fit(x, x, batch_size=BATCH, epochs=10_000, verbose=0, callbacks=[killer])
    ledger, layer = strategy.ledger(), model.layers[0]
    slots = {}
    for variable in model.optimizer.variables:
        for name in ("sparse", "dense", "every"):
            if variable.path.endswith(f"{name}_momentum"):
                slots[name] = integers(variable, 1 if name == "every" else BATCH)
    return {
        "epochs": killer.epochs,
        "killed": killer.killed,
        "steps": strategy.steps,
        "updates": strategy.updates,
        "iterations": int(model.optimizer.iterations),
        "sent": ledger.sent,
        "applied": ledger.applied,
        "refused": ledger.refused,
        "in_flight": ledger.in_flight,
        "cut_off": ledger.cut_off,
        "staleness_count": strategy.staleness().count,
        "shards": [books(shard) for shard in ledger.shards],
        "place": {n: shard_of(getattr(layer, n)) for n in ("sparse", "dense", "every")},
        "sparse": integers(layer.sparse, BATCH),
        "dense": integers(layer.dense, BATCH),
        "every": integers(layer.every)[0],
        "slots": slots,
    }


if __name__ == "__main__":
    for number, options in enumerate(json.loads(sys.argv[1])):
        print("FIT", number, options, flush=True)
        print("RESULT", json.dumps(train(**options)), flush=True)
