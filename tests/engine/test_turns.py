"""Workers in turn: who takes which mini-batch, and in which order messages come."""

import threading

import hypothesis
import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import strategies as st

import tf_dsgd
from tests.membership.parts import Rule
from tf_dsgd.engine.scheduler import Scheduler
from tf_dsgd.engine.threads import ThreadsEngine
from tf_dsgd.membership.task import Task

pytestmark = pytest.mark.medium

ROWS = 12


# -- the scheduler, without TensorFlow -------------------------------------------------------------


class Turns:
    """Workers that take, compute and send whenever they may, in any order of the driver's."""

    def __init__(self, workers, in_turn=True):
        self.tasks = [Task(m) for m in range(workers)]
        self.scheduler = Scheduler(Rule(in_turn=in_turn), self.tasks)
        self.taken, self.sent = [], []

    def options(self):
        scheduler = self.scheduler
        for task in self.tasks:
            # As a thread does: it collects, takes what comes next, and only then sends.
            if task.open is not None and task.sent is None:
                yield self.collect, task
            if task.sent is not None and scheduler.may_send(task):
                yield self.send, task
            if task.sent is None and task.open is None and scheduler.available:
                yield self.take, task

    def collect(self, task):
        self.scheduler.collected(task)
        return self.take(task, sending=True) or True

    def take(self, task, sending=False):
        took = task.is_present and bool(self.scheduler.take(task, sending=sending))
        if took:
            self.taken.append(task.index)
        return took

    def send(self, task):
        self.sent.append(task.index)
        self.scheduler.counted(task, task.sent, 0.0)
        return True

    def drain(self, choose):
        """All that was handed out is done, if anybody goes on."""
        self.scheduler.draining = True
        while self.scheduler.unfinished:
            options = choose(list(self.options()))
            assert any(do(task) for do, task in options), "nobody goes on"
        self.scheduler.draining = False
        self.scheduler.rest()


def turns(workers, number):
    return [k % workers for k in range(number)]


@hypothesis.settings(max_examples=300, deadline=None, derandomize=True)
@hypothesis.given(
    st.integers(1, 5), st.lists(st.integers(0, 9), max_size=3), st.randoms(use_true_random=False)
)
def test_whatever_the_order_of_threads_all_comes_in_turn(workers, epochs, random):
    world = Turns(workers)
    for batches in epochs:
        world.taken.clear(), world.sent.clear()
        for _ in range(batches):
            world.scheduler.available += 1
            for do, task in random.sample(options := list(world.options()), len(options)):
                if (do, task) in list(world.options()):
                    do(task)
        world.drain(lambda options: random.sample(options, len(options))[:1] + options)
        assert world.taken == world.sent == turns(workers, batches)


def test_without_turns_the_driver_makes_another_order():
    world = Turns(3, in_turn=False)
    world.scheduler.available = 6
    world.drain(lambda options: options[::-1])
    assert world.sent != turns(3, 6)


@pytest.mark.parametrize("holds", [False, True], ids=["idle", "with_a_mini_batch"])
def test_nobody_waits_for_one_that_is_lost(holds):
    world = Turns(3)
    scheduler, (first, lost, last) = world.scheduler, world.tasks
    scheduler.available = 4
    assert world.take(first) and (not holds or world.take(lost)) and world.take(last) == holds
    if holds:
        world.collect(last)
        assert not scheduler.may_send(last)
    scheduler.lose(lost, 0.0)
    scheduler.fenced(lost, [0])
    world.drain(list)
    assert world.sent == [0, 2, 0, 2]
    assert scheduler.handed_out == 4
    scheduler.available = 3
    scheduler.admits(lost)
    scheduler.joins(lost)
    world.sent.clear()
    world.drain(list)
    assert world.sent == [0, 1, 2]


# -- threads and simulated workers -----------------------------------------------------------------


def weighted_output(y, p):
    return tf.reduce_mean(y * p)


def table(strategy):
    """Rows that mini-batches share, and gradients that no weight is part of: how sums of 32 bits
    are rounded differs with the order of updates, and with nothing else."""
    with strategy.scope():
        ids = keras.Input((3,), dtype="int32")
        rows = keras.layers.Embedding(ROWS, 2, embeddings_initializer="zeros", name="rows")(ids)
        model = keras.Model(ids, keras.ops.sum(rows, axis=(1, 2))[:, None])
        model.compile(keras.optimizers.SGD(0.5), weighted_output)
    return model


def serial(x, y, epochs):
    """The same, serial, in NumPy."""
    weights = np.zeros(ROWS, "float32")
    for ids, factor in [*zip(x, y, strict=True)] * epochs:
        weights[ids] -= np.float32(0.5) * factor
    return np.repeat(weights[:, None], 2, 1)


def data(number):
    random = np.random.default_rng(3)
    x = np.stack([random.permutation(ROWS)[:3] for _ in range(number)])
    return x, random.uniform(0.1, 3.0, (number, 1)).astype("float32")


