"""State that workers change by themselves and that is one: counters, moving statistics, strings.

A message brings what a worker has made of each since it last sent. A fetch brings what the shard
has, onto which the worker puts what it has not sent yet. One object per variable knows how, for the
worker that sends, the shard that receives, and the worker that fetches.
"""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tf_dsgd import arithmetic
from tf_dsgd.engine import statistics
from tf_dsgd.engine.shard import Shard
from tf_dsgd.engine.state import Replicated

Cells = Callable[..., tf.Variable]
"""(key, shape, dtype) -> memory of a shard."""


class Merged(abc.ABC):
    """One variable; its methods are called while the worker's or the shard's part is traced.

    Args:
        variable: the strategy's variable.
        base: what each worker's copy was when it last sent or fetched.
    """

    def __init__(self, variable: Any, base: Replicated):
        self.variable = variable
        self._base = base.template

    @property
    def _copy(self) -> tf.Variable:
        """The first worker's."""
        return self.variable.on_workers().template

    def collect(self, *, take_out: bool = False) -> Any:
        """On a worker: what it sends; with `take_out` the copy is then as it was before that."""
        now = tf.identity(self._copy.read_value())
        change = self._change(now)
        if take_out:
            self._copy.assign(self._base.read_value(), read_value=False)
        else:
            self._base.assign(now, read_value=False)
        return change

    def take(self, value: tf.Tensor) -> None:
        """On a worker: a fetch brought the shard's value."""
        self._copy.assign(self._onto(value), read_value=False)
        self._base.assign(value, read_value=False)

    def take_in(self, change: Any) -> None:
        """On a worker that has not changed it: a peer sent this."""
        self._copy.assign(self._with(self._copy.read_value(), change), read_value=False)

    def begin(self) -> None:
        """On a worker: what it sends next is what it changes from here on."""
        self._base.assign(self._copy.read_value(), read_value=False)

    @abc.abstractmethod
    def _with(self, value: tf.Tensor, change: Any) -> tf.Tensor:
        """What `value` is, once the change was taken in."""

    @abc.abstractmethod
    def _change(self, now: tf.Tensor) -> Any:
        """What is sent, where the copy is `now`."""

    @abc.abstractmethod
    def _onto(self, value: tf.Tensor) -> tf.Tensor:
        """The copy, where the shard has `value`."""

    @abc.abstractmethod
    def apply(self, change: Any, shard: Shard) -> None:
        """On the shard: a worker sent this."""


class Added(Merged):
    """A number: each worker's change is added, or that part of it."""

    def __init__(self, variable: Any, base: Replicated, parts: int = 1):
        super().__init__(variable, base)
        self._parts = parts

    def _change(self, now: tf.Tensor) -> tf.Tensor:
        return arithmetic.difference(now, self._base.read_value())

    def _onto(self, value: tf.Tensor) -> tf.Tensor:
        return value + self._change(self._copy.read_value())

    def _part(self, change: tf.Tensor) -> tf.Tensor:
        return change if self._parts == 1 else change / self._parts

    def _with(self, value: tf.Tensor, change: tf.Tensor) -> tf.Tensor:
        return value + self._part(change)

    def apply(self, change: tf.Tensor, shard: Shard) -> None:
        there = self.variable.on_shard(shard.index)
        there.assign_add(self._part(change), read_value=False)


class Replaced(Merged):
    """What cannot be added, as a string: the last one sent counts."""

    def _change(self, now: tf.Tensor) -> tf.Tensor:
        return now

    def _onto(self, value: tf.Tensor) -> tf.Tensor:
        return value

    def _with(self, value: tf.Tensor, change: tf.Tensor) -> tf.Tensor:
        return change

    def apply(self, change: tf.Tensor, shard: Shard) -> None:
        self.variable.on_shard(shard.index).assign(change, read_value=False)


class Moving(Merged):
    """A moving statistic, as `statistics` has it on a worker."""

    def _moved(self, now: tf.Tensor) -> statistics.Moved:
        base = tf.identity(self._base.read_value())
        return statistics.Moved(now, base, self.variable.times.template.read_value())

    def _change(self, now: tf.Tensor) -> statistics.Moved:
        moved = self._moved(now)
        self.variable.times.template.assign(0, read_value=False)
        return moved

    def _onto(self, value: tf.Tensor) -> tf.Tensor:
        moved = self._moved(self._copy.read_value())
        return statistics.compose(value, moved, self.variable.momentum)

    def _with(self, value: tf.Tensor, change: statistics.Moved) -> tf.Tensor:
        return statistics.compose(value, statistics.Moved(*change), self.variable.momentum)


class Composed(Moving):
    """One of which a shard composes each message with what it has."""

    def apply(self, change: statistics.Moved, shard: Shard) -> None:
        statistics.apply(self.variable, statistics.Moved(*change), shard.lock_free)


class Collected(Moving):
    """One of which a shard averages several messages, when its rule says so.

    Args:
        variable: as `Merged`.
        base: as `Merged`.
        cells: memory of the variable's shard.
    """

    def __init__(self, variable: Any, base: Replicated, cells: Cells):
        super().__init__(variable, base)
        self._cells = cells

    def apply(self, change: statistics.Moved, shard: Shard) -> None:
        statistics.collect(self.variable, statistics.Moved(*change), self._cells)

    def average(self) -> None:
        """On the shard: what it has collected is averaged."""
        statistics.average(self.variable, self._cells)


def merged(
    variable: Any, base: Replicated, num_workers: int, cells: Cells, together: bool
) -> Merged:
    """How this variable becomes one.

    Args:
        variable: the strategy's variable.
        base: what each worker's copy was when it last sent or fetched.
        num_workers: of the cluster.
        cells: memory of the variable's shard.
        together: whether the server rule averages moving statistics.
    """
    if variable.momentum is not None:
        return Collected(variable, base, cells) if together else Composed(variable, base)
    if variable.dtype.is_floating and variable.averaged:
        # Workers' sums would diverge (11 workers, period 20): average instead.
        return Added(variable, base, num_workers)
    if arithmetic.is_number(variable.dtype):
        return Added(variable, base)
    return Replaced(variable, base)
