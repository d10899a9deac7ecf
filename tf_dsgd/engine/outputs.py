"""What the chief of a cluster shows of its workers: outputs, running metrics, and their times."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from tf_dsgd import _tf, _tf_remote
from tf_dsgd.engine.members import Members
from tf_dsgd.engine.program import Program
from tf_dsgd.membership.task import Task

# How often the chief shows the latest outputs of a worker, and asks each what its rounds' time went
# to, once anybody wants to know.
_SHOW_SECONDS = 0.2
# With more workers than this each is asked less often: the chief has other things to do.
_MANY = 8


class Outputs:
    """Brings outputs from workers to the chief, a few times a second.

    Args:
        members: the workers.
        executors: of each worker's thread.
    """

    def __init__(self, members: Members, executors: Sequence[_tf_remote.SynchronousExecutor]):
        now, number = time.monotonic(), len(members.tasks)
        self._members = members
        self._executors = executors
        self._latest: list[Program | None] = [None] * number
        """Of each worker whose outputs it has, which are there, if they were not read."""
        self._brought: tuple[Program, list[tf.Tensor]] | None = None
        """The latest that are here."""
        self._asked = [now for _ in range(number)]
        self._every = _SHOW_SECONDS * max(1.0, number / _MANY)
        self._laps_seen = [np.zeros([2]) for _ in range(number)]
        self._laps_read = [now for _ in range(number)]

    def latest(self, task: Task, program: Program) -> None:
        """A worker's round has left its outputs there."""
        self._latest[task.index] = program

    def renewed(self, task: Task) -> None:
        """A worker's variables are new."""
        self._laps_seen[task.index] = np.zeros([2])
        self._latest[task.index] = None
        if self._members.engine.has_program:
            self._members.engine.program.running.forget(task.index)

    def clear(self) -> None:
        """What workers had to show is of a training that an error has ended."""
        self._latest = [None] * len(self._latest)
        self._brought = None

    def read(self, task: Task, *, at_once: bool = False) -> None:
        """In a worker's thread: reads what it has to show, if that is due.

        A drain may not wait for it, so the worker's state may be another epoch's afterwards.
        """
        m, now = task.index, time.monotonic()
        seconds = 0.0 if at_once else self._every
        latest = self._latest[m]
        is_first = latest is not None and not latest.running.begun
        outputs_due = is_first or now - self._asked[m] >= seconds
        laps_due = now - self._laps_read[m] >= seconds
        if not outputs_due and not laps_due:
            return
        changed = self._members.engine.changed
        with changed:
            task.read_since = now
        try:
            if outputs_due:
                self.bring(task)
            if laps_due:
                self._divide_rounds(task)
        finally:
            with changed:
                if task.read_is_slow:  # others went on: as one that joins it does not hold them up
                    scheduler = self._members.scheduler
                    task.clock = max(task.clock, scheduler.slowest(but=task))
                task.read_since, task.read_is_slow = None, False

    def _divide_rounds(self, task: Task) -> None:
        """Asks a worker how long it fetched and computed."""
        m, now = task.index, time.monotonic()
        copy = self._members.store.laps.copies[m]
        if copy is None:
            return  # lost a moment ago
        if _tf.is_deterministic():
            self._laps_read[m] = now
            return  # there are no clocks then: it stays unknown
        laps = copy.numpy()
        self._members.engine.watches[m].divide_rounds(*(laps - self._laps_seen[m]))
        self._laps_seen[m], self._laps_read[m] = laps, now

    def bring(self, task: Task) -> None:
        """Copies a worker's latest outputs here; it may take long."""
        program, self._latest[task.index] = self._latest[task.index], None
        if program is None:
            return
        self._asked[task.index] = time.monotonic()
        try:
            # Not by `tf.identity`, a function to TensorFlow, with a half on the worker: it was seen
            # to wait without end where workers were killed (TF 2.21).
            arrays = [told.numpy() for told in program.tell[task.index]()]
        except tf.errors.OpError:  # the worker is gone, as its next call will tell
            self._executors[task.index].clear_error()
            program.running.begin()
            return
        with self._members.here():
            shown, running = program.unbundle([tf.constant(array) for array in arrays])
        if program.running.report(task.index, running):
            self._brought = program, shown

    def show(self) -> None:
        """In the main thread: shows what workers brought, in the chief's variables."""
        latest, self._brought = self._brought, None
        if latest is None:
            return
        program, values = latest
        for variable, value in zip(program.logs, values, strict=True):
            variable.assign(value)
        program.running.add_up()
