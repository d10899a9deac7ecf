"""Optimizers for delayed gradients on two shards: each remembers for its own weights."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_dsgd
from tests.optimizers.rules import RULES

TABLE, KERNEL = (40, 3), (3, 30)
WORKERS = 2


def trained(optimizer):
    strategy = tf_dsgd.DownpourStrategy()
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((), dtype="int32"),
                keras.layers.Embedding(*TABLE),
                keras.layers.Dense(KERNEL[1], use_bias=False),
            ]
        )
        model.compile(optimizer(), "mse")
    x = np.random.default_rng(0).integers(0, TABLE[0], 64)
    model.fit(x, np.sin(x)[:, None] * np.ones(KERNEL[1]), batch_size=4, verbose=0)
    return strategy, model


def state(model, shape):
    """A weight and its slots."""
    variables = [*model.trainable_variables, *model.optimizer.variables]
    return [v.numpy() for v in variables if v.shape == shape]


def twin_of(rule, model, shape):
    """A twin that goes on from here."""
    weight, *slots = state(model, shape)
    twin = RULES[rule][1](weight)
    for own, value in zip(twin.slots(), slots, strict=True):
        own[...] = value
    return twin


def fetch(strategy, worker):
    store = strategy.engine.store
    with tf.device(store.worker_devices[worker]):
        strategy.engine.program.fetch[worker]()


def push(strategy, worker, rows, values, kernel):
    """Delivers a message of these gradients, of the version that the worker fetched last."""
    program, store = strategy.engine.program, strategy.engine.store
    with tf.device(store.worker_devices[worker]):
        heads, message = program.collect[worker]()
    fetched = store.clock.of(worker).numpy()[-strategy.num_shards :]
    with tf.device("CPU:0"):
        heads = [
            tf.tensor_scatter_nd_update(tf.constant(head.numpy()), [[3], [4]], [version, 1])
            for head, version in zip(heads, fetched, strict=True)
        ]
        sparse = tf.IndexedSlices(
            tf.constant(values, tf.float32), tf.constant(rows, tf.int64), tf.constant(TABLE)
        )
        given = [sparse if s else tf.constant(kernel, tf.float32) for s in program.step.sparse]
        changes = [tf.zeros_like(tensor) for tensor in message[len(given) :]]
    assert bool(program.deliver(heads, [*given, *changes]))


@pytest.mark.parametrize("rule", ["adaptive_revision", "delay_compensated_adaptive", "fasgd"])
def test_a_table_and_a_kernel_on_two_shards(rule):
    strategy, model = trained(RULES[rule][0])
    shards = [v.value.shard for v in model.trainable_variables]
    assert sorted(shards) == [0, 1] and strategy.num_shards == 2
    table, kernel = (twin_of(rule, model, shape) for shape in (TABLE, KERNEL))
    random = np.random.default_rng(1)
    events = [("fetch", m) for m in range(WORKERS)]
    events += [(random.choice(["fetch", "push", "push"]), random.integers(2)) for _ in range(30)]
    for kind, m in events:
        if kind == "fetch":
            fetch(strategy, m)
            table.fetch(m)
            kernel.fetch(m)
            continue
        rows = random.choice(TABLE[0], 3, replace=False)
        gradient = np.zeros(TABLE)
        gradient[rows] = random.integers(-8, 9, (3, TABLE[1])) / 4
        dense = random.integers(-8, 9, KERNEL) / 4
        push(strategy, m, rows, gradient[rows], dense)
        table.push(m, gradient, rows)
        kernel.push(m, dense)
    for twin, shape in ((table, TABLE), (kernel, KERNEL)):
        for ours, theirs in zip(state(model, shape), [twin.w, *twin.slots()], strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=5e-5, atol=5e-5)


def test_what_is_remembered_is_on_the_shard_of_its_weight():
    strategy, model = trained(RULES["adaptive_revision"][0])
    for weight in model.trainable_variables:
        remembered = model.optimizer.remembered(weight.value).value
        device = strategy.shards()[weight.value.shard].device
        assert remembered.primary.device == device
        assert remembered.snapshots._values.device == device
