"""Bounded staleness (Ho et al., NIPS 2013): max(clock) - min(clock) <= s + 1 at every instant.

A worker's clock is the number of its messages that arrived, so it is enough to look at every
arrival, which a rule around the strategy's own notes under the shard's lock.
"""

from __future__ import annotations

import dataclasses
import time

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tf_dsgd
from tests import helpers
from tests.faults import fail_at
from tf_dsgd import algorithm
from tf_dsgd.algorithms.downpour import AccrueGradient, CompiledOptimizer
from tf_dsgd.strategies.base import DistributedStrategy

pytestmark = pytest.mark.medium

STRATEGIES = {
    "downpour": tf_dsgd.DownpourStrategy,
    "downpour_2_3": lambda *args, **options: tf_dsgd.DownpourStrategy(
        *args, push_every=2, fetch_every=3, **options
    ),
    "softsync": lambda *args, **options: tf_dsgd.SoftsyncStrategy(
        *args, gradients_per_update=3, **options
    ),
}


@dataclasses.dataclass(frozen=True)
class Noting(algorithm.ServerRule):
    """Another rule; the worker of each message is noted first."""

    rule: algorithm.ServerRule
    ids: helpers.Ids

    def receive(self, shard, message):
        if shard.weights:  # of a cluster's shards the one that has the model's only weight
            self.ids.after(tf.cast(message.worker, tf.float32)[None, None])
        return self.rule.receive(shard, message)

    def flush(self, shard):
        return self.rule.flush(shard)


class RandomSleep(keras.layers.Layer):
    """Takes a random time in training, often short and sometimes long."""

    def __init__(self, seed, **kwargs):
        super().__init__(**kwargs)
        self.supports_jit = False
        self.seed = seed

    def call(self, inputs, training=False):
        if not training or helpers.ON_CLUSTER:  # no function of this process can be called there
            return inputs
        random = np.random.default_rng(self.seed)

        def wait(batch):
            time.sleep(float(random.choice([0.0, 0.001, 0.02], p=[0.5, 0.45, 0.05])))

        return helpers.identity_after(wait, inputs)


def arrivals(strategy, steps, layers=()):
    """The workers of all messages, in the order in which they arrived."""
    ids = helpers.IdsInFile() if helpers.ON_CLUSTER else helpers.Ids()
    rules = strategy.algorithm
    strategy.algorithm = dataclasses.replace(rules, server=Noting(rules.server, ids))
    with strategy.scope():
        model = helpers.constant_gradient_model(keras.optimizers.SGD(0.0), layers)
    x, y = helpers.ones(2 * steps)
    model.fit(x, y, batch_size=2, verbose=0)
    assert strategy.steps == steps
    order = np.concatenate(ids.take_batches())
    assert len(order) == strategy.ledger().applied
    return order


def largest_difference(order, num_workers):
    clocks = (order[:, None] == np.arange(num_workers)).cumsum(0)
    return int((clocks.max(1) - clocks.min(1)).max())


@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.sampled_from(sorted(STRATEGIES)),
    st.lists(st.sampled_from([0.1, 1.0, 7.0]), min_size=2, max_size=5),
    st.sampled_from([0.0, 0.3, 5.0]),
    st.integers(0, 3),
    st.integers(0, 2**16),
)
def test_on_simulated_workers_under_random_delays(name, compute, network, bound, seed):
    strategy = STRATEGIES[name](
        tf_dsgd.SimulatedCluster(
            len(compute),
            compute_seconds=[tf_dsgd.Exponential(seconds) for seconds in compute],
            network_seconds=tf_dsgd.Exponential(network),
            seed=seed,
        ),
        max_staleness=bound,
    )
    order = arrivals(strategy, 60)
    assert largest_difference(order, len(compute)) <= bound + 1
    if name == "downpour":
        # While a worker is at a clock k, each other's is from k - s to k + s + 1.
        assert strategy.staleness().max <= (len(compute) - 1) * (2 * bound + 1)


def test_without_a_bound_workers_drift_apart():
    """The checks of this file can fail."""
    cluster = tf_dsgd.SimulatedCluster(2, compute_seconds=[1.0, 9.5], network_seconds=0.0, seed=0)
    assert largest_difference(arrivals(tf_dsgd.DownpourStrategy(cluster), 40), 2) > 20


