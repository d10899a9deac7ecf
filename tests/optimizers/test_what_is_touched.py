"""A sparse gradient's message, and a fetch by rows, touch no whole table; and what memory costs."""

import keras
import numpy as np
import pytest

import tf_dsgd
from tests import helpers
from tests.contract import sketches
from tests.optimizers.bench import Bench
from tests.optimizers.rules import RULES, WORKERS
from tf_dsgd.strategies.base import DistributedStrategy

BY_ROWS = {"ResourceGather", "ResourceGatherNd"} | {
    f"ResourceScatter{kind}" for kind in ("Add", "Sub", "Update", "NdUpdate")
}
TABLE = (50, 3)


def operations(function, variable):
    """The types of all operations on a variable in a traced function, branches included."""
    concrete = function._concrete
    graph = concrete.graph.as_graph_def()
    functions = {f.signature.name: f for f in graph.library.function}
    inside = [
        placeholder.op.name
        for (_, placeholder), handle in zip(concrete.graph.captures, function.captures, strict=True)
        if handle is variable.handle
    ]
    return {op for name in inside for op in _users(graph.node, name, functions)}


def _users(nodes, name, functions):
    for node in nodes:
        for place, given in enumerate(node.input):
            if given.split(":")[0] != name:  # a control input begins with ^
                continue
            if node.op in ("If", "StatelessIf"):
                branches = [node.attr[b].func.name for b in ("then_branch", "else_branch")]
                place -= 1
            elif node.op in ("PartitionedCall", "StatefulPartitionedCall"):
                branches = [node.attr["f"].func.name]
            elif node.op == "Identity":
                yield from _users(nodes, node.name, functions)
                continue
            else:
                yield node.op
                continue
            for branch in branches:
                body = functions[branch]
                argument = body.signature.input_arg[place].name
                yield from _users(body.node_def, argument, functions)


@pytest.mark.few(3)
@pytest.mark.parametrize("rule", RULES)
def test_only_rows_of_tables_are_read_and_written(rule):
    ours = Bench(RULES[rule][0], WORKERS, TABLE, sparse=True)
    optimizer, program = ours.model.optimizer, ours.program
    table = ours.variables[0].value
    slots = [v.value for v in optimizer.variables if v.shape == TABLE]
    for variable in (table, *slots):
        used = operations(program.push[0], variable.primary)
        assert used and used <= BY_ROWS, used
        assert operations(program.fetch[0], variable.primary) <= {"ResourceGather"}
    remembered = optimizer.remembered(table)
    if remembered is not None:
        replica = remembered.value if isinstance(remembered, keras.Variable) else remembered
        snapshots = replica.snapshots._values
        assert operations(program.push[0], snapshots) == {"ResourceGatherNd"}
        assert operations(program.fetch[0], snapshots) == {"ResourceScatterNdUpdate"}


def test_a_dense_gradient_is_seen_by_the_same_look():
    """The look above would also pass if it found nothing."""
    ours = Bench(RULES["adaptive_revision"][0], WORKERS, TABLE)
    gbar = ours.model.optimizer.remembered(ours.variables[0].value).value
    assert "ReadVariableOp" in operations(ours.program.push[0], gbar.primary)
    assert "ReadVariableOp" in operations(ours.program.fetch[0], gbar.primary)


# Sizes of the weights that an optimizer keeps on the shard, as its docstring says.
SLOTS = {
    "adaptive_revision": (3, 1),
    "delay_compensated": (0, 1),
    "delay_compensated_adaptive": (1, 1),
    "fasgd": (3, 0),
}


@pytest.mark.parametrize("rule", SLOTS)
def test_memory_is_what_the_docstring_says(rule):
    slots, per_worker = SLOTS[rule]
    size = 40 * 25 * 4
    ours = Bench(RULES[rule][0], WORKERS, (40, 25))
    (shard,) = ours.strategy.shards()
    scalars = shard.bytes - (1 + slots + per_worker * WORKERS) * size
    assert 0 <= scalars < 100


@pytest.mark.parametrize("rule", ["adaptive_revision", "fasgd"])
def test_other_algorithms_that_apply_several_messages_are_refused(rule):
    strategy = DistributedStrategy(tf_dsgd.SimulatedCluster(2), sketches.softsync(2))
    with strategy.scope():
        model = helpers.constant_gradient_model(RULES[rule][0]())
    with pytest.raises(ValueError, match=r"each message.*Use tf_dsgd\.DownpourStrategy"):
        model.fit(*helpers.ones(8), verbose=0)


def test_two_shapes_of_batches_share_what_is_remembered():
    """A second program (here with sample weights) needs no memory of its own."""
    strategy = tf_dsgd.DownpourStrategy(tf_dsgd.SimulatedCluster(WORKERS))
    with strategy.scope():
        model = helpers.constant_gradient_model(RULES["adaptive_revision"][0]())
    x, y = helpers.ones(12)
    model.fit(x, y, batch_size=1, verbose=0)
    held = strategy.shards()
    model.fit(x, y, sample_weight=np.ones(12), batch_size=1, verbose=0)
    assert len(strategy.batches.programs) == 2
    assert strategy.shards() == held
