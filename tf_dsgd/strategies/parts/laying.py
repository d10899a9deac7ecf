"""A worker's step traced so that each operation runs on the part where its layer is.

One trace serves all workers, whose devices have other names, so that none can be in it. Instead
each part has a small variable on its device, the anchor, and operations of the part are to be where
a read of the anchor is. Which operations those are:

- what a layer's `call` makes is on the part of the layer, and so is the gradient of it;
- what is made between layers, and after them (losses, metrics, clipping, the local rule), goes with
  what it is made of: with the highest part among its inputs, numbers aside; and where gradients of
  one tensor are added up, with the lowest;
- what acts on a variable is where the variable is, and needs no anchor.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tf_dsgd import _tf_parts
from tf_dsgd.engine.state import Replicated, Store
from tf_dsgd.strategies.parts.parts_table import Edge
from tf_dsgd.strategies.tracing import current_trace


class Laying:
    """One trace of a step: what each operation's part is.

    Args:
        store: what workers own, and their devices.
        anchors: a small variable on each part.
    """

    def __init__(self, store: Store, anchors: Sequence[Replicated]):
        self._store = store
        self._handles = [anchor.template.handle for anchor in anchors]
        self._parts: dict[tuple[int, str], int] = {}
        """Of operations, by graph and name."""
        self._anchors: dict[tuple[int, int], tf.Operation] = {}
        self._graphs: dict[int, Any] = {}
        self._roots: dict[int, list[tf.Tensor]] = {}
        """Of functions that were opened, by their graphs: the anchors as each has them."""
        self._traced: dict[int, Any] = {}
        """Graphs of the forward pass: functions, and the branches and loops within."""
        self._backward = 0
        self._functions: dict[str, list[int | None]] = {}

    def open(self) -> None:
        """From now on the function that is traced is laid on parts."""
        graph = tf.compat.v1.get_default_graph()
        if id(graph) in self._roots:
            return
        # The gradient of a loop takes in no variable that the function did not take in before.
        self._roots[id(graph)] = [graph.capture(handle) for handle in self._handles]
        for part in range(len(self._handles)):
            self._anchor(graph, part)
        _tf_parts.place_by(graph, self._place)

    def gradients(self) -> contextlib.AbstractContextManager[None]:
        """Within, gradients are laid on the parts where what they are of is."""
        return _tf_parts.gradients_traced_in(self._as_forward)

    def note(self, concrete: Any) -> None:
        """Has the parts of what a function gives known where it is called."""
        self._functions[concrete.name] = [self.part_of(tensor) for tensor in concrete.outputs]

    @property
    def part(self) -> int | None:
        """The part of the layer that is traced now."""
        trace = current_trace()
        return None if trace is None else trace.part

    @contextlib.contextmanager
    def on(self, part: int | None) -> Iterator[None]:
        """Within, everything is on that part."""
        trace = current_trace()
        if trace is None:
            yield
            return
        before, trace.part = trace.part, part
        try:
            yield
        finally:
            trace.part = before

    def part_of(self, tensor: Any) -> int | None:
        """Where a tensor is made, if that is known."""
        if not tf.is_symbolic_tensor(tensor):
            return None
        of_function = self._functions.get(_tf_parts.called_function(tensor.op))
        if of_function is not None:
            return of_function[tensor.value_index]
        return self._parts.get((id(tensor.graph), tensor.op.name))

    def part_of_inputs(self, tensors: Sequence[Any], choose: Any = max) -> int | None:
        """The highest part among tensors; among numbers if there is nothing else."""
        known = [(self.part_of(tensor), tensor) for tensor in tensors]
        found = [(part, tensor.shape.rank == 0) for part, tensor in known if part is not None]
        of_tensors = [part for part, is_number in found if not is_number]
        return choose(of_tensors or [part for part, _ in found], default=None)

    def arrived(self, value: Any) -> Any:
        """What a layer is given, on its part: one edge, however often the layer uses it."""
        there = self.part_of(value)
        if there is None or there == self.part:
            return value
        return _tf_parts.masked_alike(tf.identity(value), value)

    @contextlib.contextmanager
    def _as_forward(
        self, inputs: Sequence[Any], outputs: Sequence[Any], gradients: Sequence[Any]
    ) -> Iterator[None]:
        """The gradient of an operation is traced where the operation is.

        A tape keeps of its inputs and outputs what the gradient needs.
        """
        for tensors in (outputs, inputs, gradients):
            part = self.part_of_inputs(tensors)
            if part is not None:
                break
        self._backward += 1
        try:
            with self.on(part):
                yield
        finally:
            self._backward -= 1

    # -- operations -------------------------------------------------------------------------

    def _place(self, operation: tf.Operation) -> None:
        if self._backward and _tf_parts.is_condition_of_a_loop(operation.graph):
            return  # that of a loop's gradient may take in nothing
        graph = operation.graph
        if not self._backward:
            self._traced[id(graph)] = graph
        inputs = list(operation.inputs)
        part = self.part
        if part is None:
            # Gradients of one tensor are added up, and go on to where that was made.
            part = self.part_of_inputs(inputs, min if operation.type == "AddN" else max)
        handles = [tensor for tensor in inputs if tensor.dtype == tf.resource]
        if part is None and len(handles) == 1:
            part = self._part_of_handle(handles[0])
        if part is None:
            return
        if self._backward and id(graph) in self._traced and (id(graph), part) not in self._anchors:
            return  # what the gradient keeps of a branch or loop, which takes in nothing more
        self._graphs[id(graph)] = graph
        self._parts[id(graph), operation.name] = part
        if handles:
            # It has to be where they are; and what is written there, if made of nothing, is there.
            for tensor in inputs:
                made = tensor.op.type in ("Const", "Fill") and self.part_of(tensor) is None
                if made and tensor.graph is graph and len(handles) == 1:
                    self._parts[id(graph), tensor.op.name] = part
                    _tf_parts.put_beside(tensor.op, self._anchor(graph, part), holds=True)
            return
        alone = all(self.part_of(tensor) != part for tensor in inputs)
        _tf_parts.put_beside(operation, self._anchor(graph, part), holds=alone)

    def _anchor(self, graph: Any, part: int) -> tf.Operation:
        """A read of the part's anchor in a graph: of a function, or of a loop within."""
        key = id(graph), part
        if key not in self._anchors:
            root = graph
            while root is not None and id(root) not in self._roots:
                root = getattr(root, "outer_graph", None)
            handle = (self._handles if root is None else self._roots[id(root)])[part]
            with graph.as_default(), tf.control_dependencies(None), tf.compat.v1.device(None):
                read = tf.raw_ops.ReadVariableOp(resource=handle, dtype=tf.float32)
            self._anchors[key] = read.op
            self._graphs[id(graph)] = graph
            self._parts[id(graph), read.op.name] = part
        return self._anchors[key]

    def loops(self) -> None:
        """Once all is traced: a loop of a part, all of whose variables are there, runs there."""
        graph = tf.compat.v1.get_default_graph()
        for operation in filter(_tf_parts.is_control_flow, graph.get_operations()):
            part = self._parts.get((id(graph), operation.name))
            handles = [tensor for tensor in operation.inputs if tensor.dtype == tf.resource]
            if part is None or any(self._part_of_handle(handle) != part for handle in handles):
                continue
            _tf_parts.run_as_one(operation)
            _tf_parts.put_beside(operation, self._anchor(graph, part), holds=True)

    def _part_of_handle(self, handle: tf.Tensor) -> int | None:
        return self._store.part_of(_tf_parts.outer_tensor(handle))

    # -- what is seen -----------------------------------------------------------------------

    def edges(self, pieces: int) -> list[Edge]:
        """What goes from part to part in the graph of the step, per mini-batch."""
        graph = tf.compat.v1.get_default_graph()
        crossing: dict[tuple[int, int], dict[str, tf.Tensor]] = {}
        # What is of no part, as the batch and what is cut from it, is where the worker is: on part
        # 0. Constants, and what is made of nothing else, are wherever they are used.
        anywhere: set[str] = set()
        for operation in graph.get_operations():
            of_constants = all(tensor.op.name in anywhere for tensor in operation.inputs)
            there = self._parts.get((id(graph), operation.name))
            if there is None and of_constants and operation.type != "Placeholder":
                anywhere.add(operation.name)
                continue
            for tensor in operation.inputs:
                here = None if tensor.op.name in anywhere else self.part_of(tensor) or 0
                if here is None or here == (there or 0) or tensor.dtype == tf.resource:
                    continue
                crossing.setdefault((here, there or 0), {})[tensor.name] = tensor
        return [
            Edge(here, there, len(tensors), *_sizes(tensors.values(), pieces))
            for (here, there), tensors in sorted(crossing.items())
        ]


def _sizes(tensors: Any, pieces: int) -> tuple[float, int]:
    """(bytes for each example, bytes for each mini-batch besides)."""
    per_example, fixed = 0, 0
    for tensor in tensors:
        shape = tensor.shape
        if shape.rank is None:
            continue
        rest = int(np.prod([d or 1 for d in shape[1:]])) * tensor.dtype.size
        if shape.rank and shape[0] is None:
            per_example += rest
        else:
            fixed += int(np.prod([d or 1 for d in shape])) * tensor.dtype.size
    return per_example / pieces, fixed
