"""A shard's own counters: versions, messages and staleness, all counted inside its lock.

A message is applied at most once and whole. Its header is
(worker, incarnation, sequence, version, steps). It is refused, and counted by its reason, if it is
a repetition (its number is not above the last one applied from that worker), if its sender was
replaced (its incarnation is not the current one), or if its sender failed (the incarnation is
`WITHDRAWN`).

By a rule without a lock messages of other senders are counted and applied beside it. Each sender
has a lock of its own, for which whoever sends its message again waits, and whoever fences the
sender. So they find it not begun, or all done. A sender's counters are its own; to all other
counts is added as a whole.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import tensorflow as tf

from tf_dsgd import _tf, _tf_order
from tf_dsgd.algorithm import PeerRule, ServerRule
from tf_dsgd.engine.bundles import Bundle
from tf_dsgd.engine.ledger import (
    APPLIED,
    COLUMNS,
    FAILED,
    INCARNATION,
    REPEATED,
    REPLACED,
    SEQUENCE,
    STALENESS_BINS,
    STEPS,
    TAU_MAX,
    TAU_SUM,
    WORKER_EDGES,
    Counters,
    ShardLedger,
    Staleness,
    WorkerLedger,
)
from tf_dsgd.engine.log import Log
from tf_dsgd.engine.mutexes import Locks
from tf_dsgd.engine.row_locks import RowLocks

T = TypeVar("T")

# The incarnation in a message that its sender takes back, because its step raised an error.
WITHDRAWN = -1

# Senders share this many locks where messages are applied beside one another: no more are applied
# at once.
_SENDERS = 64


class Shard:
    """A shard's counters; `schedule_step` is the mini-batch at which schedules are evaluated.

    Args:
        index: number of this shard, from 0.
        num_workers: number of workers that may send.
        device: where the shard is.
        schedule_step: the shard's own count.
        remote: whether functions of several processes act on the shard, so that the lock must be an
            operation on the shard's device; else whoever calls holds a lock.
        rule: what becomes of messages. Where they are applied without the shard's lock, or go to
            peers, locks are operations in any case, and who calls need not hold one.
    """

    def __init__(
        self,
        index: int,
        num_workers: int,
        device: str | None,
        schedule_step: tf.Variable,
        remote: bool = False,
        rule: ServerRule | PeerRule | None = None,
    ):
        self.remote = remote
        self.lock_free = isinstance(rule, ServerRule) and rule.lock_free is not None
        self.log = Log(num_workers, device) if isinstance(rule, PeerRule) else None
        """Messages that workers have yet to read, where they send to one another."""
        self.index = index
        self.num_workers = num_workers
        self.device = device
        self.schedule_step = schedule_step
        self.version = _tf.make_variable(tf.zeros([], tf.int64), device=device, name="version")
        self._counters = _tf.make_variable(
            tf.zeros([num_workers, COLUMNS], tf.int64), device=device, name="counters"
        )
        # The shard's bins, then every worker's: one operation counts a message in both.
        self._bins = _tf.make_variable(
            tf.zeros([STALENESS_BINS + num_workers * len(WORKER_EDGES)], tf.int64),
            device=device,
            name="staleness",
        )
        self._lock: Locks | None = None
        self._senders: Locks | None = None
        self.locks_itself = remote or self.lock_free or self.log is not None
        """Whether the lock is an operation of the functions that act on it."""
        if self.locks_itself:
            self._lock = Locks(1, device)
        if self.lock_free:
            self._senders = Locks(min(num_workers, _SENDERS), device)

    @property
    def variables(self) -> list[tf.Variable]:
        """All that is counted here but `schedule_step`."""
        return [self.version, self._counters, self._bins]

    @functools.cached_property
    def row_locks(self) -> RowLocks:
        """Locks of rows, for rules that have no lock of the shard's."""
        return RowLocks(self.device)

    # -- traced -----------------------------------------------------------------------------

    def call(self, concrete: Any, *args: Any) -> Any:
        """Calls, while another function is traced, one that runs on this shard.

        All of it is there, its beginning and its end, too, or they would be told of by messages.
        """
        if not self.remote:
            return concrete(*args)
        with tf.device(self.device):
            return concrete(*_tf_order.without_unused(concrete, args))

    def bundle(
        self,
        tensors: Sequence[tf.Tensor],
        parts: Sequence[int],
        rows: Sequence[bool] | None = None,
    ) -> Bundle:
        """How tensors travel between this shard and a worker, on whose `parts` they are.

        See `Bundle.of`.
        """
        return Bundle.of(tensors, parts, rows) if self.remote else Bundle(len(tensors), ())

    def locked(self, arrived: Sequence[tf.Tensor], body: Callable[..., T]) -> T:
        """Traces `body(arrived)` on the shard's device, under its lock.

        The lock is asked for when everything in `arrived` is on the shard, so that no transfer
        happens under it, and a sender that dies leaves nothing half done; and it is given back when
        every operation of `body` is done, used or not.
        """
        return body(arrived) if self._lock is None else self._lock.held(arrived, body)

    def prepare_to_mend(self) -> None:
        """Traces what `mend` calls, which is called in threads of workers."""
        for locks in (self._lock, self._senders):
            if locks is not None:
                locks.prepare()

    def mend(self) -> None:
        """After an error: a lock that was not given back is."""
        for locks in (self._lock, self._senders):
            if locks is not None:
                locks.mend()

    def receive(
        self,
        parcel: Sequence[tf.Tensor],
        unpack: Callable[[Sequence[tf.Tensor]], Any],
        apply: Callable[[Any, tf.Tensor], tf.Tensor | bool],
    ) -> tf.Tensor:
        """Traces the acceptance of a message: `apply(content, staleness)` runs if it is fresh.

        `unpack(parcel)` gives the content, which begins with the header. Returns whether the
        message was applied.
        """
        if self._senders is not None:
            return self._receive_lock_free(self._senders, parcel, unpack, apply)

        def body(arrived: Sequence[tf.Tensor]) -> tf.Tensor:
            content = unpack(arrived)
            header = content[0]
            row, fresh = self._judged(header)

            def accept() -> tf.Tensor:
                tau = self._staleness(header)
                changed = apply(content, tau)
                self._follow(header)
                self.count_version(changed)
                return self._counted(header, row, tau)

            self._write(header, tf.cond(fresh, accept, lambda: _refused(header, row)))
            return fresh

        return self.locked(parcel, body)

    def _receive_lock_free(
        self,
        senders: Locks,
        parcel: Sequence[tf.Tensor],
        unpack: Callable[[Sequence[tf.Tensor]], Any],
        apply: Callable[[Any, tf.Tensor], tf.Tensor | bool],
    ) -> tf.Tensor:
        """As `receive`, under the lock of the message's sender in place of the shard's.

        Who has a lock waits for no other one: a call that is given up would leave the first behind.
        """

        def body(arrived: Sequence[tf.Tensor]) -> tf.Tensor:
            content = unpack(arrived)
            header = content[0]
            row, fresh = self._judged(header)
            tau = self._staleness(header)

            def count() -> None:
                after = tf.cond(
                    fresh, lambda: self._counted(header, row, tau), lambda: _refused(header, row)
                )
                self._write(header, after)

            _, written = _tf_order.traced(count)
            with tf.control_dependencies(written):
                admitted = tf.identity(fresh)

            def accept() -> tf.Tensor:
                changed = tf.cast(apply(content, tau), tf.bool)
                self._follow(header)
                return changed

            self.count_version(tf.cond(admitted, accept, lambda: False))
            return fresh

        return senders.held(parcel, body, lambda arrived: unpack(arrived)[0][0])

    def _judged(self, header: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """(the sender's row among the counters, whether its message is to be applied)."""
        row = tf.gather(self._counters, header[0])
        return row, tf.logical_and(_is_current(header, row), header[2] > row[SEQUENCE])

    def _staleness(self, header: tf.Tensor) -> tf.Tensor:
        return self.version.read_value() - header[3]

    def _follow(self, header: tf.Tensor) -> None:
        """Once a message was applied schedules go on, and not before: it had the rate of then."""
        self.schedule_step.assign_add(header[4], read_value=False)

    def _counted(self, header: tf.Tensor, row: tf.Tensor, tau: tf.Tensor) -> tf.Tensor:
        """Counts a message; gives its sender's row after it."""
        worker, _, sequence, _, steps = tf.unstack(header, 5)
        self._count_staleness(_places(worker, tau))
        # Few operations, whatever the number of columns: this is done for every message.
        largest = _row({SEQUENCE: sequence, TAU_MAX: tau}, tf.int64.min)
        return tf.maximum(row, largest) + _row({APPLIED: 1, STEPS: steps, TAU_SUM: tau}, 0)

    def _count_staleness(self, places: tf.Tensor) -> None:
        ones = tf.ones([2], tf.int64)
        if self._senders is None:
            self._bins.scatter_add(tf.IndexedSlices(ones, places))
        else:  # a variable is added to as a whole, and of two scattered additions one may be lost
            more = tf.scatter_nd(places[:, None], ones, tf.shape(self._bins, tf.int64))
            self._bins.assign_add(more, read_value=False)

    def _write(self, header: tf.Tensor, row: tf.Tensor) -> None:
        self._counters.scatter_update(tf.IndexedSlices(row[None], header[0][None]))

    def last_message(self, worker: tf.Tensor) -> tf.Tensor:
        """Traces the number of the last message applied from `worker`."""
        return tf.gather(self._counters, worker)[SEQUENCE]

    def count_version(self, changed: tf.Tensor | bool) -> None:
        """Traces that there is a new version, if the weights were changed."""
        if changed is not False:
            self.version.assign_add(tf.cast(changed, tf.int64), read_value=False)

    @functools.cached_property
    def fence(self) -> Any:
        """(worker, incarnation) -> the last sequence applied from `worker`.

        From then on only messages of that incarnation are taken from it. One that is being applied
        is waited for.
        """

        def renew(arrived: Sequence[tf.Tensor]) -> tf.Tensor:
            worker, incarnation = arrived
            row = tf.gather(self._counters, worker)
            renewed = tf.concat([incarnation[None], row[1:]], 0)
            self._counters.scatter_update(tf.IndexedSlices(renewed[None], worker[None]))
            if self.log is not None:
                self.log.leaves(worker)
            return row[SEQUENCE]

        def fence(worker: tf.Tensor, incarnation: tf.Tensor) -> tf.Tensor:
            told = [worker, incarnation]
            if self._senders is None:
                return self.locked(told, renew)
            return self._senders.held(told, renew, lambda arrived: arrived[0])

        return tf.function(
            fence,
            autograph=False,
            input_signature=[tf.TensorSpec([], tf.int64)] * 2,
        ).get_concrete_function()

    # -- read by the host -------------------------------------------------------------------

    def ledger(self, sequences: Sequence[int] | None = None) -> ShardLedger:
        """The counters; `sequences[m]` is how many messages worker m has numbered.

        Without, what was counted is taken for all that was sent.
        """
        workers = []
        for m, row in enumerate(self._counters.numpy()):
            applied = int(row[APPLIED])
            repeated, replaced, failed = (int(row[i]) for i in (REPEATED, REPLACED, FAILED))
            sent = applied + repeated + replaced + failed  # counted before the sender knew
            if sequences is not None:
                # A message of a worker that was replaced had a number that was given again.
                sent = max(sent, sequences[m] + repeated + replaced)
            workers.append(
                WorkerLedger(
                    steps=int(row[STEPS]),
                    sent=sent,
                    applied=applied,
                    repeated=repeated,
                    replaced=replaced,
                    failed=failed,
                    staleness_mean=float(row[TAU_SUM]) / applied if applied else float("nan"),
                    staleness_max=int(row[TAU_MAX]),
                )
            )
        return ShardLedger(tuple(workers))

    def steps_done(self) -> int:
        """Mini-batches in all messages applied."""
        return int(self._counters.numpy()[:, STEPS].sum())

    def counters(self) -> Counters:
        """All counts at one moment.

        Where the lock is the caller's, so is the moment: without it, a message that is being
        counted may be in one count and not yet in another.
        """
        version, rows, bins = (value.numpy() for value in self._read())
        return Counters(int(version), rows, *self._divided(bins))

    @functools.cached_property
    def _read(self) -> Any:
        def body(_: Sequence[tf.Tensor]) -> list[tf.Tensor]:
            return [v.read_value() for v in (self.version, self._counters, self._bins)]

        with tf.init_scope():
            return tf.function(
                lambda: self.locked([], body), autograph=False
            ).get_concrete_function()

    def _divided(self, bins: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        shape = [self.num_workers, len(WORKER_EDGES)]
        return bins[:STALENESS_BINS], bins[STALENESS_BINS:].reshape(shape)

    def staleness(self) -> Staleness:
        """Summary over all workers."""
        return self.counters().staleness()

    def state(self) -> dict[str, np.ndarray]:
        """All counters, for a checkpoint."""
        bins, worker_bins = self._divided(self._bins.numpy())
        return {
            "version": self.version.numpy(),
            "schedule_step": self.schedule_step.numpy(),
            "counters": self._counters.numpy(),
            "staleness": bins,
            "worker_staleness": worker_bins,
        }

    def restore(self, state: dict[str, Any], incarnations: Sequence[int]) -> None:
        """Sets all counters, for workers of these incarnations."""
        self.version.assign(state["version"])
        self.schedule_step.assign(state["schedule_step"])
        counters = np.array(state["counters"])
        counters[:, INCARNATION] = incarnations
        self._counters.assign(counters)
        self._bins.assign(np.concatenate([state["staleness"], state["worker_staleness"].ravel()]))
        if self.log is not None:
            self.log.restore(int(state["version"]))


def _is_current(header: tf.Tensor, row: tf.Tensor) -> tf.Tensor:
    return tf.equal(header[1], row[INCARNATION])


def _refused(header: tf.Tensor, row: tf.Tensor) -> tf.Tensor:
    """The sender's row after its message was refused."""
    withdrawn = tf.equal(header[1], WITHDRAWN)
    replaced_or_repeated = tf.where(_is_current(header, row), REPEATED, REPLACED)
    reason = tf.where(withdrawn, FAILED, replaced_or_repeated)
    return row + tf.one_hot(reason, COLUMNS, dtype=tf.int64)


def _row(columns: Mapping[int, Any], others: int) -> tf.Tensor:
    """A row of the counters with these columns."""
    return tf.stack([tf.cast(columns.get(i, others), tf.int64) for i in range(COLUMNS)])


def _places(worker: tf.Tensor, tau: tf.Tensor) -> tf.Tensor:
    """Where a message is counted: the shard's bin and the worker's."""
    tau = tf.clip_by_value(tau, 0, STALENESS_BINS - 1)
    above = tf.raw_ops.UpperBound(
        sorted_inputs=WORKER_EDGES[None], values=tf.reshape(tau, [1, 1]), out_type=tf.int64
    )
    own = STALENESS_BINS + worker * len(WORKER_EDGES) + tf.reshape(above, []) - 1
    return tf.stack([tau, own])
