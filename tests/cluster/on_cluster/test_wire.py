"""What crosses between a worker and a shard, read from the graphs TensorFlow itself partitioned."""

import collections

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_dsgd
from tests import helpers
from tests.graphs import TAKEN, Graph, joined
from tf_dsgd import _tf_prepared

PERIOD, BATCH = 4, 8


def partitions():
    """The graphs of a round of one worker, of two dense layers."""
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
    return _tf_prepared.partitions(strategy.engine.program.round_on[0], worker, packed)


def partitions_with_tables(period, function="round_on", batches=None):
    """The same of two tables that are split by rows, and a layer."""
    strategy = tf_dsgd.DownpourStrategy(
        push_every=period, fetch_every=period, placement={"embedding.*": tf_dsgd.Rows()}
    )
    with strategy.scope():
        ids = keras.Input((2,), dtype="int32")
        tables = [keras.layers.Embedding(101, 16)(ids) for _ in range(2)]
        model = keras.Model(ids, keras.layers.Dense(1)(keras.ops.sum(sum(tables), 1)))
        model.compile(keras.optimizers.Adagrad(0.1), "mse")
    x = np.random.default_rng(0).integers(0, 101, (64, 2)).astype("int32")
    model.fit(x, x[:, :1], batch_size=BATCH, verbose=0)
    number = (batches or period) * BATCH
    packed = helpers.packed(strategy, (x[:number], x[:number, :1]), BATCH)
    worker = strategy.engine.store.worker_devices[0]
    return _tf_prepared.partitions(getattr(strategy.engine.program, function)[0], worker, packed)


def sends_of(graphs):
    """(name, type, from, to) of all tensors that cross in a round of one worker.

    Control edges cross as constants without a value; their type is None here.
    """
    found = []
    for graph in graphs:
        nodes = {node.name: node for node in graph.node}
        for node in graph.node:
            if node.op == "_Send":
                ends = [node.attr[f"{end}_device"].s.decode() for end in ("send", "recv")]
                jobs = [end.split("/")[1].removeprefix("job:") for end in ends]
                name = node.attr["tensor_name"].s.decode()
                control = nodes[node.input[0].split(":")[0]].op == "Const"
                found.append((name, None if control else tf.as_dtype(node.attr["T"].type), *jobs))
    jobs = {node.device.split("/")[1] for graph in graphs for node in graph.node}
    assert jobs >= {"job:worker", "job:ps"}
    return found


@pytest.fixture(scope="module")
def graphs():
    return partitions()


@pytest.fixture(scope="module")
def sends(graphs):
    return sends_of(graphs)


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
    """That it has ended on each shard only this test asks; and a fetch that asks for no rows begins
    there without a word of the worker."""
    controls = collections.Counter((a, b) for _, dtype, a, b in sends if dtype is None)
    assert controls == {("ps", "worker"): 2}


def test_a_push_is_after_the_fetch_though_nobody_says_so(graphs):
    """Of no two operations on a variable, one of which writes, is it open which comes first."""
    graph = Graph(joined(graphs))
    for shard in ("/job:ps/replica:0/task:0", "/job:ps/replica:0/task:1"):
        locks = [taken for taken in graph.all(TAKEN) if shard in graph.device(taken)]
        fetch, push = sorted(locks, key=lambda taken: len(graph.before(taken)))
        here = {name for name in graph.on_resources() if shard in graph.device(name)}
        read = {name for name in here if push not in graph.before(name)}
        assert len(read) >= 3  # turns; a weight, the version
        assert read <= graph.before(push)
        assert all(fetch in graph.before(name) for name in here)
    assert not graph.without_order()


@pytest.mark.parametrize("period", [1, 3])
def test_rows_of_all_tables_are_asked_for_given_and_changed_by_one_tensor_each(period):
    """With the fetch of all else, two tensors each way for a shard; at periods of 1, too."""
    graphs = partitions_with_tables(period)
    sends = sends_of(graphs)
    types = sorted(dtype.name for _, dtype in crossing(sends, "worker", "ps") if dtype)
    assert types == ["int64", "int64", "uint8", "uint8"]  # numbers of rows; a message
    types = sorted(dtype.name for _, dtype in crossing(sends, "ps", "worker") if dtype)
    assert types == ["uint8"] * 4  # weights and versions; rows
    controls = collections.Counter((a, b) for _, dtype, a, b in sends if dtype is None)
    assert controls == {("ps", "worker"): 2}
    graph = Graph(joined(graphs))
    assert len(graph.all("ResourceGather")) >= 4 + 2  # of two tables on each shard; of its counters
    assert not graph.without_order()


def test_rounds_in_one_call_follow_one_another():
    """Each fetches and reads rows when its last message was applied, with as few tensors as one."""
    rounds = 4
    graphs = partitions_with_tables(1, "rounds_on", rounds)
    sends = sends_of(graphs)
    types = collections.Counter(dtype for _, dtype in crossing(sends, "worker", "ps") if dtype)
    assert types == {tf.int64: 2 * rounds, tf.uint8: 2 * rounds}
    types = collections.Counter(dtype for _, dtype in crossing(sends, "ps", "worker") if dtype)
    assert types == {tf.uint8: 4 * rounds}
    controls = collections.Counter((a, b) for _, dtype, a, b in sends if dtype is None)
    assert controls == {("ps", "worker"): 2}
    graph = Graph(joined(graphs))
    assert len(graph.all("ResourceGather")) >= rounds * (4 + 2)
    assert not graph.without_order()


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
