"""Where a model's variables are on a cluster of two ps tasks, and what the shards count."""

import time

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_dsgd
from tests import helpers
from tf_dsgd.membership import deadlines
from tf_dsgd.membership.lease import Lease
from tf_dsgd.membership.peer import PeerState


def trained(optimizer, **options):
    strategy = tf_dsgd.DownpourStrategy(**options)
    with strategy.scope():
        model = keras.Sequential(
            [keras.Input((20,)), *(keras.layers.Dense(20) for _ in range(6)), keras.layers.Dense(1)]
        )
        model.compile(optimizer(), "mse")
    x = np.random.default_rng(0).standard_normal((256, 20)).astype("float32")
    model.fit(x, x[:, :1], batch_size=8, verbose=0)
    return strategy, model


def test_balanced_by_bytes_with_the_slots_beside_their_weights(capsys):
    strategy, model = trained(lambda: keras.optimizers.Adam(0.001))
    shards = strategy.shards()
    assert [shard.device.split("/")[1:4] for shard in shards] == [
        ["job:ps", "replica:0", f"task:{s}"] for s in (0, 1)
    ]
    largest = 20 * 20 * 4
    weights = [sum(v.value.shard == s for v in model.weights) for s in (0, 1)]
    assert min(weights) >= 5
    size = [
        sum(v.shape.num_elements() * 4 for v in model.weights if v.value.shard == s) for s in (0, 1)
    ]
    assert abs(size[0] - size[1]) <= largest
    for shard, weight_bytes in zip(shards, size, strict=True):
        # Adam's two slots; the few scalars of optimizer and metrics are on the first.
        assert 3 * weight_bytes <= shard.bytes <= 3 * weight_bytes + 100
    places = {v.path: v.value.shard for v in model.weights}
    for variable in model.optimizer.variables:
        for path, shard in places.items():
            if variable.path.startswith(f"adam/{path.replace('/', '_')}_"):
                assert variable.value.shard == shard
                assert variable.value.primary.device == shards[shard].device
    said = capsys.readouterr().err
    assert "ps 0 at" in said and "ps 1 at" in said and "variables" in said


@pytest.mark.parametrize("periods", [(1, 1), (4, 4), (3, 5)])
def test_every_shard_counts_every_message(periods):
    strategy, _ = trained(
        lambda: keras.optimizers.SGD(0.001), push_every=periods[0], fetch_every=periods[1]
    )
    ledger = helpers.assert_ledger_balances(strategy)
    assert len(ledger.shards) == strategy.num_shards == 2
    for shard in ledger.shards:
        assert [w.steps for w in shard.workers] == [w.steps for w in ledger.workers]
        assert shard.applied == ledger.applied and shard.refused == shard.in_flight == 0
    assert ledger.cut_off == 0
    assert strategy.steps == 32


def test_what_needs_the_whole_accumulated_gradient_is_refused():
    def optimizer():
        return keras.optimizers.SGD(0.1, global_clipnorm=1.0, gradient_accumulation_steps=2)

    with pytest.raises(ValueError, match=r"global_clipnorm.*one ps task, or clipnorm"):
        trained(optimizer)


@pytest.mark.parametrize(
    ("clipping", "sent"), [("clipvalue", 1.0), ("clipnorm", 1.0), ("global_clipnorm", 0.3)]
)
def test_only_the_norm_of_all_is_clipped_on_the_worker(clipping, sent):
    """Nine weights have gradients of 1, whose norm is 3; 0.9 allows each 0.3."""
    strategy = tf_dsgd.DownpourStrategy()
    with strategy.scope():
        optimizer = keras.optimizers.SGD(1.0, **{clipping: 0.9})
        model = helpers.constant_gradient_model(optimizer, width=9)
    model.fit(*helpers.ones(8, width=9), batch_size=2, verbose=0)
    engine = strategy.engine
    batches = helpers.drawn(helpers.ones(2, width=9), 2)
    with tf.device(engine.store.worker_devices[0]):
        engine.program.fetch[0]()
        engine.program.work_on[0](*engine.program.step.packing.pack(batches))
        _, message = engine.program.collect[0]()
    np.testing.assert_allclose(message[0].numpy(), np.full((9, 1), sent), rtol=1e-6)
    at_once = {"clipvalue": 0.9, "clipnorm": 0.3, "global_clipnorm": 0.3}[clipping]
    np.testing.assert_allclose(model.get_weights()[0], np.full((9, 1), -4 * at_once), rtol=1e-6)


