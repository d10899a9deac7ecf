"""What the contract says beyond today's algorithms, each used by a sketch."""

from __future__ import annotations

import contextlib
import dataclasses
import threading

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_dsgd
from tests.contract import sketches
from tests.contract.by_hand import Place
from tf_dsgd import algorithm
from tf_dsgd.strategies.base import DistributedStrategy

pytestmark = pytest.mark.medium

BATCH = 4


def dyadic(batches, features=6, seed=0):
    """Inputs in eighths: sums of their means, and of halves of these, are exact in float32."""
    random = np.random.default_rng(seed)
    return random.integers(-16, 16, (batches * BATCH, features)).astype("float32") / 8


def fit(strategy, x):
    """A model whose loss is its mean output, so that the kernel's gradient is the mean input."""
    with strategy.scope():
        layer = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
        model = keras.Sequential([keras.Input((x.shape[1],)), layer])
        model.compile(keras.optimizers.SGD(1.0), loss=lambda y, p: tf.reduce_mean(p))
    model.fit(x, np.zeros((len(x), 1)), batch_size=BATCH, shuffle=False, verbose=0)
    return model.get_weights()[0][:, 0]


def on(kind):
    if kind == "threads":
        return tf_dsgd.LocalCluster(2)
    return tf_dsgd.SimulatedCluster(2, compute_seconds=[1.0, 1.7], network_seconds=0.3, seed=0)


def gradients(x):
    """The mean input of each mini-batch."""
    return x.reshape(-1, BATCH, x.shape[1]).mean(1)


# -- no lock --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["threads", "simulated"])
def test_without_a_lock_every_message_is_applied_and_counted_once(kind):
    x = dyadic(80)
    strategy = DistributedStrategy(on(kind), sketches.hogwild(0.5))
    np.testing.assert_array_equal(fit(strategy, x), -0.5 * gradients(x).sum(0))
    ledger = strategy.ledger()
    assert (ledger.applied, ledger.refused, ledger.in_flight) == (80, 0, 0)
    assert strategy.steps == strategy.updates == strategy.staleness().count == 80


def test_a_message_without_a_lock_is_refused_when_it_comes_again():
    strategy = DistributedStrategy(on("simulated"), sketches.hogwild(0.5))
    before = fit(strategy, dyadic(8))
    program, sequence = strategy.engine.program, strategy.engine.store.sequences()[1]
    header = tf.constant([1, 0, sequence + 1, strategy.updates - 3, 1], tf.int64)
    assert bool(program.deliver(header, [tf.ones([6, 1])]))
    assert not bool(program.deliver(header, [tf.ones([6, 1])]))
    replaced = tf.constant([1, 7, sequence + 2, strategy.updates, 1], tf.int64)
    assert not bool(program.deliver(replaced, [tf.ones([6, 1])]))
    after = strategy._shards[0].ledger()
    assert (after.workers[1].repeated, after.workers[1].replaced) == (1, 1)
    assert after.workers[1].staleness_max >= 3
    weights = program.step.weights[0].primary.numpy()[:, 0]
    np.testing.assert_array_equal(weights, before - 0.5)


def test_messages_are_applied_at_the_same_time():
    """Two workers meet inside the rule, which a lock would not let them do."""
    met, meeting = [], threading.Barrier(2)

    def meet(ready):
        if not met:
            with contextlib.suppress(threading.BrokenBarrierError):
                meeting.wait(60)
                met.append(True)
        return ready

    class Meeting(sketches.Hogwild):
        def receive(self, shard, message):
            with tf.control_dependencies([tf.py_function(meet, [0], tf.int32)]):
                return super().receive(shard, message)

    rules = sketches.hogwild(0.5)
    rules = algorithm.Algorithm(rules.local, rules.exchange, Meeting(0.5))
    strategy = DistributedStrategy(tf_dsgd.LocalCluster(2), rules)
    x = dyadic(40)
    np.testing.assert_array_equal(fit(strategy, x), -0.5 * gradients(x).sum(0))
    assert met


