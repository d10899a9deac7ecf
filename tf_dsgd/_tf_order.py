"""What waits for what in a traced function, past what TensorFlow's public API offers.

As in `_tf`, each private name says why it is needed and in which versions it was seen to work.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import tensorflow as tf

T = TypeVar("T")


def run_independently(operation: tf.Operation) -> None:
    """Lets an operation run as soon as what it was told to wait for is done.

    `tf.function` runs all stateful operations without a resource in the order of tracing.
    `FuncGraph.experimental_acd_manager` exempts one. TF 2.21.
    """
    operation.graph.experimental_acd_manager.run_independently(operation)


def traced(body: Callable[[], T]) -> tuple[T, list[tf.Operation]]:
    """Traces `body`; gives its result and its operations, but for the function's arguments."""
    graph = tf.compat.v1.get_default_graph()
    before = len(graph.get_operations())
    result = body()
    created = graph.get_operations()[before:]
    return result, [op for op in created if op.type != "Placeholder"]


def begin_after(before: tf.Operation, operations: Sequence[tf.Operation]) -> None:
    """Has those of the operations that read or change a state wait for another operation.

    `tf.control_dependencies` does not suffice. It spares an operation its edge if its inputs have
    one, such as the constants of a slice; and where TensorFlow knows what the slice gives, it drops
    that with its constants and their edges. Other operations have no edge: a `concat` with one is
    optimized to what cannot run. `Operation._add_control_input`. TF 2.21.
    """
    for operation in operations:
        if operation.op_def.is_stateful:
            operation._add_control_input(before)


def begin_after_there(before: Sequence[tf.Operation], operations: Sequence[tf.Operation]) -> None:
    """`begin_after` each, of those operations that are on its device: nothing is sent for it."""
    for each in before:
        begin_after(each, [op for op in operations if op.device == each.device])


def leading_to(operations: Sequence[tf.Operation], result: Any) -> set[tf.Operation]:
    """Those of a traced function that are of use: to a result, or to what changes a state."""
    left = [op for op in operations if op.op_def.is_stateful]
    flat = tf.nest.flatten(result, expand_composites=True)
    left += [value.op for value in flat if tf.is_symbolic_tensor(value)]
    found: set[tf.Operation] = set()
    while left:
        op = left.pop()
        if op not in found:
            found.add(op)
            left.extend(tensor.op for tensor in op.inputs)
    return found


def uses(concrete: Any) -> list[bool]:
    """Which of what it takes in a traced function makes use of; its arguments come first."""
    used = leading_to(concrete.graph.get_operations(), concrete.structured_outputs)
    return [tensor.op in used for tensor in concrete.inputs]


def without_unused(concrete: Any, args: Sequence[Any]) -> list[Any]:
    """What a traced function is called with, zeros in place of what it makes no use of.

    TensorFlow would have that sent to where the function runs.
    """
    flat = tf.nest.flatten(list(args), expand_composites=True)
    values = [
        value if used else tf.zeros([d or 0 for d in value.shape], value.dtype)
        for value, used in zip(flat, uses(concrete), strict=False)
    ]
    packed: list[Any] = tf.nest.pack_sequence_as(list(args), values, expand_composites=True)
    return packed


def depends_on_alone(concrete: Any, variables: Sequence[tf.Variable]) -> bool:
    """Whether a traced function gives the same until one of these variables changes."""
    handles = {id(v.handle) for v in variables}
    if any(id(capture) not in handles for capture in concrete.captured_inputs):
        return False
    reads = ("ReadVariableOp", "Placeholder")
    return not any(
        op.op_def.is_stateful and op.type not in reads for op in concrete.graph.get_operations()
    )
