"""Metrics while an epoch runs: over the mini-batches that all workers have done so far.

A worker's metrics hold what that worker did, or what shards knew when it fetched. What `fit` shows
is a sum over workers: of what each mini-batch changed in the metrics' state. In this process they
add to one sum on the host. In another process a worker adds up its own, which the chief reads now
and then, and then adds up those of all; a worker begins anew once it has fetched another number of
the reset, as it does before its first mini-batch after a drain. Mini-batches that two workers
compute, because the first was lost or late, are in the sum twice; in the epoch's logs, which are
the metrics themselves, they are not.

Of a step that returns other numbers there is no sum, but it is known all the same whether a worker
has reported some since the reset.

State is a vector for each type that metrics have, so that a total and its count are of one moment.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tf_dsgd import _tf
from tf_dsgd.engine.state import Replicated, Store


class Resets:
    """Counts how often running metrics began anew, for workers in other processes.

    Args:
        variable: the count, as workers fetch it.
    """

    def __init__(self, variable: Any):
        self.variable = variable
        self.number = 0

    def count(self) -> int:
        """One more: its number."""
        self.number += 1
        self.variable.assign(self.number)
        return self.number


class RunningMetrics:
    """The state of a step's metrics since they were last reset, over all workers.

    Args:
        metrics: their variables.
        resets: counts resets; None where workers are in this process.
        store: what workers own.
        host_device: where the sum is.
        other_logs: whether the step shows other numbers in their place.
    """

    def __init__(
        self,
        metrics: Sequence[Any],
        resets: Resets | None,
        store: Store,
        host_device: str | None,
        *,
        other_logs: bool = False,
    ):
        self._metrics = list(metrics)
        self._shows = bool(self._metrics) or other_logs
        self._resets = resets
        self._store = store
        dtypes = {v.dtype.name: v.dtype for v in self._metrics}
        self._groups = [
            [v for v in self._metrics if v.dtype == dtypes[name]] for name in sorted(dtypes)
        ]
        sizes = [sum(v.shape.num_elements() for v in group) for group in self._groups]
        with tf.init_scope():
            self._sums = [
                _tf.make_variable(
                    tf.zeros([size], group[0].dtype), device=host_device, name="running_metrics"
                )
                for group, size in zip(self._groups, sizes, strict=True)
            ]
        self.specs = [
            tf.TensorSpec([], tf.int64),
            *(tf.TensorSpec(s.shape, s.dtype) for s in self._sums),
        ]
        """Of what `worker_total` gives."""
        if not self._shows or resets is None:
            self.specs = []
        self._is_shown = not self._shows
        self.were_written = True
        """Whether metrics were assigned from outside, as by their reset, since `reset`."""
        self._editions = itertools.count(1)
        self.edition = 0
        """Another one when there is more to show: workers' threads count, each by one call."""
        self._number = 0
        self._first: list[tf.Tensor] = []
        self._of_workers: dict[int, tuple[int, Sequence[tf.Tensor]]] = {}
        """By worker: the number of the reset, and what it reported."""
        self._of_the_lost: list[tuple[int, Sequence[tf.Tensor]]] = []

    # -- traced for a worker ----------------------------------------------------------------

    def state(self) -> list[tf.Tensor]:
        """The state that a worker has now."""
        return [
            tf.concat([tf.reshape(v.on_workers().template.read_value(), [-1]) for v in group], 0)
            for group in self._groups
        ]

    def add(self, before: Sequence[tf.Tensor]) -> None:
        """Adds what a worker in this process has changed since it had that state."""
        for total, now, then in zip(self._sums, self.state(), before, strict=True):
            total.assign_add(now - then, read_value=False)

    def worker_total(self, before: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """The number of the reset, and what a worker in another process has changed since it."""
        if self._resets is None or not self._shows:
            return []
        number = self._resets.variable.on_workers().template.read_value()
        if not self._metrics:
            return [number]
        seen = self._cell("seen", [], tf.int64).template
        anew = seen.read_value() != number
        totals = []
        for i, (now, then) in enumerate(zip(self.state(), before, strict=True)):
            cell = self._cell(i, now.shape.as_list(), now.dtype).template
            total = tf.where(anew, tf.zeros_like(now), cell.read_value()) + (now - then)
            cell.assign(total, read_value=False)
            totals.append(total)
        seen.assign(number, read_value=False)
        return [number, *totals]

    def _cell(self, key: Any, shape: Sequence[int], dtype: tf.DType) -> Replicated:
        def make() -> Replicated:
            return self._store.replicate(
                lambda _: tf.zeros(shape, dtype), dtype=dtype, name="running_metrics"
            )

        return self._store.cell(("running", key, *map(_tf.unique_id, self._metrics)), make)

    # -- on the chief -----------------------------------------------------------------------

    @property
    def sums(self) -> Sequence[tf.Variable]:
        """What `shown` reads."""
        return self._sums

    def shown(self) -> dict[int, tf.Tensor]:
        """The sum, by the id of each variable; traced in the step that `fit` runs."""
        found = {}
        for total, group in zip(self._sums, self._groups, strict=True):
            parts = tf.split(total.read_value(), [v.shape.num_elements() for v in group])
            for variable, part in zip(group, parts, strict=True):
                found[id(variable)] = tf.reshape(part, variable.shape)
        return found

    @property
    def begun(self) -> bool:
        """Whether a mini-batch is in the sum, or nobody need wait for one."""
        return self._is_shown or bool(self._reported())

    def begin(self) -> None:
        """A mini-batch was added in this process, or what a worker has done cannot be read."""
        self._is_shown = True
        self.edition = next(self._editions)

    def is_of(self, variable: Any) -> bool:
        """Whether it is the state of one of these metrics."""
        return any(v is variable for v in self._metrics)

    def reset(self) -> None:
        """At rest, before the first mini-batch after metrics were assigned: begins with those."""
        self.were_written = False
        self._first = [
            tf.concat([tf.reshape(v.value_at_rest(), [-1]) for v in group], 0)
            for group in self._groups
        ]
        self._is_shown = not self._shows
        if self._resets is not None and self._shows:
            self._number = self._resets.count()
        self._of_the_lost = []
        self.add_up()

    def _is_current(self, number: int) -> bool:
        """Whether that is the last reset, or, where there is no sum, that of another step since."""
        return number == self._number or (not self._metrics and number > self._number)

    def report(self, worker: int, values: Sequence[tf.Tensor]) -> bool:
        """A worker in another process has reported this of `worker_total`.

        Returns:
            Whether it is of the time since the reset, as far as that is known.
        """
        if not values:
            return True
        self._of_workers[worker] = number, _ = int(values[0]), values[1:]
        return self._is_current(number)

    def forget(self, worker: int) -> None:
        """A worker is new, and begins with nothing; what the one before it reported stays."""
        reported = self._of_workers.pop(worker, None)
        if reported is not None:
            self._of_the_lost.append(reported)

    def add_up(self) -> None:
        """Adds up what workers reported."""
        reported = self._reported()
        for i, total in enumerate(self._sums):
            total.assign(tf.add_n([self._first[i], *(values[i] for values in reported)]))
        self.edition = next(self._editions)

    def _reported(self) -> list[Sequence[tf.Tensor]]:
        """What workers reported since the reset; those of before may still report."""
        reported = [*list(self._of_workers.values()), *self._of_the_lost]
        return [values for number, values in reported if self._is_current(number)]