def test_a_second_cluster_is_refused():
    trained(lambda: keras.optimizers.SGD(0.001))
    spec = tf.train.ClusterSpec({"worker": ["127.0.0.1:1"], "ps": ["127.0.0.1:2"]})
    with pytest.raises(RuntimeError, match=r"connected to another cluster.*127\.0\.0\.1:1"):
        tf_dsgd.DownpourStrategy(spec)


def test_a_message_twice_and_a_message_of_a_lost_worker():
    strategy, model = trained(lambda: keras.optimizers.SGD(0.001))
    program, store = strategy.engine.program, strategy.engine.store
    before = model.get_weights()
    with tf.device(store.worker_devices[1]):
        heads, message = program.collect[1]()
    # With periods of 1 a gradient stays where the next one overwrites it.
    message = [tf.zeros_like(tensor) for tensor in message]
    fresh = [tf.identity(head) for head in heads]
    assert bool(program.deliver(fresh, message))
    assert not bool(program.deliver(fresh, message))
    old = [tf.tensor_scatter_nd_update(head, [[1], [2]], [-1, 1000]) for head in fresh]
    assert not bool(program.deliver(old, message))
    helpers.assert_close(model.get_weights(), before, 0)
    ledger = strategy.ledger()
    assert [shard.refused for shard in ledger.shards] == [2, 2]


@pytest.mark.parametrize("periods", [(1, 1), (2, 3)])
def test_a_message_that_only_one_shard_has_is_completed(periods):
    """Constant gradients at a rate of 1: weights count the mini-batches that they were given."""
    push_every, fetch_every = periods
    strategy = tf_dsgd.DownpourStrategy(push_every=push_every, fetch_every=fetch_every)
    with strategy.scope():
        x = keras.Input((3,))
        layers = [keras.layers.Dense(n, use_bias=False, kernel_initializer="zeros") for n in (1, 2)]
        model = keras.Model(x, keras.layers.Concatenate()([layer(x) for layer in layers]))
        model.compile(keras.optimizers.SGD(1.0), lambda _, y: keras.ops.sum(y, axis=-1))
    ones = np.ones((2 * 24, 3), "f")
    model.fit(ones, ones, batch_size=2, verbose=0)
    assert {layer.kernel.value.shard for layer in layers} == {0, 1}
    counts = [[-float(w.numpy().mean()) for w in model.trainable_variables]]

    engine = strategy.engine
    program, task = engine.program, engine.tasks[1]
    batches = helpers.drawn((ones[: 2 * push_every], ones[: 2 * push_every]), 2)
    with tf.device(engine.store.worker_devices[1]):
        program.fetch[1]()
        for k in range(push_every):
            program.work_on[1](*program.step.packing.pack(batches[k : k + 1]))
        heads, message = program.collect[1]()
    # As if the worker had died after the first shard's message, and before the second's.
    lost = tf.tensor_scatter_nd_update(heads[1], [[1]], [-1])
    program.deliver([tf.identity(heads[0]), lost], message)
    assert strategy.ledger().cut_off == 1
    task.open = Lease(1, task.incarnation, task.number + 1)
    task.open.steps, task.open.parts = push_every, [batches]
    engine.scheduler.handed_out += push_every
    engine.rounds.members.lose(task)

    strategy.settle()
    counts.append([-float(w.numpy().mean()) for w in model.trainable_variables])
    assert counts == [[24.0, 24.0], [24.0 + push_every] * 2]
    model.fit(ones, ones, batch_size=2, verbose=0)
    assert [-float(w.numpy().mean()) for w in model.trainable_variables] == [48 + push_every] * 2
    ledger = strategy.ledger()
    assert ledger.cut_off == ledger.in_flight == 0
    assert [sum(w.steps for w in shard.workers) for shard in ledger.shards] == [48 + push_every] * 2
    assert ledger.shards[0].refused == 1  # the repetition
    assert ledger.shards[1].refused == 1  # what this test made


