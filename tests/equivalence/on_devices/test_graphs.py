"""What TensorFlow makes of a worker's function: which device has what, and what it sends."""

import collections
import re

import pytest
import tensorflow as tf

import tf_dsgd
from tests.equivalence.on_devices import models
from tf_dsgd import _tf_prepared

COMPUTES = ("MatMul", "TanhGrad", "Tanh", "BiasAddGrad")


def trained(microbatches=1, name="skip", **options):
    make, data, parts = models.SPLITS[name]
    strategy = tf_dsgd.DownpourStrategy(
        tf_dsgd.LocalCluster(2, devices_per_worker=2),
        push_every=2,
        fetch_every=2,
        model_parallel=tf_dsgd.ModelParallel(parts, microbatches=microbatches),
        **options,
    )
    with strategy.scope():
        model = make()
    model.fit(*data(), batch_size=8, verbose=0)
    return strategy


def nodes(strategy, worker, data=models.vectors, function="work_of"):
    """(device, operation, name, inputs) of a worker's function, by default of a local step."""
    device = strategy.engine.store.worker_devices[worker]
    called = getattr(strategy.engine.program, function)[worker]
    batch = [tf.constant(array[:8]) for array in data()]
    for graph in _tf_prepared.partitions(called, device, batch):
        for node in graph.node:
            yield node.device[-5:], node.op, node.name, list(node.input)


def layer_of(name):
    """The layer by whose name scope an operation is known; in the tests' models a, b or c."""
    found = {part.split("_")[0] for part in name.split("/")} & {"a", "b", "c"}
    return found.pop() if len(found) == 1 else None


@pytest.mark.parametrize(
    ("worker", "split"),
    [(0, "skip"), (1, "skip"), pytest.param(1, "skip backwards", marks=pytest.mark.slow)],
)
def test_each_layer_computes_on_its_device_forward_and_backward(worker, split):
    first, second = f"CPU:{2 * worker}", f"CPU:{2 * worker + 1}"
    if split == "skip backwards":
        first, second = second, first
    found = collections.defaultdict(collections.Counter)
    for device, operation, name, _ in nodes(trained(name=split), worker):
        assert device in (first, second) or not layer_of(name)
        if layer_of(name) and operation.endswith(COMPUTES):
            found[layer_of(name)][device, "gradient" in name] += 1
    # A layer's one multiplication forward is two backward, or one where nothing is before it.
    assert found["a"].keys() == {(first, False), (first, True)}
    for layer in "bc":
        assert found[layer].keys() == {(second, False), (second, True)}


WRITES = {"AssignVariableOp": 1, "AssignAddVariableOp": 1, "ResourceApplyGradientDescent": 2}
"""Operations that change variables, and which of their inputs is the value or the gradient."""


@pytest.mark.parametrize("function", ["work_of", pytest.param("collect", marks=pytest.mark.slow)])
def test_weights_and_what_goes_with_them_change_by_what_is_computed_there(function):
    """The local rule, and what a codec holds back, on the second part."""
    codec = tf_dsgd.compression.Threshold(0.01)
    data = models.vectors if function == "work_of" else tuple
    found = list(nodes(trained(compression=codec), 0, data, function))
    written = [
        (operation, inputs[WRITES[operation]].partition(":")[0])
        for device, operation, _, inputs in found
        if device == "CPU:1" and operation in WRITES
    ]
    received = {name for _, operation, name, _ in found if operation == "_Recv"}
    # Of `b` and of `c` a kernel and a bias each.
    assert len(written) >= 4 and not [value for _, value in written if value in received]


@pytest.mark.parametrize("microbatches", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_activations_and_their_gradients_are_all_that_travels(microbatches):
    """Besides labels and numbers: no weight and no gradient of one, and each edge once a piece."""
    sent = [
        (device, name)
        for device, operation, name, _ in nodes(trained(microbatches), 0)
        if operation == "_Recv" and device in ("CPU:0", "CPU:1")
    ]
    forward = [name for device, name in sent if device == "CPU:1" and layer_of(name) == "a"]
    assert len(forward) == microbatches, forward
    backward = [name for device, name in sent if device == "CPU:0" and "AddN" in name]
    assert len(backward) == microbatches, backward
    wrong = [
        n for _, n in sent if "MatMul_1" in n or "BiasAddGrad" in n or layer_of(n) in ("b", "c")
    ]
    assert wrong == []


def test_a_loop_runs_on_its_part_and_sends_nothing_at_its_turns():
    found = list(nodes(trained(name="recurrent"), 0, models.sequences))
    loops = collections.Counter(device for device, operation, *_ in found if operation == "While")
    assert loops == {"CPU:0": 4, "CPU:1": 2}  # of the GRU in both directions, and of the LSTM
    # Of the layers' own; the steps of a round are a loop around all.
    own = re.compile(r"/[abc](_\d+)?/(.*/)?while")
    inside = {operation for _, operation, name, _ in found if own.search(name)}
    assert "While" in inside and not inside & {"Switch", "NextIteration", "Exit"}


def test_the_table_says_what_is_where_and_what_travels():
    strategy = trained()
    table = strategy.placement()
    first, second = table.parts
    assert first.layers == ("a",) and first.parameters == 5 * 6 + 6
    assert second.layers == ("b", "sum", "c") and second.parameters == (6 * 6 + 6) + (6 + 1)
    assert first.devices == ("/device:CPU:0", "/device:CPU:2")
    edges = {(edge.start, edge.end): edge for edge in table.edges}
    assert edges.keys() == {(0, 1), (1, 0)}
    # Six activations of four bytes for each of 8 examples, back as gradients; and forward a label.
    assert edges[1, 0].bytes == 8 * 6 * 4
    assert 8 * (6 + 1) * 4 <= edges[0, 1].bytes < 8 * (6 + 1) * 4 + 100
    lines = str(table).splitlines()
    assert lines[1].split() == ["0", "CPU:0", "36", "a"]
    assert any(line.startswith("1-0") and "192" in line for line in lines)


def test_the_table_counts_what_is_cut_for_pieces():
    """Of an example the six activations, back their gradients, and forward its label, as in one."""
    edges = {(e.start, e.end): e for e in trained(microbatches=3).placement().edges}
    assert edges[1, 0].bytes_per_example == 6 * 4
    assert edges[0, 1].bytes_per_example == (6 + 1) * 4
