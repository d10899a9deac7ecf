"""Sums over workers in other processes, of what each has reported."""

import itertools

import numpy as np
import pytest
import tensorflow as tf

from tf_dsgd.engine.running import Resets, RunningMetrics
from tf_dsgd.engine.state import Store

IDS = itertools.count()


class Metric:
    """A variable of a metric, with a copy on each worker."""

    def __init__(self, store, shape=(), dtype=tf.float32):
        self.shape, self.dtype = tf.TensorShape(shape), dtype
        self.rest = tf.zeros(shape, dtype)
        self.workers = store.replicate(lambda _: tf.zeros(shape, dtype), dtype=dtype, name="m")
        self._unique_id = f"metric_{next(IDS)}"

    def on_workers(self):
        return self.workers

    def value_at_rest(self):
        return self.rest


class Number(Metric):
    """The number of the reset: workers have what they fetched last."""

    def assign(self, number):
        self.number = number

    def fetch(self, worker):
        self.workers.of(worker).assign(self.number)


@pytest.fixture
def parts():
    device = tf.config.list_logical_devices("CPU")[0].name
    store = Store([device] * 2)
    metrics = [Metric(store), Metric(store, (2,)), Metric(store, (), tf.int64)]
    number = Number(store, (), tf.int64)
    return store, metrics, number, RunningMetrics(metrics, Resets(number), store, device)


def values(metrics, running):
    found = running.shown()
    return [np.asarray(found[id(v)]).tolist() for v in metrics]


def rounds(store, metrics, running):
    """A function per worker: it adds to its metrics, and gives what it reports."""

    @tf.function(autograph=False)
    def work(amount):
        before = running.state()
        for v in metrics:
            copy = v.on_workers().template
            copy.assign_add(tf.cast(tf.fill(v.shape, amount), v.dtype))
        return running.worker_total(before)

    return store.bind(work.get_concrete_function(tf.TensorSpec([], tf.float32)))


def test_sums_over_workers_since_the_reset(parts):
    store, metrics, resets, running = parts
    work = rounds(store, metrics, running)
    running.reset()
    for m in (0, 1):
        resets.fetch(m)
    assert not running.begun
    for m, amount in ((0, 1.0), (0, 2.0), (1, 4.0)):
        running.report(m, work[m](tf.constant(amount)))
    assert running.begun
    running.add_up()
    assert values(metrics, running) == [7.0, [7.0, 7.0], 7]

    # Worker 0 has not fetched since: what it reports is of the reset before.
    for v in metrics:
        v.rest = tf.cast(tf.fill(v.shape, 10), v.dtype)
    running.reset()
    assert values(metrics, running) == [10.0, [10.0, 10.0], 10]
    running.report(0, work[0](tf.constant(1.0)))
    assert not running.begun
    resets.fetch(1)
    running.report(1, work[1](tf.constant(3.0)))
    resets.fetch(0)
    running.report(0, work[0](tf.constant(5.0)))
    running.add_up()
    assert values(metrics, running) == [18.0, [18.0, 18.0], 18]


def test_what_a_lost_worker_reported_stays(parts):
    store, metrics, resets, running = parts
    work = rounds(store, metrics, running)
    running.reset()
    resets.fetch(0)
    running.report(0, work[0](tf.constant(2.0)))
    store.lose(0)
    store.renew(0, 0)
    running.forget(0)
    resets.fetch(0)
    running.report(0, work[0](tf.constant(3.0)))
    running.add_up()
    assert values(metrics, running)[0] == 5.0


def test_the_metrics_of_a_model_that_is_compiled_again():
    """Another program on the same variables, whose workers' totals it finds, begins with none."""
    device = tf.config.list_logical_devices("CPU")[0].name
    store = Store([device] * 2)
    metrics, number = [Metric(store)], Number(store, (), tf.int64)
    resets = Resets(number)
    for _ in range(10):
        running = RunningMetrics(metrics, resets, store, device)
        work = rounds(store, metrics, running)
        running.reset()
        for m in (0, 1):
            number.fetch(m)
            running.report(m, work[m](tf.constant(m + 1.0)))
        running.add_up()
        assert values(metrics, running) == [3.0]
        del running, work
    other = RunningMetrics([Metric(store, (3,))], resets, store, device)
    rounds(store, other._metrics, other)  # of another shape
