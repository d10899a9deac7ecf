"""How far the learning-rate schedule of each optimizer is.

Keras evaluates a schedule at `optimizer.iterations`, which here counts updates; a schedule is meant
in mini-batches. So each optimizer that has a schedule has a count of the mini-batches that it was
given, over all workers. A worker counts on its copy, which a fetch brings up to date, and every
shard counts what it has applied. The optimizer of a second model, or of another `compile`, begins
at 0, as in plain Keras.
"""

from __future__ import annotations

import contextlib
import re
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf_dsgd import _tf
from tf_dsgd.strategies.capture import Optimizers
from tf_dsgd.strategies.variable import ReplicaVariable

_NAME = re.compile(r"schedule_\d+")


class Schedules:
    """The counts that schedules follow.

    Args:
        optimizers: those of the strategy. The one for shards counts with all others.
        make: makes a count, at 0, of this name.
        number: of an optimizer, by which a checkpoint knows it.
        per_iteration: gives the mini-batches in one of the compiled optimizer's iterations.
    """

    def __init__(
        self,
        optimizers: Optimizers,
        make: Callable[[str], ReplicaVariable],
        number: Callable[[Any], int],
        per_iteration: Callable[[], int],
    ):
        self._optimizers = optimizers
        self._make = make
        self._number = number
        self._per_iteration = per_iteration
        self.steps = make("steps")
        """Mini-batches of all optimizers together."""
        self._counts: weakref.WeakKeyDictionary[Any, ReplicaVariable] = weakref.WeakKeyDictionary()
        self._waiting: dict[str, Any] = {}
        """Restored, of optimizers whose counts are not made yet."""

    @property
    def variables(self) -> list[ReplicaVariable]:
        """All counts."""
        return [self.steps, *self._counts.values()]

    def follow(self) -> None:
        """Before a step is traced: every schedule follows its optimizer's count."""
        for optimizer in self._optimizers:
            if _tf.schedule_of(optimizer) is not None:
                _tf.follow_steps(optimizer, self._count(optimizer))

    def of(self, applied: Iterable[keras.optimizers.Optimizer]) -> list[ReplicaVariable]:
        """The counts that a step adds to which applies these optimizers."""
        counting = [*applied, self._optimizers.for_shards]
        return [count for optimizer, count in self._counts.items() if optimizer in counting]

    @contextlib.contextmanager
    def counted_here(self) -> Iterator[list[keras.optimizers.Optimizer]]:
        """Within, a step is traced that no worker takes part in; at the end it is counted.

        Gives the optimizers that it has applied.
        """
        with self._optimizers.noted() as applied:
            yield applied
        for count in [self.steps, *self.of(applied)]:
            count.assign_add(1)

    def written(self, variable: ReplicaVariable) -> None:
        """A variable was assigned from outside: if that is an `iterations`, its schedule goes on.

        So it does where an optimizer's state comes from a file.
        """
        outer = self._optimizers.for_shards
        for optimizer in self._optimizers:
            if optimizer is outer or _tf.iterations_variable(optimizer) is not variable:
                continue
            for each in (optimizer, outer):
                if each is not None and _tf.schedule_of(each) is not None:
                    self._count(each).assign(self._steps_of(optimizer))

    def _steps_of(self, optimizer: keras.optimizers.Optimizer) -> int:
        """The mini-batches that an optimizer's iterations stand for."""
        return int(_tf.iterations_variable(optimizer).numpy()) * self._per_iteration()

    def _count(self, optimizer: keras.optimizers.Optimizer) -> ReplicaVariable:
        """Made when first asked for, while no worker has a step that applies the optimizer."""
        if optimizer not in self._counts:
            with tf.init_scope():
                count = self._counts[optimizer] = self._make("schedule_steps")
                begun = 0 if optimizer is self._optimizers.for_shards else self._steps_of(optimizer)
                count.assign(self._waiting.pop(self._name(optimizer), begun))
        return self._counts[optimizer]

    # -- checkpoints ------------------------------------------------------------------------

    def _name(self, optimizer: keras.optimizers.Optimizer) -> str:
        return f"schedule_{self._number(optimizer)}"

    def state(self) -> dict[str, np.ndarray]:
        """Arrays by name; at rest all shards have the same."""
        made = {self._name(o): count.primary.numpy() for o, count in self._counts.items()}
        return {**self._waiting, **made}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Sets what `state` gave."""
        self._waiting = {n: np.int64(v) for n, v in state.items() if _NAME.fullmatch(n)}
        for optimizer, count in self._counts.items():
            value = self._waiting.pop(self._name(optimizer), None)
            if value is not None:
                count.assign(value)
