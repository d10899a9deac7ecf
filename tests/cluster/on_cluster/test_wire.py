"""What crosses between a worker and a shard, read from the graphs TensorFlow itself partitioned."""

import collections

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_dsgd
from tests import helpers
from tf_dsgd import _tf

PERIOD, BATCH = 4, 8


@pytest.fixture(scope="module")
def sends():
    """(name, type, from, to) of all tensors that cross in a round of one worker.

    Control edges cross as constants without a value; their type is None here.
    """
    strategy = tf_dsgd.DownpourStrategy(push_every=PERIOD, fetch_every=PERIOD)
    with strategy.scope():
        model = keras.Sequential(
            [keras.Input((4,)), keras.layers.Dense(5000), keras.layers.Dense(1, use_bias=False)]
        )
        model.compile(keras.optimizers.Adam(0.01), "mse")
    x, y = helpers.regression(64, ids=False)
    model.fit(x, y, batch_size=BATCH, verbose=0)
    packed = helpers.packed(strategy, (x[: PERIOD * BATCH], y[: PERIOD * BATCH]), BATCH)
    worker = strategy.engine.store.worker_devices[0]
    found = []
    graphs = _tf.partitions(strategy.engine.program.round_on[0], worker, packed)
    for graph in graphs:
        nodes = {node.name: node for node in graph.node}
        for node in graph.node:
            if node.op == "_Send":
                ends = [node.attr[f"{end}_device"].s.decode() for end in ("send", "recv")]
                jobs = [end.split("/")[1].removeprefix("job:") for end in ends]
                name = node.attr["tensor_name"].s.decode()
                control = nodes[node.input[0].split(":")[0]].op == "Const"
                found.append((name, None if control else tf.as_dtype(node.attr["T"].type), *jobs))
    assert {device.split("/")[1] for g in graphs for n in g.node for device in [n.device]} >= {
        "job:worker",
        "job:ps",
    }
    return found


def crossing(sends, sender, receiver):
    return [(name, dtype) for name, dtype, a, b in sends if (a, b) == (sender, receiver)]


def test_a_local_step_has_no_remote_operation(sends):
    """Steps are the body of a loop; no tensor of the body goes to or comes from a shard."""
    between = crossing(sends, "worker", "ps") + crossing(sends, "ps", "worker")
    assert between
    assert not [name for name, _ in between if "while" in name]


def test_a_message_is_one_tensor_per_large_weight_and_one_for_all_that_is_small(sends):
    """A kernel of 80 kB is large; for each of two shards the rest, headers included, is joined."""
    types = sorted(dtype.name for _, dtype in crossing(sends, "worker", "ps") if dtype)
    assert types == ["float32", "uint8", "uint8"]


def test_a_fetch_is_one_tensor_per_large_weight_and_one_for_all_that_is_small(sends):
    types = sorted(dtype.name for _, dtype in crossing(sends, "ps", "worker") if dtype)
    assert types == ["float32", "uint8", "uint8"]


def test_no_part_of_a_round_waits_for_the_end_of_another_elsewhere(sends):
    """A round begins on each shard with the fetch; that it has ended there only this test asks."""
    controls = collections.Counter((a, b) for _, dtype, a, b in sends if dtype is None)
    assert controls == {("worker", "ps"): 2, ("ps", "worker"): 2}


def test_shards_do_not_talk_to_each_other(sends):
    assert not crossing(sends, "ps", "ps")


def test_steps_without_an_exchange_capture_nothing_of_a_shard():
    """What one step of `work_on` captures is the worker's alone."""
    strategy = tf_dsgd.DownpourStrategy(push_every=2, fetch_every=2)
    with strategy.scope():
        model = helpers.constant_gradient_model(keras.optimizers.SGD(1.0))
    x, y = helpers.ones(32)
    model.fit(x, y, batch_size=2, verbose=0)
    for m, function in enumerate(strategy.engine.program.work_on):
        assert {h.device for h in function.captures} == {strategy.engine.store.worker_devices[m]}
    np.testing.assert_array_equal(model.get_weights()[0], np.full((3, 1), -16, "f"))
