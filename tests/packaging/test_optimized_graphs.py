"""The search for unordered accesses finds them, and nothing else, in graphs written by hand."""

import pytest
import tensorflow as tf

from tests import optimized_graphs


def graph(*nodes):
    """Of `(name, operation, inputs)`."""
    made = tf.compat.v1.GraphDef()
    for name, operation, inputs in nodes:
        node = made.node.add(name=name, op=operation, input=inputs)
        if operation == "_Arg":
            node.attr["T"].type = tf.resource.as_datatype_enum
    return made


VARIABLE = ("v", "_Arg", [])
OTHER = ("w", "_Arg", [])
READ = ("read", "ReadVariableOp", ["v"])


@pytest.mark.parametrize(
    ("nodes", "found"),
    [
        ([READ, ("write", "AssignSubVariableOp", ["v", "x"])], [("read", "write")]),
        ([READ, ("write", "AssignSubVariableOp", ["v", "x", "^read"])], []),
        ([READ, ("write", "AssignSubVariableOp", ["w", "x"])], []),
        ([READ, ("again", "ReadVariableOp", ["v"])], []),
        # Through other operations, and a handle by another name.
        ([READ, ("y", "Mul", ["read", "x"]), ("write", "AssignVariableOp", ["v", "y:0"])], []),
        (
            [READ, ("same", "Identity", ["v"]), ("write", "AssignVariableOp", ["same", "x"])],
            [("read", "write")],
        ),
        # What a function does is not seen: it may write.
        ([READ, ("call", "StatefulPartitionedCall", ["v", "x"])], [("read", "call")]),
        ([READ, ("call", "StatefulPartitionedCall", ["v", "read"])], []),
    ],
)
def test_what_is_found(nodes, found):
    made = graph(VARIABLE, OTHER, ("x", "Const", []), *nodes)
    assert optimized_graphs.unordered(made) == found


def test_what_tensorflow_runs_is_seen():
    variable = tf.Variable(1.0)

    @tf.function
    def step(x):
        return variable.assign_add(x * variable.read_value())

    with optimized_graphs.collected() as graphs:
        step(tf.constant(2.0))
    found = [g for g in graphs if any("AssignAdd" in node.op for node in g.node)]
    assert found and all(not optimized_graphs.unordered(g) for g in graphs)
    for made in found:  # without its control edges
        for node in made.node:
            kept = [i for i in node.input if not i.startswith("^")]
            del node.input[:]
            node.input.extend(kept[:1] if "AssignAdd" in node.op else kept)
        assert optimized_graphs.unordered(made)
