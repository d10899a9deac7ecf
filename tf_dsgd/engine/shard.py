"""A shard's own books: versions, messages and staleness, all counted inside its lock.

A message is applied at most once and whole. Its header is
(worker, incarnation, sequence, version, steps). It is refused, and counted by its reason, if it is
a repetition (its number is not above the last one applied from that worker), if its sender was
replaced (its incarnation is not the current one), or if its sender failed (the incarnation is
`WITHDRAWN`).
"""

from __future__ import annotations

import dataclasses
import functools
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import tensorflow as tf

from tf_dsgd import _tf
from tf_dsgd.engine.bundles import Bundle

T = TypeVar("T")

# A worker's row in the shard's books.
_INCARNATION, _SEQUENCE, _APPLIED, _STEPS, _TAU_SUM, _TAU_MAX, _REPEATED, _REPLACED, _FAILED = (
    range(9)
)
_ROW = 9
REASONS = ("repeated", "replaced", "failed")

# The incarnation in a message that its sender takes back, because its step raised an error.
WITHDRAWN = -1

# Staleness is counted exactly up to here; larger values share the last bin. Mean and maximum are
# exact always.
STALENESS_BINS = 1 << 14

# Each worker's own staleness is counted in fewer bins, of which these are the lower edges: exactly
# below 64, then four to a doubling. A thousand workers take 0.8 MB, and not 131.
WORKER_EDGES = np.array(
    [*range(64), *((4 + q) << (k - 2) for k in range(6, 14) for q in range(4))], np.int64
)


@dataclasses.dataclass(frozen=True)
class WorkerLedger:
    """Messages and steps of one worker, as its shard counted them."""

    steps: int
    """Mini-batches in the messages applied."""
    sent: int
    """Messages sent, repeats included."""
    applied: int
    """Messages applied, each exactly once."""
    repeated: int
    """Messages refused because they had been applied before."""
    replaced: int
    """Messages refused because their sender counted as lost: others do its mini-batches."""
    failed: int
    """Messages refused because a step of theirs raised an error, which ended training."""
    staleness_mean: float
    staleness_max: int

    @property
    def refused(self) -> int:
        """Messages not applied, for any of the three reasons."""
        return self.repeated + self.replaced + self.failed

    @property
    def in_flight(self) -> int:
        """Messages sent and not yet counted by the shard."""
        return self.sent - self.applied - self.refused


