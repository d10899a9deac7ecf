"""Messages that another worker computes again, and sends in the name of whose they are.

There are two kinds. One that was *cut off* has come to some shards and not to others as its worker
was lost: those that have it refuse it. One that is *late* is under way on a worker for which others
wait: shards take whichever comes first, and refuse the other.

Nobody can know in time which of the two came first, so that all that a message stands for is fixed
before another may send it: who sends under a number sends the mini-batches that `Unapplied` holds
under it, whoever it is, and a late worker adds none from then on (`LateWork.stays_behind`). A
worker's own next number is given when the chief knows that the last one counts: by the worker's
answer, by the one who stood in for it, or, if it is lost, by what its shards say once it is fenced.
"""

from __future__ import annotations

import abc
import time
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tf_dsgd.engine.attendance import AttendedEngine
from tf_dsgd.engine.base import WorkerState
from tf_dsgd.engine.late import Again
from tf_dsgd.engine.program import Program
from tf_dsgd.engine.unapplied import CutOff


class StandsIn(AttendedEngine):
    """Workers that compute others' messages again, between two of their own."""

    @abc.abstractmethod
    def _inputs(self, worker: WorkerState, program: Program, part: Any) -> Any:
        """(the function for local steps, what it and a whole round are called with)."""

    @abc.abstractmethod
    def _send(self, worker: WorkerState, program: Program) -> bool:
        """Sends what a worker has accrued; False if another's message counts in its place."""

    # -- messages that were cut off ---------------------------------------------------------

    def _awaited(self) -> bool:
        return bool(self._threads.keys() - self._not_awaited())

    def _not_awaited(self) -> set[int]:
        """Workers whose message another has sent, or which the chief has read for long."""
        return self._lateness.overtaken | self._lateness.slow_readers

    def restored(self, numbers: Sequence[int], handed_out: int) -> None:
        # What one that was overtaken still sends may be new to the books that were restored.
        self._flushing = True  # or a thread that has nothing to do would wait for batches
        try:
            self._until(lambda: not self._threads)
        finally:
            self._flushing = False
        super().restored(numbers, handed_out)

    def _unfinished(self) -> bool:
        open_ends = self._cut_off or self._completing or self._lateness.unfinished
        return bool(open_ends) or super()._unfinished()

    def _next_cut_off(self, worker: WorkerState) -> CutOff | None:
        if not self._may_begin(worker):
            return None  # or: with a fetch before its time the worker would end a round
        # One who came back completes its own, before it numbers messages anew.
        others = self._lost.keys() - {self._joining}
        mine = (c for c in self._cut_off if c.worker == worker.index or c.worker in others)
        return next(mine, None)

    def _has_errand(self, worker: WorkerState) -> bool:
        if worker.unsent:
            return False
        overtaken = worker.index in self._lateness.overtaken
        if overtaken or self._next_cut_off(worker) is not None:
            return True
        return self._next_late(worker) is not None

    def _errands(self, worker: WorkerState, program: Program) -> None:
        m = worker.index
        while not worker.unsent:
            with self._changed:
                if self._closing or self._error is not None:
                    return
                overtaken = m in self._lateness.overtaken
                again = None if overtaken else self._next_again(worker)
            if overtaken:  # between two calls: its message is refused
                self._send(worker, program)
                continue
            if again is None:
                return
            self._compute_again(worker, program, again)
            with self._changed:
                self._has_computed_again(worker, again)

    def _next_again(self, worker: WorkerState) -> Again | None:
        """What this worker computes for another now, taken note of."""
        m, cut_off = worker.index, self._next_cut_off(worker)
        if cut_off is not None:
            self._cut_off.remove(cut_off)
            self._completing[m] = cut_off
            lost = cut_off.worker
            return Again(lost, self.store.incarnations[lost], cut_off.sequence, cut_off.held)
        late = self._next_late(worker)
        if late is None:
            return None
        again = self._late_message(late)
        self._lateness.stands_in(m, again)
        return again

    def _compute_again(self, worker: WorkerState, program: Program, again: Again) -> None:
        """Computes another worker's message, and sends it as that one's."""
        m = worker.index
        with self._here():
            name = again.name
            late = tf.constant(again.worker, tf.int64)
        if m in self._completing:
            program.fetch[m]()
        else:
            program.fetch_as[m](late)
        for part in again.held:
            work, inputs = self._inputs(worker, program, part)
            work[m](*inputs)
        program.push_as[m](name)
        worker.fetch_next = True

    def _has_computed_again(self, worker: WorkerState, again: Again) -> None:
        m = worker.index
        if self._completing.pop(m, None) is None:
            self._lateness.has_stood_in(m)
            self._overtake(again)
        self._unapplied.applied[m] += 1  # its own next number: nothing was sent under it
        self._unused[m] += 1
        self._wake()

    # -- messages that are late -------------------------------------------------------------

    def _wait(self, worker: WorkerState, program: Program) -> bool:
        with self._changed:
            self._lateness.waits(worker.index, time.monotonic())
        return super()._wait(worker, program)

    def _next_late(self, worker: WorkerState) -> int | None:
        if not self.program.can_be_late or not self._joined(worker):
            return None
        nothing_comes = self._flushing and not self._available
        if self._may_begin(worker) and self._limit(worker) and not nothing_comes:
            return None
        due = self._lateness.due(worker.index)
        return None if due is None or time.monotonic() < due[0] else due[1]