@pytest.mark.few(5)
@pytest.mark.parametrize("bound", [0, 1, 3])
@pytest.mark.parametrize("name", STRATEGIES)
def test_on_workers_that_run_at_the_same_time(name, bound):
    strategy = STRATEGIES[name](helpers.workers(2), max_staleness=bound)
    order = arrivals(strategy, 120, [RandomSleep(bound)])
    assert largest_difference(order, 2) <= bound + 1


def test_with_a_bound_of_zero_workers_take_turns():
    """Bulk synchronous: in every block of M messages each worker has one."""
    cluster = tf_dsgd.SimulatedCluster(
        4, compute_seconds=tf_dsgd.Exponential(1.0), network_seconds=0.2, seed=5
    )
    order = arrivals(tf_dsgd.DownpourStrategy(cluster, max_staleness=0), 80)
    for block in order.reshape(20, 4):
        assert sorted(block) == [0, 1, 2, 3]


def test_nobody_waits_until_late_workers_have_caught_up():
    """After ten mini-batches of worker 0 alone, the others start from its clock.

    Then three workers of one speed share 30 mini-batches, and stay within the bound of each other.
    """
    cluster = tf_dsgd.SimulatedCluster(
        3, compute_seconds=[1.0, 1.001, 1.002], network_seconds=0.0, seed=0
    )
    strategy = tf_dsgd.DownpourStrategy(cluster, warm_start_steps=10, max_staleness=1)
    order = arrivals(strategy, 40)
    assert order[:10].tolist() == [0] * 10
    # At a rate of one message in three none of the three waits: 10 + 10, 10, 10, or one off.
    counts = np.bincount(order)
    assert 19 <= counts[0] <= 21 and 9 <= counts[1] <= 11 and 9 <= counts[2] <= 11


@dataclasses.dataclass(frozen=True)
class ForeverWaiting(algorithm.ExchangeRule):
    """Lets nobody begin after three messages, as a rule of somebody's own might by mistake."""

    bounds_staleness = True

    def may_start(self, clock, slowest):
        return clock < 3


@pytest.mark.parametrize(
    "cluster",
    [
        lambda: tf_dsgd.LocalCluster(2),
        lambda: tf_dsgd.SimulatedCluster(2),
        lambda: tf_dsgd.SimulatedCluster(2, faults=[fail_at(1, step=1)]),
    ],
    ids=["threads", "simulator", "faults"],
)
def test_workers_that_all_wait_for_one_another_end_training_with_an_error(cluster, monkeypatch):
    monkeypatch.setattr("tf_dsgd.membership.deadlines.STALLED_SECONDS", 2.0)
    rules = algorithm.Algorithm(AccrueGradient(), ForeverWaiting(), CompiledOptimizer())
    strategy = DistributedStrategy(cluster(), rules)
    with strategy.scope():
        model = helpers.constant_gradient_model(keras.optimizers.SGD(0.0))
    x, y = helpers.ones(40)
    with pytest.raises(RuntimeError, match="no worker may begin") as raised:
        model.fit(x, y, batch_size=2, verbose=0)
    assert "worker 0 has sent 3 messages" in str(raised.value)
    assert "ForeverWaiting" in str(raised.value)
    assert strategy.ledger().applied == strategy.ledger().sent


def test_two_moments_in_which_all_wait_are_no_standstill(monkeypatch):
    """In two waits of the main thread, far apart, all may stand the same for a moment."""
    engine = tf_dsgd.DownpourStrategy(tf_dsgd.LocalCluster(1)).engine
    monkeypatch.setattr("tf_dsgd.membership.deadlines.LOOK_SECONDS", 0.01)
    monkeypatch.setattr("tf_dsgd.membership.deadlines.STALLED_SECONDS", 0.0)
    monkeypatch.setattr(engine, "start_threads", lambda: None)
    monkeypatch.setattr(engine, "_threads", {0: None})
    monkeypatch.setattr(engine, "_waiting", {0})
    monkeypatch.setattr(engine.scheduler, "available", 1)
    for _ in range(2):
        answers = iter([False, False, True])  # before and after the first look, and then
        engine.until(lambda answers=answers: next(answers))
        assert not engine.has_failed


def test_a_rule_that_waits_says_so():
    with pytest.raises(TypeError, match="bounds_staleness"):

        class Forgetful(algorithm.ExchangeRule):
            def may_start(self, clock, slowest):
                return clock <= slowest
