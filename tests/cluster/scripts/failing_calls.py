"""Faults made in the chief, one or two a second: calls of workers are slow, or raise an error.

An error comes before the call, after it, or the call acts up to half a second later, as that of a
worker that was stopped and goes on. Each time its worker counts as lost, and joins again. Weights
count the mini-batches, as all gradients are 1 at a rate of 1, and so do the shards.

Usage: failing_calls.py OPTIONS, where OPTIONS are JSON: `strategy` and its `arguments`, `batches`
in an epoch, `seed`, `faults` [before, after, later] as shares of all calls, `slow` [share,
seconds], `pipelines`, and `until`: how often workers are to be lost, and messages refused. Prints
RESULT: what happened how often, when that is reached or after `seconds`.
"""

import collections
import json
import random
import sys
import threading
import time

import keras
import numpy as np
import tensorflow as tf

import tf_dsgd
from tf_dsgd.engine import state
from tf_dsgd.membership import deadlines

OPTIONS = {
    "strategy": "DownpourStrategy",
    "arguments": {},
    "batches": 30,
    "seed": 0,
    "faults": [0.005, 0.005, 0.005],
    "slow": [0.2, 0.1],
    "pipelines": False,
    "until": {},
    "seconds": 100.0,
} | json.loads(sys.argv[1])
BATCH = 2
LOOK_SECONDS = 0.02
CALL_SECONDS = 30.0

# Whoever was lost or is late is looked after at once, and not once in a second.
deadlines.LOOK_SECONDS = LOOK_SECONDS


class Faults:
    """Stands between the chief and its workers' functions, once `on` is set."""

    def __init__(self):
        self.on = False
        self.counts = collections.Counter()
        self.later = []
        self._call = state._WorkerFunction.__call__
        self._random = random.Random(OPTIONS["seed"])
        self._lock = threading.Lock()

    def draw(self, share=1.0):
        """A number in [0, 1), in a `share` of all cases."""
        with self._lock:
            drawn = self._random.random()
        return drawn / share if drawn < share else None

    def wait(self):
        share, seconds = OPTIONS["slow"]
        time.sleep(seconds * (self.draw(share) or 0.0))

    def fail(self, kind):
        with self._lock:
            self.counts[kind] += 1
        raise tf.errors.UnavailableError(None, None, f"A test's error: {kind}")

    def call(self, function, *tensors):
        if not (self.on and threading.current_thread().name.startswith("tf_dsgd worker")):
            return self._call(function, *tensors)
        before, after, later = OPTIONS["faults"]
        self.wait()
        if self.draw(before) is not None:
            self.fail("before")
        if self.draw(later) is not None:
            what = function, function.captures, tensors
            acts = threading.Thread(target=self._act, args=what, daemon=True)
            acts.start()
            self.later.append(acts)
            self.fail("later")
        result = self._call(function, *tensors)
        self.wait()
        if self.draw(after) is not None:
            self.fail("after")
        return result

    def _act(self, function, captures, tensors):
        time.sleep(0.5 * self.draw())
        try:
            function.traced._call_flat(list(tensors), captures)
        except tf.errors.OpError:  # its worker has other variables by now
            with self._lock:
                self.counts["refused calls"] += 1


def pipeline(context):
    """This worker's share of the mini-batches."""
    count, mine = context.num_input_pipelines, context.input_pipeline_id
    share = OPTIONS["batches"] // count + (mine < OPTIONS["batches"] % count)
    ones = tf.ones([BATCH, 3])
    return tf.data.Dataset.from_tensors((ones, ones)).repeat(share)


def numbers(engine):
    """Of each worker's last message: (as the chief knows it, as the shards have it)."""
    rows = [shard.counters().rows for shard in engine.shards]
    for worker, known in enumerate(engine.numbers()):
        yield known, max(int(row[worker, 1]) for row in rows)


faults = Faults()
state._WorkerFunction.__call__ = lambda function, *tensors: faults.call(function, *tensors)
cluster = tf_dsgd.TFCluster(late_after_seconds=LOOK_SECONDS)
strategy = getattr(tf_dsgd, OPTIONS["strategy"])(cluster, **OPTIONS["arguments"])
with strategy.scope():
    x = keras.Input((3,))
    layers = [keras.layers.Dense(n, use_bias=False, kernel_initializer="zeros") for n in (1, 2)]
    model = keras.Model(x, keras.layers.Concatenate()([layer(x) for layer in layers]))
    model.compile(keras.optimizers.SGD(1.0), lambda _, y: keras.ops.sum(y, axis=-1))
data, options = [np.ones((OPTIONS["batches"] * BATCH, 3), "f")] * 2, {"batch_size": BATCH}
if OPTIONS["pipelines"]:
    data, options = [strategy.distribute_datasets_from_function(pipeline)], {}

deadline = time.monotonic() + OPTIONS["seconds"]
done, counts, until = 0, faults.counts, collections.Counter(OPTIONS["until"])
while not done or (until - counts and time.monotonic() < deadline):
    model.fit(*data, **options, verbose=0)  # audits itself
    faults.on, done = True, done + OPTIONS["batches"]
    shards = strategy.ledger().shards
    assert [sum(w.steps for w in shard.workers) for shard in shards] == [done] * 2
    known = list(numbers(strategy.engine))
    assert all(chief >= shard for chief, shard in known), known
    if OPTIONS["strategy"] == "DownpourStrategy":
        weights = [-w.numpy() for w in model.trainable_variables]
        assert all((w == done).all() for w in weights), (done, weights)
    counts["lost"] = sum(strategy.engine.store.incarnations)
    counts["refused"] = max(shard.refused for shard in shards)
faults.on = False
ends = time.monotonic() + CALL_SECONDS
for thread in faults.later:
    thread.join(max(0.0, ends - time.monotonic()))
assert not any(thread.is_alive() for thread in faults.later), "a call to a worker has not ended"
model.fit(*data, **options, verbose=0)
print("RESULT", json.dumps(counts | {"done": done}), flush=True)
