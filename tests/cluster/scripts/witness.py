"""A chief whose model counts how often each example was applied, and kills workers meanwhile.

Usage: witness.py '[{"push_every": 4, ...}, ...]', one fit for each; prints a RESULT line for each.
"""

import faulthandler
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
    """Kills workers at random moments of one epoch, in which all of them take part.

    Stops training at the end of an epoch, once the plan is done and all take part again.

    Args:
        kills: "one" or "all" of the workers that are left, or "stop": one is stopped, and goes on
            some seconds after it counts as lost; one entry for each moment.
    """

    STOPPED_SECONDS = 12.0

    def __init__(self, strategy, kills, seed, seconds=160.0):
        super().__init__()
        self.strategy, self.plan, self.random = strategy, list(kills), random.Random(seed)
        self.deadline = time.monotonic() + seconds
        self.killed, self.threads = [], []
        self.came_back = False

    def steps(self):
        return [worker.steps for worker in self.strategy.ledger().workers]

    def all_take_part(self):
        return all(now > then for now, then in zip(self.steps(), self.before, strict=True))

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch
        self.before = self.steps()
        self.left = list(range(len(self.before)))
        middle = range(self.params["steps"] // 10, self.params["steps"] * 7 // 10)
        self.moments = sorted(self.random.sample(middle, len(self.plan)))

    def on_train_batch_end(self, batch, logs=None):
        if not self.moments or batch < self.moments[0]:
            return
        untouched = len(self.left) == len(self.before)
        if untouched and not self.all_take_part():
            self.moments = []  # some other epoch
            return
        self.moments.pop(0)
        victims, what = list(self.left), self.plan.pop(0)
        if what != "all":
            victims = [self.random.choice(victims)]
        self.left = [m for m in self.left if m not in victims]
        delay = self.random.uniform(0.0, 0.01)  # so that a kill meets every part of a round
        strike = self.stop if what == "stop" else self.strike
        self.threads.append(threading.Thread(target=strike, args=(delay, victims, batch)))
        self.threads[-1].start()

    def strike(self, delay, victims, batch):
        time.sleep(delay)
        self.killed.append([self.epoch, batch, kill(victims)])

    def stop(self, delay, victims, batch):
        time.sleep(delay)
        processes = [worker_processes()[m] for m in victims]
        for process in processes:
            process.suspend()
        self.killed.append([self.epoch, batch, victims])
        time.sleep(self.STOPPED_SECONDS)
        for process in processes:
            process.resume()

    def on_epoch_end(self, epoch, logs=None):
        for thread in self.threads:
            thread.join()
        self.killed.sort()  # on a busy machine the later of two threads may be done first
        self.epochs = epoch + 1
        untouched = len(self.left) == len(self.before)
        self.came_back = not self.plan and untouched and self.all_take_part()
        self.model.stop_training = self.came_back or time.monotonic() > self.deadline


def tally(variable, factor=1):
    """Value -> how many elements of the variable have it."""
    values, counts = np.unique(factor * variable.numpy().astype("float64"), return_counts=True)
    return [[float(v), int(n)] for v, n in zip(values, counts, strict=True)]


def books(shard):
    return [[w.steps, w.sent, w.applied, w.refused] for w in shard.workers]


def shard_of(variable):
    return tf.DeviceSpec.from_string(variable.value.device).task


def from_pipelines(strategy, examples):
    """The same examples, made by the workers themselves."""

    def dataset_fn(context):
        batches = tf.data.Dataset.range(examples).batch(BATCH)
        batches = batches.shard(context.num_input_pipelines, context.input_pipeline_id)
        return batches.shuffle(100).map(lambda x: 2 * (tf.cast(x, tf.float32)[:, None],))

    return {"x": strategy.distribute_datasets_from_function(dataset_fn), "shuffle": False}


def make_strategy(
    push_every=1,
    fetch_every=1,
    local_rule="sgd",
    split=False,
    average_every=None,
    worker_timeout_seconds=60.0,
):
    """Downpour; or, with `average_every`, workers that average all but the table that is split."""
    cluster = tf_dsgd.TFCluster(worker_timeout_seconds=worker_timeout_seconds)
    # A row is named once an epoch: its momentum counts, and no other row's may move.
    rows = {"placement": {"counters.*/sparse": tf_dsgd.Rows()}, "sparse": "lazy"} if split else {}
    if average_every is not None:
        return tf_dsgd.PeriodicAveragingStrategy(cluster, average_every=average_every, **rows)
    return tf_dsgd.DownpourStrategy(
        cluster, push_every=push_every, fetch_every=fetch_every, local_rule=local_rule, **rows
    )


def train(momentum, kills, seed, steps, pipelines=False, **options):
    strategy = make_strategy(**options)
    examples = BATCH * steps
    with strategy.scope():
        model = keras.Sequential([keras.Input((1,)), Counters(examples)])
        model.compile(keras.optimizers.SGD(1.0, momentum=momentum), minus_output)
    x = np.arange(examples, dtype="float32")[:, None]
    data = {"x": x, "y": x, "batch_size": BATCH}
    if pipelines:
        data = from_pipelines(strategy, examples)
    killer = Killer(strategy, kills, seed)
    model.fit(**data, epochs=10_000, verbose=0, callbacks=[killer])
    ledger, layer = strategy.ledger(), model.layers[0]
    slots = {
        v.path.rsplit("_", 2)[-2]: v for v in model.optimizer.variables if "momentum" in v.path
    }
    weights = {name: getattr(layer, name) for name in ("sparse", "dense", "every")}
    counters = slots or weights  # a momentum of 1 is the count, and its weight sums that
    return {
        "epochs": killer.epochs,
        "killed": killer.killed,
        "came_back": killer.came_back,
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
        "place": {name: shard_of(weight) for name, weight in weights.items()},
        "times": {name: tally(counters[name], BATCH) for name in ("sparse", "dense")},
        "batches": float(counters["every"].numpy()[0]),
        "every": float(layer.every.numpy()[0]),
    }


if __name__ == "__main__":
    for number, options in enumerate(json.loads(sys.argv[1])):
        print("FIT", number, options, flush=True)
        print("RESULT", json.dumps(train(**options)), flush=True)
    faulthandler.dump_traceback_later(15.0)  # what a process that does not end is doing