@pytest.mark.parametrize(
    "cluster",
    [
        lambda: tf_dsgd.LocalCluster(3),
        lambda: tf_dsgd.SimulatedCluster(3, compute_seconds=[5.0, 1.0, 2.0], network_seconds=0.1),
        lambda: tf_dsgd.SimulatedCluster(
            3, compute_seconds=tf_dsgd.Exponential(1.0), network_seconds=tf_dsgd.Exponential(1.0)
        ),
    ],
    ids=["threads", "simulated", "simulated_messages_overtake"],
)
def test_updates_come_in_the_order_of_the_data(cluster):
    x, y = data(101)
    strategy = tf_dsgd.HogwildStrategy(cluster(), lock="round-robin")
    model = table(strategy)
    model.fit(x, y, batch_size=1, epochs=2, shuffle=False, verbose=0)
    np.testing.assert_array_equal(model.get_weights()[0], serial(x, y, 2))
    counters = strategy.ledger().workers
    assert [row.applied for row in counters] == [68, 68, 66]
    assert 1 <= strategy.staleness().max <= 2
    assert strategy.ledger().applied == int(model.optimizer.iterations) == 202


def test_the_order_of_data_makes_a_difference():
    x, y = data(101)
    assert np.any(serial(x, y, 1) != serial(x[::-1], y[::-1], 1))


def test_workers_send_in_turn(monkeypatch):
    """Recorded where each thread has waited for its turn, until it asks for the next one."""
    order, mutex = [], threading.Lock()
    waits = ThreadsEngine.await_turn

    def noted(engine, task):
        waits(engine, task)
        assert mutex.acquire(blocking=False), "two at once"
        order.append(task.index)
        mutex.release()

    monkeypatch.setattr(ThreadsEngine, "await_turn", noted)
    strategy = tf_dsgd.HogwildStrategy(tf_dsgd.LocalCluster(4), lock="round-robin")
    model, (x, y) = table(strategy), data(30)
    model.fit(x, y, batch_size=1, epochs=2, verbose=0)
    assert order == turns(4, 30) * 2


@pytest.mark.parametrize("cluster", [tf_dsgd.LocalCluster, tf_dsgd.SimulatedCluster])
def test_a_step_that_fails_on_one_worker_ends_training_for_all(cluster):
    strategy = tf_dsgd.HogwildStrategy(cluster(3), lock="round-robin")
    model, (x, y) = table(strategy), data(40)
    wrong = x.copy()
    wrong[20] = ROWS + 5
    with pytest.raises(tf.errors.InvalidArgumentError):
        model.fit(wrong, y, batch_size=1, shuffle=False, verbose=0)
    before = strategy.ledger().applied
    model.fit(x, y, batch_size=1, shuffle=False, verbose=0)
    assert strategy.ledger().applied == before + 40


def test_fewer_mini_batches_than_workers():
    strategy = tf_dsgd.HogwildStrategy(tf_dsgd.LocalCluster(5), lock="round-robin")
    model, (x, y) = table(strategy), data(2)
    model.fit(x, y, batch_size=1, epochs=3, shuffle=False, verbose=0)
    np.testing.assert_array_equal(model.get_weights()[0], serial(x, y, 3))


def test_a_lost_simulated_worker_is_passed_over():
    faults = [tf_dsgd.faults.fail_at(worker=1, step=7)]
    cluster = tf_dsgd.SimulatedCluster(3, compute_seconds=[1.0, 3.0, 2.0], faults=faults)
    strategy = tf_dsgd.HogwildStrategy(cluster, lock="round-robin")
    model, (x, y) = table(strategy), data(50)
    model.fit(x, y, batch_size=1, shuffle=False, verbose=0)
    assert strategy.ledger().applied == 50
    applied = [row.applied for row in strategy.ledger().workers]
    assert applied[1] <= 7 and applied[0] + applied[2] >= 43


def test_no_worker_does_the_work_of_one_that_is_late():
    """A backup task would send in another's name, and out of turn."""
    cluster = tf_dsgd.SimulatedCluster(
        4, compute_seconds=[5.0, 1.0, 60.0, 60.0], late_after_seconds=2.0
    )
    strategy = tf_dsgd.HogwildStrategy(cluster, lock="round-robin")
    model, (x, y) = table(strategy), data(28)
    model.fit(x, y, batch_size=1, shuffle=False, verbose=0)
    np.testing.assert_array_equal(model.get_weights()[0], serial(x, y, 1))
    assert [row.applied for row in strategy.ledger().workers] == [7, 7, 7, 7]
    assert strategy.ledger().refused == 0


def test_tasks_of_a_cluster_do_not_wait_for_turns():
    from tf_dsgd.algorithms.hogwild import InTurn
    from tf_dsgd.cluster.tasks import TFCluster

    spec = tf.train.ClusterSpec({"worker": ["127.0.0.1:1"], "ps": ["127.0.0.1:2"]})
    with pytest.raises(ValueError, match="InTurn has workers send in turn"):
        TFCluster(spec).make_engine(InTurn())
