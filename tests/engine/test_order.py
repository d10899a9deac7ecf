"""What a shard does under its lock is under it in the graph that TensorFlow runs, too.

TensorFlow simplifies a graph before it runs it: of a header that was packed in the same function it
takes a number before it is packed, and with the slice goes what the slice had to wait for.
"""

import pytest
import tensorflow as tf

from tests.graphs import GIVEN, TAKEN, Graph, apart, collected
from tf_dsgd import _tf, _tf_order
from tf_dsgd.algorithms.hogwild import AddInPlace
from tf_dsgd.engine.row_locks import RowLocks
from tf_dsgd.engine.shard import Shard


class Optimized(Graph):
    """The graph of a function with a lock, as it was run."""

    def __init__(self, function, *inputs):
        with collected() as graphs:
            self.result = function(*inputs)
        begins = ("MutexLock", TAKEN)
        graph = max(graphs, key=lambda g: sum(n.op in begins for n in g.node))
        super().__init__(graph)


def made(**options):
    count = _tf.make_variable(tf.zeros([], tf.int64), device=None)
    return Shard(0, 2, None, count, **options)


def sending(shard, apply):
    """(worker, sequence) -> whether the message was taken, whose header is packed here."""
    receive = tf.function(
        lambda header: shard.receive([header], list, apply),
        input_signature=[tf.TensorSpec([5], tf.int64)],
        autograph=False,
    ).get_concrete_function()

    def send(worker, sequence):
        zero, one = tf.zeros([], tf.int64), tf.ones([], tf.int64)
        return receive(tf.stack([worker, zero, sequence, zero, one]))

    return tf.function(send, autograph=False, input_signature=[tf.TensorSpec([], tf.int64)] * 2)


MESSAGE = (tf.constant(1, tf.int64), tf.constant(1, tf.int64))


def test_all_of_a_message_is_under_the_lock():
    weight = _tf.make_variable(tf.zeros([4]), device=None)

    def apply(content, tau):
        weight.assign_add(tf.fill([4], 0.5), read_value=False)
        return True

    shard = made(remote=True)
    graph = Optimized(sending(shard, apply), *MESSAGE)
    assert bool(graph.result) and weight.numpy().tolist() == [0.5] * 4
    (lock,), (unlocked,) = graph.all(TAKEN), graph.all(GIVEN)
    touching = graph.on_resources()
    assert len(touching) == 8  # turns, row, version; weight, version, steps, staleness, row
    for name in touching:
        assert lock in graph.before(name), name
        assert name in graph.before(unlocked), name


def test_without_a_lock_what_is_applied_is_counted_before_under_the_lock_of_its_sender():
    weight = _tf.make_variable(tf.zeros([4]), device=None)

    def apply(content, tau):
        weight.assign_sub(tf.fill([4], 0.5), read_value=False)
        return True

    shard = made(rule=AddInPlace())
    graph = Optimized(sending(shard, apply), *MESSAGE)
    assert bool(graph.result) and weight.numpy().tolist() == [-0.5] * 4
    (lock,), (given,) = graph.all(TAKEN), graph.all(GIVEN)  # nothing waits in between
    (applied,) = graph.all("AssignSubVariableOp")
    (judged,), (written,) = graph.all("ResourceGather"), graph.all("ResourceScatterUpdate")
    assert judged in graph.before(written) and written in graph.before(applied)
    # Turns, row, version, steps, staleness, row, the weight, that there is a version.
    assert len(graph.on_resources()) == 8
    for name in graph.on_resources():
        assert lock in graph.before(name), name
        assert name in graph.before(given), name


