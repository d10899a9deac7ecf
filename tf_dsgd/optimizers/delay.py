"""What optimizers for delayed gradients share.

A Keras optimizer is given gradients and weights. These also need to know of the message that
brought a gradient: how stale it is, and what its worker saw when it fetched. Whoever applies a
message says so by `applying`; where nobody does, as in plain Keras, there is no delay.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from tf_dsgd import arithmetic
from tf_dsgd.arithmetic import Gradient
from tf_dsgd.checks import real


@dataclasses.dataclass(frozen=True)
class Delay:
    """The delay of one message."""

    staleness: tf.Tensor
    """Updates made between its worker's fetch and its arrival, an int64 scalar."""
    seen: Callable[[Any, tf.Tensor | None], tf.Tensor]
    """From a variable that `remembered` named, and rows or None for all, to the value that the
    worker fetched."""


_applied: contextvars.ContextVar[Delay | None] = contextvars.ContextVar("delay", default=None)


@contextlib.contextmanager
def applying(delay: Delay | None) -> Iterator[None]:
    """Within, gradients are applied, or the application is traced, of a message so delayed."""
    token = _applied.set(delay)
    try:
        yield
    finally:
        _applied.reset(token)


class DelayTolerantOptimizer(keras.optimizers.Optimizer):
    """Base class of optimizers that look at the delay of the gradients they are given."""

    def remembered(self, variable: Any) -> Any:
        """The variable whose value a worker that fetches `variable` is taken to have seen.

        The shard keeps it for each worker. None if the update does not depend on it.
        """
        del variable
        return None

    @property
    def delay(self) -> Delay | None:
        """The delay of the message now being applied; None if there is none."""
        return _applied.get()


class Part:
    """The part of a weight that a gradient touches: all of it, or the rows of a sparse gradient.

    Variables shaped like the weight are read and written only there. A row that occurs several
    times in a sparse gradient is touched once, by the sum.
    """

    def __init__(self, gradient: Gradient, dtype: Any):
        self.rows: tf.Tensor | None = None
        if isinstance(gradient, tf.IndexedSlices):
            merged = arithmetic.merged_rows(gradient)
            self.rows, gradient = merged.indices, merged.values
        self.gradient = tf.cast(gradient, dtype)

    def read(self, variable: Any) -> tf.Tensor:
        """The variable's values there."""
        variable = _native(variable)
        return variable.read_value() if self.rows is None else variable.sparse_read(self.rows)

    def seen(self, variable: Any, delay: Delay) -> tf.Tensor:
        """The values there that the worker of a message saw."""
        return delay.seen(variable, self.rows)

    def write(self, variable: Any, values: tf.Tensor) -> None:
        """`variable := values` there."""
        arithmetic.write(_native(variable), self._of(values))

    def add(self, variable: Any, values: tf.Tensor) -> None:
        """`variable += values` there."""
        arithmetic.add(_native(variable), self._of(values))

    def _of(self, values: tf.Tensor) -> Gradient:
        return values if self.rows is None else tf.IndexedSlices(values, self.rows)


def _native(variable: Any) -> Any:
    return variable.value if isinstance(variable, keras.Variable) else variable


def number(
    optimizer: str, name: str, value: Any, least: float = 0.0, below: float = math.inf
) -> float:
    """A setting of an optimizer, if it is a number from `least` on and below `below`."""
    found = real(value)
    if least <= found < below:
        return found
    end = "" if below == math.inf else f" and less than {below:g}"
    raise ValueError(
        f"{optimizer}'s {name} must be a finite number of at least {least:g}{end}. "
        f"Received: {value!r}."
    )


def positive(optimizer: str, name: str, value: Any, remedy: str) -> float:
    """A setting of an optimizer, if it is a number above 0."""
    found = real(value)
    if 0 < found < math.inf:
        return found
    raise ValueError(
        f"{optimizer}'s {name} must be a finite number above 0{remedy}. Received: {value!r}."
    )


def learning_rate(optimizer: str, value: Any) -> Any:
    """A learning rate, if it is one: a number of at least 0, or a schedule."""
    return value if is_schedule(value) else number(optimizer, "learning_rate", value)


def is_schedule(rate: Any) -> bool:
    """Whether it is what Keras takes for a rate besides numbers."""
    return callable(rate) and not isinstance(rate, type)
