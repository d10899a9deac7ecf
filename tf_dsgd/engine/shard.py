"""A shard's own books: versions, messages and staleness, all counted inside its lock.

A message is applied at most once and whole. Its header is
(worker, incarnation, sequence, version, steps); a sequence number that is not above the last one
applied from that worker, or an incarnation that is not the current one, is refused.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tf_dsgd import _tf
from tf_dsgd.engine.state import INCARNATION, SEQUENCE, STEPS, VERSION, WORKER

# A worker's row in the shard's books.
_INCARNATION, _SEQUENCE, _APPLIED, _REFUSED, _REPEATED, _STEPS, _TAU_SUM, _TAU_MAX = range(8)

# Staleness is counted exactly up to here; larger values share the last bin. Mean and maximum are
# exact always.
STALENESS_BINS = 1 << 14


@dataclasses.dataclass(frozen=True)
class WorkerLedger:
    """Messages and steps of one worker, as its shard counted them."""

    steps: int
    sent: int
    applied: int
    refused: int
    staleness_mean: float
    staleness_max: int

    @property
    def in_flight(self) -> int:
        """Messages sent and not yet counted by the shard."""
        return self.sent - self.applied - self.refused


@dataclasses.dataclass(frozen=True)
class Ledger:
    """Where every message went: `sent == applied + refused + in_flight`.

    A message that arrives twice counts twice in `sent`, once in `applied` and once in `refused`.
    """

    workers: tuple[WorkerLedger, ...]

    @property
    def sent(self) -> int:
        """Messages sent by all workers, repeats included."""
        return sum(w.sent for w in self.workers)

    @property
    def applied(self) -> int:
        """Messages applied, each exactly once."""
        return sum(w.applied for w in self.workers)

    @property
    def refused(self) -> int:
        """Messages not applied: applied before, or sent by a worker that has been replaced."""
        return sum(w.refused for w in self.workers)

    @property
    def in_flight(self) -> int:
        """Messages sent and not yet counted by the shard."""
        return self.sent - self.applied - self.refused


@dataclasses.dataclass(frozen=True)
class Staleness:
    """Staleness of all applied messages, in updates; NaN where nothing was applied yet."""

    count: int
    mean: float
    p50: float
    p99: float
    max: float

    def __str__(self) -> str:
        return (
            f"mean {self.mean:.2f}, p50 {self.p50:g}, p99 {self.p99:g}, max {self.max:g} "
            f"over {self.count} messages"
        )


class Shard:
    """Books of one shard; `schedule_step` is the mini-batch at which schedules are evaluated."""

    def __init__(self, num_workers: int, device: str | None, schedule_step: tf.Variable):
        self.num_workers = num_workers
        self.schedule_step = schedule_step
        self.version = _tf.make_variable(tf.zeros([], tf.int64), device=device, name="version")
        self._books = _tf.make_variable(
            tf.zeros([num_workers, 8], tf.int64), device=device, name="books"
        )
        self._bins = _tf.make_variable(
            tf.zeros([STALENESS_BINS], tf.int64), device=device, name="staleness"
        )

    def receive(
        self, header: tf.Tensor, apply: Callable[[tf.Tensor], tf.Tensor | bool]
    ) -> tf.Tensor:
        """Traces the acceptance of one message: `apply(staleness)` runs if it is fresh.

        Returns whether it was applied. Must be traced into a function that runs under the lock.
        """
        worker = header[WORKER]
        row = tf.gather(self._books, worker)
        current = tf.equal(header[INCARNATION], row[_INCARNATION])
        fresh = tf.logical_and(current, header[SEQUENCE] > row[_SEQUENCE])

        def accept() -> tf.Tensor:
            tau = self.version.read_value() - header[VERSION]
            changed = apply(tau)
            self.version.assign_add(tf.cast(changed, tf.int64), read_value=False)
            self.schedule_step.assign_add(header[STEPS], read_value=False)
            self._bins.scatter_add(
                tf.IndexedSlices(
                    tf.ones([1], tf.int64), tf.clip_by_value(tau, 0, STALENESS_BINS - 1)[None]
                )
            )
            return tf.stack(
                [
                    row[_INCARNATION],
                    header[SEQUENCE],
                    row[_APPLIED] + 1,
                    row[_REFUSED],
                    row[_REPEATED],
                    row[_STEPS] + header[STEPS],
                    row[_TAU_SUM] + tau,
                    tf.maximum(row[_TAU_MAX], tau),
                ]
            )

        def refuse() -> tf.Tensor:
            one, none = tf.ones([], tf.int64), tf.zeros([], tf.int64)
            repeated = tf.where(current, one, none)
            return row + tf.stack([none, none, none, one, repeated, none, none, none])

        self._books.scatter_update(
            tf.IndexedSlices(tf.cond(fresh, accept, refuse)[None], worker[None])
        )
        return fresh

    def ledger(self, sequences: Sequence[int]) -> Ledger:
        """The books; `sequences[m]` is how many messages worker m has numbered."""
        workers = []
        for row, sent in zip(self._books.numpy(), sequences, strict=True):
            applied = int(row[_APPLIED])
            workers.append(
                WorkerLedger(
                    steps=int(row[_STEPS]),
                    sent=int(sent) + int(row[_REPEATED]),
                    applied=applied,
                    refused=int(row[_REFUSED]),
                    staleness_mean=float(row[_TAU_SUM]) / applied if applied else float("nan"),
                    staleness_max=int(row[_TAU_MAX]),
                )
            )
        return Ledger(tuple(workers))

    def steps_done(self) -> int:
        """Mini-batches in all messages applied."""
        return int(self._books.numpy()[:, _STEPS].sum())

    def staleness(self) -> Staleness:
        """Summary over all workers."""
        books, bins = self._books.numpy(), self._bins.numpy()
        count = int(books[:, _APPLIED].sum())
        if not count:
            return Staleness(0, *[float("nan")] * 4)
        below = np.cumsum(bins)

        def percentile(share: float) -> float:
            return float(np.searchsorted(below, share * count))

        return Staleness(
            count=count,
            mean=float(books[:, _TAU_SUM].sum()) / count,
            p50=percentile(0.5),
            p99=percentile(0.99),
            max=float(books[:, _TAU_MAX].max()),
        )

    def state(self) -> dict[str, np.ndarray]:
        """All counters, for a checkpoint."""
        return {
            "version": self.version.numpy(),
            "schedule_step": self.schedule_step.numpy(),
            "books": self._books.numpy(),
            "staleness": self._bins.numpy(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Sets all counters."""
        self.version.assign(state["version"])
        self.schedule_step.assign(state["schedule_step"])
        self._books.assign(state["books"])
        self._bins.assign(state["staleness"])