def test_rows_of_a_table_are_applied_without_a_lock():
    ids = np.random.default_rng(0).integers(0, 20, (48, 3))
    y = np.random.default_rng(1).standard_normal((48, 1)).astype("float32")
    weights = []
    for make in (
        lambda: DistributedStrategy(on("simulated"), sketches.hogwild(0.5)),
        lambda: tf_dsgd.DownpourStrategy(on("simulated"), local_rule="none"),
    ):
        keras.utils.set_random_seed(1)
        strategy = make()
        with strategy.scope():
            layers = [keras.layers.Embedding(20, 2), keras.layers.Flatten(), keras.layers.Dense(1)]
            model = keras.Sequential([keras.Input((3,), dtype="int32"), *layers])
            model.compile(keras.optimizers.SGD(0.5), "mse")
        model.fit(ids, y, batch_size=BATCH, shuffle=False, verbose=0)
        assert strategy.engine.program.step.sparse[0]
        weights.append(model.get_weights())
    for ours, theirs in zip(*weights, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


# -- a codec --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["threads", "simulated"])
def test_what_a_codec_sent_and_what_it_keeps_is_the_sum_of_the_gradients(kind):
    x = dyadic(60)
    strategy = DistributedStrategy(on(kind), sketches.hogwild(1.0, sketches.Threshold(1.5)))
    sent = -fit(strategy, x)
    cells = strategy.engine.store._cells
    (residual,) = [cell for key, cell in cells.items() if key[0] == "residual"]
    kept = sum(copy.numpy()[:, 0] for copy in residual.copies)
    np.testing.assert_array_equal(sent + kept, gradients(x).sum(0))
    assert np.abs(sent).max() > 0 and all(np.abs(c.numpy()).max() < 1.5 for c in residual.copies)
    assert not strategy.engine.program.has_backup_tasks


def test_a_lost_message_of_a_codec_with_a_residual_is_not_computed_again():
    algorithms = [sketches.hogwild(1.0), sketches.hogwild(1.0, sketches.Threshold(1.0))]
    assert [a.local.repeatable and a.codec.repeatable for a in algorithms] == [True, False]


# -- a weight on several shards, by rows -----------------------------------------------------


def test_a_rule_that_knows_its_rows_gives_the_same_on_parts_of_a_table():
    """The shards are made by hand; `test_sketches.py` has a table that is split."""
    table = np.arange(21, dtype="float32").reshape(7, 3)
    rows = np.array([0, 2, 3, 5, 6])
    g = np.random.default_rng(0).standard_normal((5, 3)).astype("float32")

    def after(shard, chosen, values):
        slices = tf.IndexedSlices(tf.constant(values), tf.constant(chosen))
        zero = tf.zeros([], tf.int64)
        sketches.ByRow().receive(shard, algorithm.Message(zero, zero, zero, zero, [slices]))
        return shard.weights[0].numpy()

    expected = table.copy()
    expected[rows] -= g / (1 + rows)[:, None].astype("float32")
    np.testing.assert_array_equal(after(Place([table]), rows, g), expected)
    parts = np.empty_like(table)
    for first in (0, 1):
        mine = rows % 2 == first
        part = Place([table[first::2]], first, 2)
        parts[first::2] = after(part, (rows[mine] - first) // 2, g[mine])
    np.testing.assert_array_equal(parts, expected)


# -- no shard -------------------------------------------------------------------------------


def test_peers_that_take_in_what_all_send_have_equal_weights():
    """Their messages are carried by hand."""
    rules = sketches.peers(1.0, sketches.Threshold(1.5))
    workers = [Place([np.zeros([6], "float32")]) for _ in range(3)]
    x = dyadic(30)
    zero = tf.zeros([], tf.int64)
    for step, gradient in enumerate(gradients(x)):
        m = step % 3
        rules.local.step(workers[m], [tf.constant(gradient)])
        (tensor,) = rules.local.message(workers[m])
        sent = rules.codec.encode(workers[m], 0, tensor)
        for peer in rules.server.peers(m, 3):
            decoded = rules.codec.decode(workers[peer], 0, sent)
            message = algorithm.Message(zero + m, zero, zero + 1, zero, [decoded])
            rules.server.receive(workers[peer], message)
    weights = [worker.weights[0].numpy() for worker in workers]
    kept = sum(worker.cell("residual", 0).numpy() for worker in workers)
    for w in weights:
        np.testing.assert_array_equal(w, weights[0])
        np.testing.assert_array_equal(kept - w, gradients(x).sum(0))


def test_an_engine_carries_their_messages_too():
    """Gradients, by a rule that is not tf_dsgd's own: sent and kept are all of them."""
    strategy = DistributedStrategy(on("simulated"), sketches.peers(1.0, sketches.Threshold(1.5)))
    x = dyadic(30)
    weights = fit(strategy, x)
    store, (weight,) = strategy.engine.store, strategy.engine.program.step.weights
    copies = [copy.numpy()[:, 0] for copy in weight.on_workers().present()]
    view = strategy.engine.program.worker_view.cell("residual", 0)
    (cell,) = [each for each in store.replicas if each.template is view]
    kept = sum(copy.numpy()[:, 0] for copy in cell.present())
    assert len(copies) == 2 and np.abs(weights).max() > 0
    for copy in copies:
        np.testing.assert_array_equal(copy, weights)
    np.testing.assert_array_equal(kept - weights, gradients(x).sum(0))
    ledger = strategy.ledger()
    assert (ledger.applied, ledger.refused, ledger.in_flight) == (30, 0, 0)


@dataclasses.dataclass(frozen=True)
class AroundARing(sketches.SubtractFromPeers):
    """Each worker sends to itself and to the next one."""

    def peers(self, worker, num_workers):
        return [worker, (worker + 1) % num_workers]


def test_who_sends_to_some_workers_only_is_refused():
    rules = sketches.peers(1.0, sketches.Threshold(1.5))
    rules = dataclasses.replace(rules, server=AroundARing(1.0))
    cluster = tf_dsgd.SimulatedCluster(3, compute_seconds=1.0, network_seconds=0.3, seed=0)
    with pytest.raises(ValueError, match=r"AroundARing.*worker 0 of 3 sends to \[0, 1\]"):
        fit(DistributedStrategy(cluster, rules), dyadic(4))