def test_a_lost_worker_joins_as_a_new_one_though_it_is_the_same_process():
    """TensorFlow may not have told it of all functions, and does not do so later."""
    strategy, model = trained(lambda: keras.optimizers.SGD(0.001))
    engine = strategy.engine
    engine.rounds.members.lose(engine.tasks[1])
    x = np.zeros((64, 20), "float32")
    deadline = time.monotonic() + 240.0
    before = strategy.ledger().workers[1].steps
    while strategy.ledger().workers[1].steps == before:
        assert time.monotonic() < deadline
        model.fit(x, x[:, :1], batch_size=8, verbose=0)
    peers = engine.rounds.members.connection.peers
    assert {peer.state for peer in peers} == {PeerState.MEMBER}
    helpers.assert_ledger_balances(strategy)


def test_workers_that_are_there_have_longer_to_join_than_those_that_are_not(monkeypatch):
    """A join may take longer than the timeout: TensorFlow waits in it for all others."""
    strategy, model = trained(
        lambda: keras.optimizers.SGD(0.001), cluster=tf_dsgd.TFCluster(worker_timeout_seconds=1)
    )
    engine, connection = strategy.engine, strategy.engine.rounds.members.connection
    join = connection.join
    for task in engine.tasks:
        engine.rounds.members.lose(task)
    refused = []

    def join_late(*arguments):
        refused.append(time.monotonic())
        return refused[-1] > refused[0] + 2.5 and join(*arguments)

    monkeypatch.setattr(connection, "join", join_late)
    model.fit(np.zeros((64, 20), "float32"), np.zeros((64, 1)), batch_size=8, verbose=0)
    assert len(refused) > 2
    helpers.assert_ledger_balances(strategy)


class LosesAll(keras.callbacks.Callback):
    def __init__(self, engine):
        super().__init__()
        self.engine = engine

    def on_train_batch_end(self, batch, logs=None):
        if batch == 3:
            for task in self.engine.tasks:
                self.engine.rounds.members.lose(task)


def test_what_is_left_when_all_workers_were_lost_is_not_done_later(monkeypatch):
    strategy, model = trained(
        lambda: keras.optimizers.SGD(0.001), cluster=tf_dsgd.TFCluster(worker_timeout_seconds=1)
    )
    x, y = np.zeros((160, 20), "float32"), np.zeros((160, 1))
    with monkeypatch.context() as patched:
        patched.setattr(deadlines, "LAST_SECONDS", 0.0)
        connection = strategy.engine.rounds.members.connection
        patched.setattr(connection, "join", lambda *_: False)
        with pytest.raises(TimeoutError, match="All workers were lost, and none came back within"):
            model.fit(x, y, batch_size=8, verbose=0, callbacks=[LosesAll(strategy.engine)])
    done = strategy.steps
    model.fit(x, y, batch_size=8, verbose=0)
    assert strategy.steps == done + 20
    helpers.assert_ledger_balances(strategy)


def test_the_state_of_fewer_shards_goes_on():
    strategy, model = trained(lambda: keras.optimizers.SGD(0.001))
    state = strategy.state()
    counted = ("version", "schedule_step", "counters", "staleness", "worker_staleness")
    of_one = {n: v for n, v in state.items() if n not in [f"{c}_1" for c in counted]}
    # Which shards run a step of it, and each shard's scalars.
    of_each = [n for n, v in of_one.items() if n.startswith("shards_of_") or n == "optimizer_0_0"]
    strategy.restore(of_one | {n: of_one[n][:1] for n in of_each})
    assert strategy.steps == 32
    x, y = np.zeros((160, 20), "float32"), np.zeros((160, 1))
    model.fit(x, y, batch_size=8, verbose=0)
    assert strategy.steps == 52
    helpers.assert_ledger_balances(strategy)