@dataclasses.dataclass(frozen=True)
class ShardLedger:
    """Where every message to one shard went: `sent == applied + refused + in_flight`.

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
        """Messages not applied; `reasons` says why."""
        return sum(w.refused for w in self.workers)

    @property
    def reasons(self) -> dict[str, int]:
        """Messages refused, by reason: `"repeated"`, `"replaced"`, `"failed"`."""
        return {name: sum(getattr(w, name) for w in self.workers) for name in REASONS}

    @property
    def in_flight(self) -> int:
        """Messages sent and not yet counted by the shard."""
        return self.sent - self.applied - self.refused


@dataclasses.dataclass(frozen=True)
class Ledger(ShardLedger):
    """The first shard's ledger, and that of every shard in `shards`.

    A push sends one message to every shard. They count the same, except while a push that a
    worker's death cut off between two shards is being completed.
    """

    shards: tuple[ShardLedger, ...]

    @property
    def cut_off(self) -> int:
        """Pushes that some shards applied and others not yet, because their worker died."""
        applied = [[w.applied for w in shard.workers] for shard in self.shards]
        return sum(max(column) - min(column) for column in zip(*applied, strict=True))


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


@dataclasses.dataclass(frozen=True)
class Books:
    """What a shard had counted at one moment, or between two."""

    version: int
    rows: np.ndarray
    """`[workers, 9]`, as the shard keeps them; the maximum is that since training began."""
    bins: np.ndarray
    """`[STALENESS_BINS]`: messages of each staleness."""
    worker_bins: np.ndarray
    """`[workers, len(WORKER_EDGES)]`: messages of each worker in each of its bins."""

    @property
    def applied(self) -> np.ndarray:
        """Messages applied, of each worker."""
        return self.rows[:, _APPLIED]

    @property
    def refused(self) -> np.ndarray:
        """Messages refused, of each worker."""
        return self.rows[:, [_REPEATED, _REPLACED, _FAILED]].sum(1)

    @property
    def numbered(self) -> np.ndarray:
        """Messages that had a number of their own, of each worker: applied, or failed."""
        return self.rows[:, _APPLIED] + self.rows[:, _FAILED]

    @property
    def steps(self) -> np.ndarray:
        """Mini-batches in messages applied, of each worker."""
        return self.rows[:, _STEPS]

    @property
    def staleness_sums(self) -> np.ndarray:
        """The sum of the staleness of all messages applied, of each worker."""
        return self.rows[:, _TAU_SUM]

    def since(self, before: Books) -> Books:
        """What was counted from `before` on."""
        rows = self.rows - before.rows
        rows[:, _TAU_MAX] = self.rows[:, _TAU_MAX]
        return Books(
            self.version - before.version,
            rows,
            self.bins - before.bins,
            self.worker_bins - before.worker_bins,
        )

    def staleness(self) -> Staleness:
        """Summary over all workers."""
        count = int(self.bins.sum())
        if not count:
            return Staleness(0, *[float("nan")] * 4)
        below = np.cumsum(self.bins)
        largest = int(np.flatnonzero(self.bins)[-1])
        if largest == STALENESS_BINS - 1:
            largest = int(self.rows[:, _TAU_MAX].max())

        def percentile(share: float) -> float:
            return float(np.searchsorted(below, share * count))

        return Staleness(
            count=count,
            mean=float(self.staleness_sums.sum()) / count,
            p50=percentile(0.5),
            p99=percentile(0.99),
            max=float(largest),
        )


class Shard:
    """Books of one shard; `schedule_step` is the mini-batch at which schedules are evaluated.

    Args:
        index: number of this shard, from 0.
        num_workers: number of workers that may send.
        device: where the shard is.
        schedule_step: the shard's own count.
        locked_in_graph: whether functions of several processes act on the shard, so that the lock
            must be an operation on the shard's device; else whoever calls holds a lock.
    """

    def __init__(
        self,
        index: int,
        num_workers: int,
        device: str | None,
        schedule_step: tf.Variable,
        locked_in_graph: bool = False,
    ):
        self.index = index
        self.num_workers = num_workers
        self.device = device
        self.schedule_step = schedule_step
        self.version = _tf.make_variable(tf.zeros([], tf.int64), device=device, name="version")
        self._books = _tf.make_variable(
            tf.zeros([num_workers, _ROW], tf.int64), device=device, name="books"
        )
        # The shard's bins, then every worker's: one operation counts a message in both.
        self._bins = _tf.make_variable(
            tf.zeros([STALENESS_BINS + num_workers * len(WORKER_EDGES)], tf.int64),
            device=device,
            name="staleness",
        )
        self._mutex = None
        if locked_in_graph:
            with tf.init_scope(), tf.device(device):
                self._mutex = tf.raw_ops.MutexV2(shared_name=f"tf_dsgd_{uuid.uuid4().hex}")

    @property
    def variables(self) -> list[tf.Variable]:
        """All that is counted here but `schedule_step`."""
        return [self.version, self._books, self._bins]

    # -- traced -----------------------------------------------------------------------------

    def bundle(self, tensors: Sequence[tf.Tensor]) -> Bundle:
        """How tensors travel between this shard and a worker."""
        return Bundle.of(tensors) if self._mutex is not None else Bundle(len(tensors), ())

    def locked(self, arrived: Sequence[tf.Tensor], body: Callable[..., T]) -> T:
        """Traces `body(arrived)` on the shard's device, under its lock.

        The lock is asked for when everything in `arrived` is on the shard, so that no transfer
        happens under it, and a sender that dies leaves nothing half done; and it is given back when
        every operation of `body` is done, used or not.
        """
        if self._mutex is None:
            return body(arrived)
        with tf.device(self.device):
            arrived = [tf.identity(tensor) for tensor in arrived]
            with tf.control_dependencies(arrived):
                lock = tf.raw_ops.MutexLock(mutex=self._mutex)
            graph = tf.compat.v1.get_default_graph()
            before = len(graph.get_operations())
            with tf.control_dependencies([lock]):
                result = body(arrived)
            created = graph.get_operations()[before:]
            done = [op for op in created if op.type != "Placeholder"]  # those are arguments
            with tf.control_dependencies(done):
                unlocked = tf.raw_ops.ConsumeMutexLock(mutex_lock=lock)
            _tf.run_independently(unlocked)  # or the shards would wait for each other
            return result

    def receive(
        self, header: tf.Tensor, apply: Callable[[tf.Tensor], tf.Tensor | bool]
    ) -> tf.Tensor:
        """Traces the acceptance of one message: `apply(staleness)` runs if it is fresh.

        Returns whether it was applied. Must be traced into a function that runs under the lock.
        """
        worker, incarnation, sequence, version, steps = tf.unstack(header, 5)
        row = tf.gather(self._books, worker)
        here, last, *_ = tf.unstack(row, _ROW)
        current = tf.equal(incarnation, here)
        fresh = tf.logical_and(current, sequence > last)

        def accept() -> tf.Tensor:
            tau = self.version.read_value() - version
            changed = apply(tau)
            self.count_version(changed)
            self.schedule_step.assign_add(steps, read_value=False)
            self._bins.scatter_add(tf.IndexedSlices(tf.ones([2], tf.int64), _places(worker, tau)))
            # Few operations, whatever the number of columns: this is done for every message.
            largest = _row({_SEQUENCE: sequence, _TAU_MAX: tau}, tf.int64.min)
            return tf.maximum(row, largest) + _row({_APPLIED: 1, _STEPS: steps, _TAU_SUM: tau}, 0)

        def refuse() -> tf.Tensor:
            withdrawn = tf.equal(incarnation, WITHDRAWN)
            reason = tf.where(withdrawn, _FAILED, tf.where(current, _REPEATED, _REPLACED))
            return row + tf.one_hot(reason, _ROW, dtype=tf.int64)

        self._books.scatter_update(
            tf.IndexedSlices(tf.cond(fresh, accept, refuse)[None], worker[None])
        )
        return fresh

    def last_message(self, worker: tf.Tensor) -> tf.Tensor:
        """Traces the number of the last message applied from `worker`."""
        return tf.gather(self._books, worker)[_SEQUENCE]

    def count_version(self, changed: tf.Tensor | bool) -> None:
        """Traces that there is a new version, if the weights were changed."""
        if changed is not False:
            self.version.assign_add(tf.cast(changed, tf.int64), read_value=False)

    @functools.cached_property
    def fence(self) -> Any:
        """(worker, incarnation) -> the last sequence applied from `worker`.

        From then on only messages of that incarnation are taken from it.
        """

        def body(arrived: Sequence[tf.Tensor]) -> tf.Tensor:
            worker, incarnation = arrived
            row = tf.gather(self._books, worker)
            renewed = tf.concat([incarnation[None], row[1:]], 0)
            self._books.scatter_update(tf.IndexedSlices(renewed[None], worker[None]))
            return row[_SEQUENCE]

        return tf.function(
            lambda worker, incarnation: self.locked([worker, incarnation], body),
            autograph=False,
            input_signature=[tf.TensorSpec([], tf.int64)] * 2,
        ).get_concrete_function()

    # -- read by the host -------------------------------------------------------------------

    def ledger(self, sequences: Sequence[int] | None = None) -> ShardLedger:
        """The books; `sequences[m]` is how many messages worker m has numbered.

        Without, what was counted is taken for all that was sent.
        """
        workers = []
        for m, row in enumerate(self._books.numpy()):
            applied = int(row[_APPLIED])
            repeated, replaced, failed = (int(row[i]) for i in (_REPEATED, _REPLACED, _FAILED))
            sent = applied + repeated + replaced + failed  # counted before the sender knew
            if sequences is not None:
                # A message of a worker that was replaced had a number that was given again.
                sent = max(sent, sequences[m] + repeated + replaced)
            workers.append(
                WorkerLedger(
                    steps=int(row[_STEPS]),
                    sent=sent,
                    applied=applied,
                    repeated=repeated,
                    replaced=replaced,
                    failed=failed,
                    staleness_mean=float(row[_TAU_SUM]) / applied if applied else float("nan"),
                    staleness_max=int(row[_TAU_MAX]),
                )
            )
        return ShardLedger(tuple(workers))

    def steps_done(self) -> int:
        """Mini-batches in all messages applied."""
        return int(self._books.numpy()[:, _STEPS].sum())

    def books(self) -> Books:
        """All counts at one moment.

        Where the lock is the caller's, so is the moment: without it, a message that is being
        counted may be in one count and not yet in another.
        """
        version, rows, bins = (value.numpy() for value in self._read())
        return Books(int(version), rows, *self._divided(bins))

    @functools.cached_property
    def _read(self) -> Any:
        def body(_: Sequence[tf.Tensor]) -> list[tf.Tensor]:
            return [v.read_value() for v in (self.version, self._books, self._bins)]

        with tf.init_scope():
            return tf.function(
                lambda: self.locked([], body), autograph=False
            ).get_concrete_function()

    def _divided(self, bins: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        shape = [self.num_workers, len(WORKER_EDGES)]
        return bins[:STALENESS_BINS], bins[STALENESS_BINS:].reshape(shape)

    def staleness(self) -> Staleness:
        """Summary over all workers."""
        return self.books().staleness()

    def state(self) -> dict[str, np.ndarray]:
        """All counters, for a checkpoint."""
        bins, worker_bins = self._divided(self._bins.numpy())
        return {
            "version": self.version.numpy(),
            "schedule_step": self.schedule_step.numpy(),
            "books": self._books.numpy(),
            "staleness": bins,
            "worker_staleness": worker_bins,
        }

    def restore(self, state: dict[str, Any], incarnations: Sequence[int]) -> None:
        """Sets all counters, for workers of these incarnations."""
        self.version.assign(state["version"])
        self.schedule_step.assign(state["schedule_step"])
        books = np.array(state["books"])
        books[:, _INCARNATION] = incarnations
        self._books.assign(books)
        self._bins.assign(np.concatenate([state["staleness"], state["worker_staleness"].ravel()]))


def _row(columns: Mapping[int, Any], others: int) -> tf.Tensor:
    """A row of the books with these columns."""
    return tf.stack([tf.cast(columns.get(i, others), tf.int64) for i in range(_ROW)])


def _places(worker: tf.Tensor, tau: tf.Tensor) -> tf.Tensor:
    """Where a message is counted: the shard's bin and the worker's."""
    tau = tf.clip_by_value(tau, 0, STALENESS_BINS - 1)
    above = tf.raw_ops.UpperBound(
        sorted_inputs=WORKER_EDGES[None], values=tf.reshape(tau, [1, 1]), out_type=tf.int64
    )
    own = STALENESS_BINS + worker * len(WORKER_EDGES) + tf.reshape(above, []) - 1
    return tf.stack([tau, own])
