"""Workers are lost while `fit` builds its functions, or just before.

Usage: lost_in_trace.py 0 1      (the workers to kill while the step is traced)
       lost_in_trace.py stopped 1 (the same, to stop)
       lost_in_trace.py all       (every worker, before `fit`)

Prints how far the weights, and the history, are from plain Keras's.
"""

import sys
import time

import keras
import numpy as np
import psutil
import tensorflow as tf
from witness import worker_processes

import tf_dsgd
from tests import faults

STOPPED_SECONDS = 120.0
STOPPED = []


def kill(victims):
    processes = [worker_processes()[m] for m in victims]
    for process in processes:
        process.kill()
    _, alive = psutil.wait_procs(processes, timeout=10)
    assert all(process.status() == psutil.STATUS_ZOMBIE for process in alive)


def stop(victims):
    for m in victims:
        process = worker_processes()[m]
        going_on = faults.goes_on_after(process.pid, STOPPED_SECONDS)
        process.suspend()
        STOPPED.append((process, going_on))


class Count(keras.metrics.Metric):
    """Counts examples; its variable is used where the step's forward pass has ended."""

    victims = ()
    strike = staticmethod(kill)
    calls = 0

    def __init__(self):
        super().__init__(name="count")
        self.count = self.add_weight(shape=(), initializer="zeros", name="count")

    def update_state(self, y_true, y_pred, sample_weight=None):
        Count.calls += 1
        if Count.calls == 2:  # the first is Keras's symbolic build, which uses no variable
            Count.strike(Count.victims)
        self.count.assign_add(tf.cast(tf.shape(y_pred)[0], tf.float32))

    def result(self):
        return self.count + 0.0


def train(strategy, victims=(), before_fit=()):
    keras.utils.set_random_seed(3)
    with strategy.scope():
        model = keras.Sequential(
            [keras.Input((12,)), keras.layers.Dense(16, "tanh"), keras.layers.Dense(1)]
        )
        model.compile(keras.optimizers.Adam(0.01), "mse", metrics=[Count()])
    random = np.random.default_rng(0)
    x = random.standard_normal((200, 12)).astype("float32")
    if before_fit:
        kill(before_fit)
    Count.victims, Count.calls = victims, 0
    history = model.fit(x, x[:, :1], batch_size=10, epochs=3, shuffle=False, verbose=0).history
    assert Count.calls >= 2
    return model.get_weights(), history, model


def until_all_take_part(strategy, model):
    """Who was told of a function while it was stopped does not know it, and is told again."""
    deadline = time.monotonic() + 90.0
    before = [worker.steps for worker in strategy.ledger().workers]
    x = np.zeros((200, 12), "float32")
    while any(
        now.steps == then for now, then in zip(strategy.ledger().workers, before, strict=True)
    ):
        assert time.monotonic() < deadline, strategy.ledger()
        model.fit(x, x[:, :1], batch_size=10, verbose=0)


if __name__ == "__main__":
    how, *victims = sys.argv[1:]
    if how == "stopped":
        Count.strike = staticmethod(stop)
    elif how != "all":
        victims = sys.argv[1:]
    seconds = 5 if how == "stopped" else 40
    strategy = tf_dsgd.DownpourStrategy(tf_dsgd.TFCluster(worker_timeout_seconds=seconds))
    before = range(strategy.num_workers) if how == "all" else ()
    ours, history, model = train(strategy, [int(m) for m in victims], before)
    steps = strategy.steps
    for process, going_on in STOPPED:
        assert process.status() == psutil.STATUS_STOPPED, "held until it went on"
        process.resume()
        going_on.terminate()
        going_on.wait(timeout=10.0)
        until_all_take_part(strategy, model)
    theirs, expected, _ = train(tf.distribute.get_strategy())
    difference = max(float(np.abs(a - b).max()) for a, b in zip(ours, theirs, strict=True))
    logs = max(float(np.abs(np.subtract(history[k], expected[k])).max()) for k in expected)
    print("DONE", steps, difference, logs, flush=True)
