"""Faults by script, and witnesses that nothing was lost or doubled by them.

`fail_at`, `stop_at` and `fail_ps_at` are the package's own, for a simulated cluster. `OnProcesses`
plays the same scripts on the worker and ps processes of `tf_dsgd.launch`, as far as a signal can:
at a moment of the round that chance picks.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time

import keras
import numpy as np
import psutil
import tensorflow as tf

from tests import helpers
from tf_dsgd.simulation.faults import PHASES, fail_at, fail_ps_at, stop_at

__all__ = ["PHASES", "OnProcesses", "Seen", "fail_at", "fail_ps_at", "seen_model", "stop_at"]


class Seen(keras.layers.Layer):
    """Counts how often each example was trained on, in what was applied: integers, which add up.

    The example's number is the first column of its input, which the layer takes off.
    """

    def __init__(self, examples, **options):
        super().__init__(**options)
        self.examples = examples

    def build(self, _):
        self.times = self.add_weight(
            name="times",
            shape=(self.examples,),
            dtype="int32",
            initializer="zeros",
            trainable=False,
        )

    def call(self, x, training=False):
        if training:
            numbers = tf.cast(x[:, 0], tf.int32)
            once = tf.reduce_sum(tf.one_hot(numbers, self.examples, dtype=tf.int32), 0)
            self.times.assign_add(once)
        return x[:, 1:]


def target(y, _):
    """A metric that knows nothing of the weights: the mean of the first target, of what it saw."""
    return y[:, 0]


def seen_model(examples, optimizer, widths=(1, 2, 3), with_table=False):
    """A linear model of several weights, which go to several shards, and `Seen`.

    Args:
        examples: how many.
        optimizer: what it is compiled with.
        widths: of its parts.
        with_table: whether the first part, of width 1, has a table beside its line.
    """
    x = keras.Input((5,))
    kept = Seen(examples, name="seen")(x)
    layers = [keras.layers.Dense(width, kernel_initializer="zeros") for width in widths]
    if with_table:
        layers[0] = helpers.WithTable()
    model = keras.Model(x, keras.layers.Concatenate()([layer(kept) for layer in layers]))
    model.compile(optimizer, "mse", metrics=[keras.metrics.MeanMetricWrapper(target, "target")])
    return model


def assert_metrics_whole(history, y):
    """Each epoch's metric is that of all examples, once each: no two of them are alike."""
    seen = history.history["target"]
    np.testing.assert_allclose(seen, np.full(len(seen), y[:, 0].mean(dtype=np.float64)), rtol=2e-5)


def data(examples):
    """Inputs for `seen_model`, with the example's number first, and targets."""
    x = np.random.default_rng(7).standard_normal((examples, 5)).astype("float32")
    x[:, 0] = np.arange(examples)
    return x, x[:, 1:2] @ np.ones((1, 6), "float32")


def assert_nothing_lost(strategy, model, epochs, steps):
    """Each example was used once an epoch, on every shard, and every message is accounted for."""
    times = model.get_layer("seen").times.numpy()
    np.testing.assert_array_equal(times, np.full_like(times, epochs))
    ledger = strategy.ledger()
    assert strategy.steps == epochs * steps
    for shard in ledger.shards:
        assert sum(worker.steps for worker in shard.workers) == epochs * steps
        assert shard.in_flight == 0
        assert shard.sent == shard.applied + sum(shard.reasons.values())
    assert ledger.cut_off == 0
    assert strategy.staleness().count == ledger.applied
    return ledger


class OnProcesses(keras.callbacks.Callback):
    """Plays a script of faults on the processes of this cluster's launcher.

    A fault of worker m happens when the shards have counted `step` mini-batches of that worker;
    one of a ps when they have counted so many of all. `phase` is not looked at. A worker that died
    is back when the launcher has started it again. With `until_lost` a worker that is stopped goes
    on once it counts as lost, after its seconds at the latest. Where several tasks are one worker,
    a fault is a task's.
    """

    def __init__(self, strategy, script, until_lost=False):
        super().__init__()
        self.strategy, self.script = strategy, sorted(script, key=lambda fault: fault.step)
        self.until_lost = until_lost
        self.struck = []
        self._goes_on = []
        self._stopped_workers = {}

    def on_train_batch_end(self, batch, logs=None):
        for index, process in list(self._stopped_workers.items()):
            if not self.strategy.engine.store.present[self.worker(index)]:
                del self._stopped_workers[index]
                process.send_signal(signal.SIGCONT)
        if not self.script:
            return
        done = [worker.steps for worker in self.strategy.ledger().workers]
        for fault in list(self.script):
            of_worker = fault.job == "worker"
            if fault.step <= (done[self.worker(fault.index)] if of_worker else sum(done)):
                self.script.remove(fault)
                self.strike(fault)

    def worker(self, index):
        """The worker that a task belongs to."""
        return index // self.strategy.engine.store.num_parts

    def strike(self, fault):
        process = task(fault.job, fault.index)
        self.struck.append(fault)
        if not fault.stops:
            process.kill()
            return
        process.send_signal(signal.SIGSTOP)
        self._goes_on.append(goes_on_after(process.pid, fault.seconds))
        if self.until_lost and fault.job == "worker":
            self._stopped_workers[fault.index] = process

    @property
    def stopped(self):
        """Whether a process is stopped now, or goes on in this moment."""
        if self.until_lost:
            return bool(self._stopped_workers)
        return any(each.poll() is None for each in self._goes_on)

    def on_train_end(self, logs=None):
        for process in self._stopped_workers.values():
            process.send_signal(signal.SIGCONT)
        for each in self._goes_on:
            if self.until_lost:
                each.terminate()
            each.wait(timeout=60.0)


def goes_on_after(pid, seconds):
    """A process that lets a stopped one go on.

    A thread of this one might not: calls of TensorFlow may hold Python's lock.
    """
    return _signals_after(pid, seconds, signal.SIGCONT)


def is_stopped_after(pid, seconds):
    """A process that stops another, whatever this one is doing by then."""
    return _signals_after(pid, seconds, signal.SIGSTOP)


def _signals_after(pid, seconds, number):
    code = f"import os, time; time.sleep({seconds}); os.kill({pid}, {int(number)})"
    return subprocess.Popen([sys.executable, "-I", "-S", "-c", code])


def task(job, index, seconds=20.0):
    """The process of a task of this cluster's launcher."""
    deadline = time.monotonic() + seconds
    while True:
        for process in psutil.Process(os.getppid()).children():
            with contextlib.suppress(psutil.Error, KeyError):
                found = json.loads(process.environ()["TF_CONFIG"])["task"]
                if (found["type"], found["index"]) == (job, index):
                    return process
        if time.monotonic() > deadline:
            raise TimeoutError(f"no process of {job} {index} within {seconds} s")
        time.sleep(0.05)
