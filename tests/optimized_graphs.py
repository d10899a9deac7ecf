"""Finds accesses to one variable that a graph does not order, as TensorFlow runs it.

TensorFlow orders what a traced function does with a variable by control edges. Its graph optimizer
may drop one that it takes for superfluous and needs: seen with TensorFlow 2.21 and plain Keras, of
a step that reads a weight twice, once for another part's gradient, so that it was read after its
update in every third run (`examples/synthetic_gradients.py` without a strategy).
"""

from __future__ import annotations

import contextlib
from collections import defaultdict

import tensorflow as tf
from tensorflow.python.eager import context  # noqa: TID251, of tests alone

READS = {"ReadVariableOp", "ResourceGather", "ResourceGatherNd", "VariableShape"}
READS |= {"VarIsInitializedOp"}
PASS_ON = {"Identity", "_Send", "_Recv", "Switch", "Merge", "Enter"}


@contextlib.contextmanager
def collected():
    """Gives a list that has, afterwards, the optimized graphs that first ran meanwhile."""
    with context.collect_graphs(optimized=True) as graphs:
        yield graphs


def unordered(graph):
    """Pairs (operation, operation) of which one writes a variable that both use, in any order."""
    nodes = {node.name: node for node in graph.node}
    variables = {name for name, node in nodes.items() if _is_variable(node)}
    given = {name: [_node(i) for i in node.input] for name, node in nodes.items()}
    before = _ancestors(given)
    number = {name: n for n, name in enumerate(nodes)}

    def ordered(one, other):
        return before[one] >> number[other] & 1 or before[other] >> number[one] & 1

    uses = defaultdict(list)
    for name, node in nodes.items():
        if node.op in PASS_ON:
            continue
        sources = {_source(nodes, _node(i)) for i in node.input if not i.startswith("^")}
        for source in sources & variables:
            uses[source].append(name)
    return [
        (one, other)
        for names in uses.values()
        for n, one in enumerate(names)
        for other in names[n + 1 :]
        if not (nodes[one].op in READS and nodes[other].op in READS) and not ordered(one, other)
    ]


def _node(tensor):
    return tensor.lstrip("^").split(":")[0]


def _is_variable(node):
    handle = tf.resource.as_datatype_enum
    return node.op == "VarHandleOp" or (node.op == "_Arg" and node.attr["T"].type == handle)


def _source(nodes, name):
    while name in nodes and nodes[name].op in PASS_ON and nodes[name].input:
        name = _node(nodes[name].input[0])
    return name


def _ancestors(given):
    """Of each node those that end before it begins, as the bits of a number; a loop's are one."""
    number = {name: n for n, name in enumerate(given)}
    before = dict.fromkeys(given, 0)
    changed = True
    while changed:
        changed = False
        for name, inputs in given.items():
            found = before[name]
            for each in inputs:
                found |= before[each] | 1 << number[each]
            if found != before[name]:
                before[name] = found
                changed = True
    return before
