"""A variable with ON_READ synchronization and ONLY_FIRST_REPLICA aggregation: each worker's own.

The witness is a count: a worker adds one to its own for every mini-batch that it does, and the
shards' ledger says how many these were.
"""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_dsgd
from tests import helpers
from tests.faults import fail_at


def own(value):
    return tf.Variable(
        value,
        trainable=False,
        synchronization=tf.VariableSynchronization.ON_READ,
        aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA,
    )


class Loop:
    """Descends on w, and counts: `count` by ones, `trail` by what the tickets say."""

    def __init__(self, strategy, momentum=0.0):
        self.strategy = strategy
        with strategy.scope():
            self.w = tf.Variable(0.0)
            self.optimizer = keras.optimizers.SGD(1.0, momentum)
            self.optimizer.build([self.w])
            self.count, self.trail = own(np.int64(10)), own(np.zeros(2, np.float32))
        self.run = tf.function(lambda ticket: strategy.run(self.step, args=(ticket,)))

    def step(self, ticket):
        before = self.count.read_value()
        self.count.assign_add(1)
        self.trail.assign(tf.stack([self.trail[1], tf.cast(ticket, tf.float32)]))
        self.optimizer.apply([tf.constant(1.0)], [self.w])
        return before

    def __call__(self, tickets, first=0):
        data = tf.data.Dataset.range(first, first + tickets)
        for ticket in self.strategy.experimental_distribute_dataset(data):
            self.run(ticket)
        self.strategy.settle()

    def counts(self):
        return [int(v) for v in self.strategy.experimental_local_results(self.count)]


def steps_of_workers(strategy):
    return [worker.steps for worker in strategy.ledger().workers]


CLUSTERS = {
    "workers_2": lambda: helpers.workers(2),
    "simulated_3": lambda: tf_dsgd.SimulatedCluster(3, compute_seconds=[1.0, 2.0, 4.0]),
}


@pytest.mark.parametrize("name", ["workers_2"] if helpers.ON_CLUSTER else CLUSTERS)
def test_each_worker_has_its_own(name):
    strategy = tf_dsgd.DownpourStrategy(CLUSTERS[name]())
    loop = Loop(strategy)
    assert loop.counts() == [10] * strategy.num_workers  # before any worker has used it
    loop(21)
    assert [n - 10 for n in loop.counts()] == steps_of_workers(strategy)
    assert int(loop.count) == loop.counts()[0]  # read outside: worker 0's
    assert float(loop.w) == -21.0
    loop.count.assign(100)  # outside: everybody's
    assert loop.counts() == [100] * strategy.num_workers
    loop.count.assign_add(1)
    assert loop.counts() == [101] * strategy.num_workers
    before = steps_of_workers(strategy)
    loop(9)
    done = np.subtract(steps_of_workers(strategy), before)
    assert [n - 101 for n in loop.counts()] == done.tolist() and done.sum() == 9


def test_whose_mini_batches_they_are_by_hand():
    """Workers of 1, 2 and 4 seconds draw tickets 0, 1 and 2 at 0, and worker 0 draws 3 at 1.

    At 2 worker 1 is first, as it has been on its way since 0: it draws 4 and worker 0 draws 5,
    which is free for 6 at 3.
    """
    loop = Loop(tf_dsgd.DownpourStrategy(CLUSTERS["simulated_3"]()))
    loop(7)
    assert loop.counts() == [14, 12, 11]
    trails = [v.numpy().tolist() for v in loop.strategy.experimental_local_results(loop.trail)]
    assert trails == [[5.0, 6.0], [1.0, 4.0], [0.0, 2.0]]


@pytest.mark.skipif(helpers.ON_CLUSTER, reason="simulated")
def test_saved_in_the_middle_and_restored_is_as_if_nothing_had_been_between(tmp_path):
    """`state(held=())` has all that the strategy has: weights, momentum, what workers own."""
    clusters = [CLUSTERS["simulated_3"]() for _ in range(2)]
    first, second = (Loop(tf_dsgd.DownpourStrategy(c), momentum=0.5) for c in clusters)
    first(10)
    np.savez(tmp_path / "state.npz", **first.strategy.state(held=()))
    first(11, first=10)
    with np.load(tmp_path / "state.npz") as state:
        second.strategy.restore(state)
    assert sum(second.counts()) == 30 + 10
    second(11, first=10)
    for loop in (first, second):
        assert loop.strategy.steps == 21 and sum(loop.counts()) == 30 + 21
    assert second.counts() == first.counts()
    assert float(second.w) == float(first.w) < -21.0
    trails = [loop.strategy.experimental_local_results(loop.trail) for loop in (first, second)]
    np.testing.assert_array_equal(*trails)


@pytest.mark.skipif(helpers.ON_CLUSTER, reason="simulated")
def test_metrics_are_restored_too():
    def made():
        strategy = tf_dsgd.DownpourStrategy(CLUSTERS["simulated_3"]())
        with strategy.scope():
            weight, tickets = tf.Variable(0.0), keras.metrics.Sum()
            optimizer = keras.optimizers.SGD(1.0)
            optimizer.build([weight])

        def step(ticket):
            tickets.update_state(ticket)
            optimizer.apply([tf.constant(1.0)], [weight])

        step = tf.function(functools.partial(strategy.run, step))
        for ticket in strategy.experimental_distribute_dataset(tf.data.Dataset.range(10)):
            step(args=(ticket,))
        return strategy, tickets

    first, of_first = made()
    second, of_second = made()
    of_second.reset_state()
    second.restore(first.state(held=()))
    assert float(of_second.result()) == float(of_first.result()) == sum(range(10))


@pytest.mark.skipif(helpers.ON_CLUSTER, reason="simulated")
def test_a_worker_that_comes_back_begins_anew():
    """By hand: worker 1 does three mini-batches, is away from 3 to 6, and does a second's each.

    At 16 that makes 3 + 10, and worker 0's 16: worker 1 does the last. What it had counted before
    went with it.
    """
    script = [fail_at(1, 3, "compute", back_after=3.0)]
    cluster = tf_dsgd.SimulatedCluster(2, faults=script, worker_timeout_seconds=1.0)
    loop = Loop(tf_dsgd.DownpourStrategy(cluster))
    loop(30)
    assert float(loop.w) == -30.0  # each mini-batch once
    assert loop.strategy.engine.now == 17.0
    assert loop.counts() == [10 + 16, 10 + 11]


@pytest.mark.skipif(helpers.ON_CLUSTER, reason="simulated")
def test_a_batch_method_refuses_it():
    class Counting(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self.count = own(0.0)

        def call(self, x):
            self.count.assign_add(1.0)
            return x

    with tf_dsgd.SandblasterStrategy(tf_dsgd.LocalCluster(1)).scope():
        model = keras.Sequential([keras.Input((1,)), Counting(), keras.layers.Dense(1)])
        model.compile(loss="mse")
    with pytest.raises(ValueError, match="changes its own state"):
        model.fit(np.ones((4, 1)), np.ones((4, 1)), verbose=0)
