"""The parts of the replicas under a strategy with `model_parallel`, and the step laid on them."""

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
from tf_dsgd.strategies.parts import microbatches
from tf_dsgd.strategies.parts.laying import Laying
from tf_dsgd.strategies.parts.model_parallel import Layered, ModelParallel, laid_out
from tf_dsgd.strategies.parts.parts_table import Edge, PartInfo, PartsTable
from tf_dsgd.strategies.variable import ReplicaVariable


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
        microbatches.check(model, [layered.layer for layered in layers], self.value.microbatches)
        own = type(model).train_step is keras.Model.train_step
        of_keras = model.optimizer if own else None
        weighted = microbatches.Weighted(model, self.value.microbatches)
        self._latest = LaidStep(self, call, layers, optimizers, weighted, of_keras)
        return self._latest

    def say_once(self, unplaced: Sequence[str], idle: Sequence[str]) -> None:
        """Says which layers no pattern matched, and which parts have no layer."""
        if self._said:
            return
        self._said = True
        if idle:
            say(
                f"model_parallel has no layer for part {', '.join(idle)}, of "
                f"{self.store.num_parts} of each worker, which does nothing. Name it in a pattern, "
                "before others that match the same layers, or give workers fewer devices or tasks."
            )
        if unplaced:
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
        weighted: the means of its logs.
        of_keras: where the step is Keras's own, its optimizer.
    """

    def __init__(
        self,
        parts: ReplicaParts,
        call: Callable[[Any], Any],
        layers: Sequence[Layered],
        optimizers: Any,
        weighted: microbatches.Weighted,
        of_keras: Any,
    ):
        self._parts = parts
        self._call = call
        self.layers = list(layers)
        self._optimizers = optimizers
        self._weighted = weighted
        self._of_keras = of_keras
        self._found: dict[int, int] = {}
        """Of layers that no pattern matched, by their ids: the part of their inputs."""
        self.edges: list[Edge] = []
        self._laying: Laying | None = None
        for layered in self.layers:
            for variable in _tf_parts.variables_of(layered.layer):
                replica = variable.value
                if isinstance(replica, ReplicaVariable) and replica.copies is None:
                    replica.part = layered.part

    def __call__(self, batch: Any) -> Any:
        number = self._parts.value.microbatches
        in_pieces = functools.partial(
            microbatches.in_pieces,
            self._call,
            batch,
            number,
            self._optimizers,
            self._weighted,
            self._of_keras,
        )
        if self._parts.store.num_parts == 1:
            return in_pieces()
        self._laying = laying = Laying(self._parts.store, self._parts.anchors)
        laying.open()
        with laying.gradients(), self._wrapped(laying):
            outputs = in_pieces()
        laying.loops()
        self.edges = laying.edges(number)
        used = set(map(self.part_of, self.layers))
        self._parts.say_once(
            [
                f"{layered.path} (part {self._found[id(layered.layer)]})"
                for layered in self.layers
                if id(layered.layer) in self._found and _tf_parts.variables_of(layered.layer)
            ],
            [str(part) for part in range(self._parts.store.num_parts) if part not in used],
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

    def on_part(self, part: int, fn: Callable[[], Any]) -> Any:
        """Runs `fn`, whose operations are on that part."""
        if self._laying is None:
            return fn()
        self._laying.open()
        with self._laying.on(part):
            return fn()

    def part_of(self, layered: Layered) -> int | None:
        """On which part a layer is, once that is known."""
        if layered.part is not None:
            return layered.part
        return self._found.get(id(layered.layer))

    @contextlib.contextmanager
    def _wrapped(self, laying: Laying) -> Iterator[None]:
        """Within, each layer's `call` runs on its part."""
        with contextlib.ExitStack() as stack:
            for layered in self.layers:
                run = functools.partial(self._run, laying, layered, layered.layer.call)
                stack.enter_context(_tf.method_replaced(layered.layer, "call", run))
            yield

    def _run(
        self, laying: Laying, layered: Layered, call: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        part = layered.part if layered.is_own else laying.part
        if part is None:
            part = laying.part_of_inputs(tf.nest.flatten((args, kwargs)))
            self._found[id(layered.layer)] = 0 if part is None else part
        with laying.on(part):
            args, kwargs = tf.nest.map_structure(laying.arrived, (args, kwargs))
            return call(*args, **kwargs)


def use(strategy: Any, value: ModelParallel | None) -> None:
    """Lays the replicas of a strategy that was just made; None leaves them on one device each."""
    if value is not None:
        strategy.placement.parts = ReplicaParts(value, strategy.engine.store)