def test_rows_are_read_and_written_under_their_locks():
    table = _tf.make_variable(tf.zeros([3, 2]), device=None)
    locks = RowLocks(None)

    @tf.function(input_signature=[tf.TensorSpec([2], tf.int64)], autograph=False)
    def inner(pair):
        def body():
            found = tf.gather(table, pair[0])
            table.scatter_update(tf.IndexedSlices(found[None] + 1.0, pair[:1]))

        locks.held({0: pair}, body)
        return pair

    called = inner.get_concrete_function()

    @tf.function(input_signature=[tf.TensorSpec([], tf.int64)], autograph=False)
    def add_one(row):
        return called(tf.stack([row, row]))

    graph = Optimized(add_one, tf.constant(1, tf.int64))
    assert table.numpy().tolist() == [[0.0, 0.0], [1.0, 1.0], [0.0, 0.0]]
    locked, unlocked = graph.all("MutexLock"), graph.all("ConsumeMutexLock")
    assert len(graph.all("ResourceGather", "ResourceScatterUpdate")) == 2
    for name in graph.all("ResourceGather", "ResourceScatterUpdate"):
        assert locked & graph.before(name) and unlocked - graph.before(name)
        assert all(name in graph.before(end) for end in unlocked)


@pytest.mark.parametrize("given_edges", [True, False])
def test_an_edge_of_its_own_outlasts_the_slice(given_edges):
    """Without `begin_after` TensorFlow drops the edge: once it keeps it, `begin_after` may go."""
    mutex = tf.raw_ops.MutexV2(shared_name=f"of_{given_edges}")
    table = _tf.make_variable(tf.range(3.0), device=None)

    @tf.function(input_signature=[tf.TensorSpec([2], tf.int64)], autograph=False)
    def inner(pair):
        lock = tf.raw_ops.MutexLock(mutex=mutex)
        operations = tf.compat.v1.get_default_graph().get_operations
        seen = len(operations())
        with tf.control_dependencies([] if given_edges else [lock]):
            found = tf.gather(table, pair[0])
        if given_edges:
            _tf_order.begin_after(lock.op, operations()[seen:])
        with tf.control_dependencies([found]):
            unlocked = tf.raw_ops.ConsumeMutexLock(mutex_lock=lock)
        _tf_order.run_independently(unlocked)
        return found

    called = inner.get_concrete_function()

    @tf.function(input_signature=[tf.TensorSpec([], tf.int64)], autograph=False)
    def outer(row):
        return called(tf.stack([row, row]))

    graph = Optimized(outer, tf.constant(2, tf.int64))
    assert float(graph.result) == 2.0
    (found,), (lock,) = graph.all("ResourceGather"), graph.all("MutexLock")
    assert (lock in graph.before(found)) == given_edges


@pytest.mark.parametrize("kept", [True, False])
def test_a_lost_order_of_a_read_and_a_write_is_found(kept):
    """As conformance's checks look for one in each strategy's graphs."""
    variable = _tf.make_variable(tf.ones([2]), device=None)

    @tf.function(input_signature=[tf.TensorSpec([2])], autograph=False)
    def step(x):
        before = variable.read_value()
        variable.assign_sub(x, read_value=False)
        return before * x

    with collected() as graphs:
        step(tf.constant([1.0, 2.0]))
    (graph,) = (g for g in graphs if any("AssignSub" in node.op for node in g.node))
    for node in graph.node:
        if "AssignSub" in node.op and not kept:
            inputs = [each for each in node.input if not each.startswith("^")]
            node.ClearField("input")
            node.input.extend(inputs)
    found = Graph(graph).without_order()
    assert len(found) == (0 if kept else 1)
    assert kept or {name.rpartition("/")[2] for name in found[0]} == {
        "ReadVariableOp",
        "AssignSubVariableOp",
    }


def test_graphs_told_of_as_one_are_taken_apart():
    """Those of functions that several threads ran for the first time at once."""
    one = _tf.make_variable(tf.zeros([]), device=None)
    other = _tf.make_variable(tf.zeros([]), device=None)
    raised = tf.function(lambda v: v.assign_add(1.0).read_value() * 2.0, autograph=False)
    lowered = tf.function(lambda v: v.assign_sub(1.0).read_value(), autograph=False)
    with collected() as graphs:
        raised(one)
        lowered(other)
    first, second = (g for g in graphs if Graph(g).on_resources())
    together = tf.compat.v1.GraphDef()
    for graph in (first, second, first):
        together.node.extend(graph.node)
    assert {n.name for n in first.node} & {n.name for n in second.node}
    assert [list(g.node) for g in apart(together)] == [
        list(first.node),
        list(second.node),
        list(first.node),
    ]
