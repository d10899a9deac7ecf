"""A worker's step traced so that each operation runs on the part where its layer is.

One trace serves all workers, whose devices have other names, so that none can be in it. Instead each
part has a small variable on its device, the anchor, and operations of the part are to be where a
read of the anchor is. Which operations those are:

- what a layer's `call` makes is on the part of the layer, and so is the gradient of it;
- what is made between layers, and after them (losses, metrics, clipping, the local rule), goes with
  what it is made of: with the highest part among its inputs, numbers aside; and where gradients of
  one tensor are added up, with the lowest;
- what acts on a variable is where the variable is, and needs no anchor.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf_dsgd import _tf, _tf_parts
from tf_dsgd.console import say
from tf_dsgd.engine.state import Replicated, Store
from tf_dsgd.strategies import microbatches
from tf_dsgd.strategies.model_parallel import Layered, ModelParallel, laid_out
from tf_dsgd.strategies.parts_table import Edge, PartInfo, PartsTable
from tf_dsgd.strategies.variable import ReplicaVariable, current_trace


class ReplicaParts:
    """The parts of all replicas under one strategy.

    Args:
        value: what the user asked for.
        store: what workers own, and their devices.
    """

    def __init__(self, value: ModelParallel, store: Store):
        self.value = value
        self.store = store
        self._latest: LaidStep | None = None
        self._said = False

    @functools.cached_property
    def anchors(self) -> list[Replicated]:
        """A small variable on each part of each worker."""
        zero = np.float32(0)
        with tf.init_scope():
            return [
                self.store.replicate(lambda _: zero, dtype=tf.float32, name="part", part=part)
                for part in range(self.store.num_parts)
            ]

    def step(
        self, call: Callable[[Any], Any], model: keras.Model | None, optimizers: Any
    ) -> LaidStep:
        """A step, to be traced in place of `call`.

        Raises:
            ValueError: if that is not possible, by name.
        """
        if model is None:
            raise ValueError(
                "model_parallel lays out the layers of a Keras model that Model.fit trains, and "
                "this step is a function. Train by model.fit, if need be with a train_step of your "
                f"own, or leave model_parallel out. Received: {self.value!r}."
            )
        if model.jit_compile:
            raise ValueError(
                "jit_compile=True does not go with model_parallel: XLA compiles nothing that is on "
                f"several devices. Leave one of the two out. Received: the model {model.name!r}."
            )
        layers = laid_out(model, self.value, self.store.num_parts)
        microbatches.check(
            model, [layered.layer for layered in layers], self.value.microbatches
        )
        self._latest = LaidStep(self, call, layers, optimizers)
        return self._latest

    def say_once(self, unplaced: Sequence[str]) -> None:
        """Says which layers no pattern matched."""
        if unplaced and not self._said:
            self._said = True
            say(
                "model_parallel has no pattern for these layers, each of which is on the part of "
                f"its inputs: {', '.join(unplaced)}"
            )

    def table(self) -> PartsTable:
        """What `strategy.placement()` gives: of the step that was traced last."""
        step = self._latest
        rows = []
        for part in range(self.store.num_parts):
            devices = tuple(of_worker[part] for of_worker in self.store.part_devices)
            here = [] if step is None else [x for x in step.layers if step.part_of(x) == part]
            weights = {id(v): v for each in here for v in _tf_parts.variables_of(each.layer)}
            sizes = [int(np.prod(v.shape)) for v in weights.values()]
            paths = tuple(layered.path for layered in here)
            rows.append(PartInfo(part, devices, paths, sum(sizes)))
        return PartsTable(tuple(rows), () if step is None else tuple(step.edges))


class LaidStep:
    """A step whose layers are on parts, to be called while it is traced.

    Args:
        parts: of the strategy.
        call: the step, of a batch.
        layers: of its model.
        optimizers: that the step may apply.
    """

    def __init__(
        self,
        parts: ReplicaParts,
        call: Callable[[Any], Any],
        layers: Sequence[Layered],
        optimizers: Any,
    ):
        self._parts = parts
        self._call = call
        self.layers = list(layers)
        self._optimizers = optimizers
        self._found: dict[int, int] = {}
        """Of layers that no pattern matched, by their ids: the part of their inputs."""
        self.edges: list[Edge] = []
        self._laying: _Laying | None = None
        for layered in self.layers:
            for variable in _tf_parts.variables_of(layered.layer):
                replica = variable.value
                if isinstance(replica, ReplicaVariable) and replica.copies is None:
                    replica.part = layered.part

    def __call__(self, batch: Any) -> Any:
        number = self._parts.value.microbatches
        in_pieces = functools.partial(
            microbatches.in_pieces, self._call, batch, number, self._optimizers
        )
        if self._parts.store.num_parts == 1:
            return in_pieces()
        self._laying = laying = _Laying(self._parts.store, self._parts.anchors)
        laying.open()
        with laying.gradients(), self._wrapped(laying):
            outputs = in_pieces()
        self.edges = laying.edges(number)
        self._parts.say_once(
            [
                f"{layered.path} (part {self._found[id(layered.layer)]})"
                for layered in self.layers
                if id(layered.layer) in self._found and _tf_parts.variables_of(layered.layer)
            ]
        )
        return outputs

    def traced(self, concrete: Any) -> None:
        """Called with the function of the step."""
        if self._laying is not None:
            self._laying.note(concrete)

    def lay_rule(self) -> None:
        """Called where a rule is about to be traced, which acts on what that function gave."""
        if self._laying is not None:
            self._laying.open()

    def part_of(self, layered: Layered) -> int | None:
        """On which part a layer is, once that is known."""
        if layered.part is not None:
            return layered.part
        return self._found.get(id(layered.layer))

    @contextlib.contextmanager
    def _wrapped(self, laying: _Laying) -> Iterator[None]:
        """Within, each layer's `call` runs on its part."""
        with contextlib.ExitStack() as stack:
            for layered in self.layers:
                run = functools.partial(self._run, laying, layered, layered.layer.call)
                stack.enter_context(_tf.method_replaced(layered.layer, "call", run))
            yield

    def _run(
        self, laying: _Laying, layered: Layered, call: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        part = layered.part if layered.is_own else laying.part
        if part is None:
            part = laying.part_of_inputs(tf.nest.flatten((args, kwargs)))
            self._found[id(layered.layer)] = 0 if part is None else part
        with laying.on(part):
            args, kwargs = tf.nest.map_structure(laying.arrived, (args, kwargs))
            return call(*args, **kwargs)


class _Laying:
    """One trace: what each operation's part is."""

    def __init__(self, store: Store, anchors: Sequence[Replicated]):
        self._store = store
        self._handles = [anchor.template.handle for anchor in anchors]
        self._parts: dict[tuple[int, str], int] = {}
        """Of operations, by graph and name."""
        self._anchors: dict[tuple[int, int], tf.Operation] = {}
        self._graphs: dict[int, Any] = {}
        self._functions: dict[str, list[int | None]] = {}

    def open(self) -> None:
        """From now on the function that is traced is laid on parts."""
        graph = tf.compat.v1.get_default_graph()
        if id(graph) in self._graphs:
            return
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
        if not _is_symbolic(tensor):
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
        with self.on(part):
            yield

    # -- operations -------------------------------------------------------------------------

    def _place(self, operation: tf.Operation) -> None:
        inputs = list(operation.inputs)
        part = self.part
        if part is None:
            # Gradients of one tensor are added up, and go on to where that was made.
            part = self.part_of_inputs(inputs, min if operation.type == "AddN" else max)
        handles = [tensor for tensor in inputs if tensor.dtype == tf.resource]
        if part is None and len(handles) == 1:
            part = self._store.part_of(_tf_parts.outer_tensor(handles[0]))
        if part is None:
            return
        graph = operation.graph
        self._graphs[id(graph)] = graph
        self._parts[id(graph), operation.name] = part
        if handles:
            return  # it has to be where they are
        alone = all(self.part_of(tensor) != part for tensor in inputs)
        _tf_parts.put_beside(operation, self._anchor(graph, part), holds=alone)

    def _anchor(self, graph: Any, part: int) -> tf.Operation:
        """A read of the part's anchor in a graph: of a function, or of a loop within."""
        key = id(graph), part
        if key not in self._anchors:
            with graph.as_default(), tf.control_dependencies(None), tf.compat.v1.device(None):
                read = tf.raw_ops.ReadVariableOp(resource=self._handles[part], dtype=tf.float32)
            self._anchors[key] = read.op
            self._graphs[id(graph)] = graph
            self._parts[id(graph), read.op.name] = part
        return self._anchors[key]

    # -- what is seen -----------------------------------------------------------------------

    def edges(self, pieces: int) -> list[Edge]:
        """What goes from part to part in the graph of the step, per mini-batch."""
        graph = tf.compat.v1.get_default_graph()
        crossing: dict[tuple[int, int], dict[str, tf.Tensor]] = {}
        for operation in graph.get_operations():
            there = self._parts.get((id(graph), operation.name))
            for tensor in operation.inputs if there is not None else ():
                here = self._made_on(tensor)
                if here not in (None, there) and tensor.dtype != tf.resource:
                    crossing.setdefault((here, there), {})[tensor.name] = tensor
        return [
            Edge(here, there, len(tensors), *_sizes(tensors.values(), pieces))
            for (here, there), tensors in sorted(crossing.items())
        ]

    def _made_on(self, tensor: tf.Tensor) -> int | None:
        """As `part_of`; a batch comes where the worker is, on part 0."""
        return 0 if tensor.op.type == "Placeholder" else self.part_of(tensor)


def _is_symbolic(value: Any) -> bool:
    return isinstance(value, tf.Tensor) and hasattr(value, "graph") and not _is_eager(value)


def _is_eager(value: Any) -> bool:
    return isinstance(value, tf.__internal__.EagerTensor)


def _sizes(tensors: Any, pieces: int) -> tuple[float, int]:
    """(bytes for each example, bytes for each mini-batch besides)."""
    per_example, fixed = 0.0, 0
    for tensor in tensors:
        shape = tensor.shape
        if shape.rank is None:
            continue
        rest = int(np.prod([d or 1 for d in shape[1:]])) * tensor.dtype.size
        if shape.rank and shape[0] is None:
            per_example += rest / pieces
        else:
            fixed += int(np.prod([d or 1 for d in shape])) * tensor.dtype.size
    return per_example, fixed


def use(strategy: Any, value: ModelParallel | None) -> None:
    """Lays the replicas of a strategy that was just made; None leaves them on one device each."""
    if value is not None:
        strategy.placement.parts = ReplicaParts(value, strategy.engine.store)
