"""Workers that take turns as a schedule says.

What the exchange rule would decide (who begins, when it fetches and sends) is the schedule's here;
fetch, local steps and push are the program's own functions.
"""

from __future__ import annotations

import contextlib
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tf_dsgd._tf_errors import said_in_short
from tf_dsgd.engine.base import Engine, nothing_to_explain, steps_tensor
from tf_dsgd.engine.interrupts import held_back
from tf_dsgd.engine.program import Program
from tf_dsgd.engine.schedule import BatchQueues, Entry
from tf_dsgd.engine.scheduler import Scheduler
from tf_dsgd.engine.snapshot import Snapshot
from tf_dsgd.engine.state import Store
from tf_dsgd.engine.work import Source
from tf_dsgd.membership.task import Task


class ScheduledEngine(Engine):
    """Plays a schedule, as far as batches were handed out for it.

    Args:
        store: what workers own.
        scheduler: whose exchange rule's periods bound how many mini-batches go into a message.
        schedule: the entries.
    """

    @property
    def can_record(self) -> bool:
        return True

    def __init__(self, store: Store, scheduler: Scheduler, schedule: Sequence[Entry]):
        super().__init__(store, scheduler)
        self._schedule = schedule
        self._next = 0
        self._granted = self._used = 0
        self._owner = {b: entry.worker for entry in schedule for b in entry.batches}
        self._needs = _needs(schedule)
        self.queues = BatchQueues(store.num_workers)
        self._since_fetch: list[int | None] = [None] * store.num_workers

    def state(self) -> dict[str, np.ndarray]:
        since = [-1 if steps is None else steps for steps in self._since_fetch]
        return {
            "schedule": np.array([self._next, self._used, self._digest(self._next)], np.int64),
            "since_fetch": np.array(since, np.int64),
        }

    def check(self, state: Mapping[str, np.ndarray]) -> None:
        if "schedule" not in state:
            return  # of a run without one
        place, _, digest = state["schedule"].tolist()
        if place > len(self._schedule) or digest != self._digest(place):
            raise ValueError(
                f"The checkpoint was written after {place} entries of a schedule with which this "
                f"one, of {len(self._schedule)}, does not begin. Resume with the same schedule."
            )

    def restore(self, state: Mapping[str, np.ndarray]) -> None:
        if "schedule" not in state:
            return
        self._next, self._used, _ = state["schedule"].tolist()
        self._granted = self._used
        self._since_fetch = [None if n < 0 else n for n in state["since_fetch"].tolist()]

    def _digest(self, entries: int) -> int:
        """By which the beginning of another schedule is known from this one's."""
        return zlib.crc32(repr([_shown(e) for e in self._schedule[:entries]]).encode())

    def clock(self) -> float:
        return time.perf_counter()

    def snapshot(self) -> Snapshot:
        return self.counted()

    def explained(self) -> contextlib.AbstractContextManager[None]:
        return nothing_to_explain()

    def tracing(self) -> contextlib.AbstractContextManager[None]:
        return nothing_to_explain()

    def quiesce(self) -> None:
        """Nobody computes while nobody takes a turn."""

    def _source(self, stream: Any) -> Source | None:
        return None  # the schedule says who gets which

    def _at_rest(self, task: Task, action: Callable[[], Any]) -> None:
        action()

    def prepare(self, program: Program) -> None:
        _ = program.work, program.fetch, program.push, program.flush
        _ = program.show, program.begin_anew

    def _grant(self, program: Program, stream: Any) -> None:
        self._switch(program, stream)
        owner = self._owner.get(self._granted)
        if owner is None:
            self._fail(
                ValueError(
                    f"The schedule gives mini-batch {self._granted} to no worker: it names "
                    f"{len(self._owner)} mini-batches, and training has handed out "
                    f"{self._granted + 1}."
                )
            )
        else:
            self.queues.move(stream.queue, owner)
        self._granted += 1
        self._advance()

    def _await_begun(self, program: Program) -> None:
        """A schedule says when its mini-batches are computed."""

    def _drain(self) -> None:
        if self._program is None:
            return
        self._advance()
        self._play_while(self._only_sends)
        self._check_done()
        for task in self.tasks:
            if task.open is not None:
                self.push(task.index)
        self._come_to_rest()

    def _advance(self) -> None:
        self._play_while(lambda: self._needs[self._next] <= self._granted)

    def _play_while(self, condition: Callable[[], bool]) -> None:
        try:
            with said_in_short(), held_back() as let_interrupts_through:
                while self._next < len(self._schedule) and condition():
                    self._play()
                    let_interrupts_through()
        except KeyboardInterrupt:
            self._give_up(None)
            raise

    def _only_sends(self) -> bool:
        entry = self._schedule[self._next]
        return entry.action == "push" and not entry.batches

    def _check_done(self) -> None:
        if self._used == self._granted:
            return
        place = next(i for i in range(self._next, len(self._schedule)) if self._schedule[i].batches)
        self._fail(
            ValueError(
                f"schedule[{place}], {_shown(self._schedule[place])}, needs mini-batch "
                f"{self._needs[place] - 1}; but only {self._granted} were handed out, and all of "
                "them must be used at this point, where training pauses (the end of an epoch, or "
                "a callback that reads weights)."
            )
        )

    def _play(self) -> None:
        """One entry."""
        place, entry = self._next, self._schedule[self._next]
        self._next += 1
        try:
            if entry.action == "fetch":
                version = self.fetch(entry.worker)
                if entry.version not in (None, version):
                    raise ValueError(
                        f"the shard is at version {version} there, and {entry.version} was "
                        "expected: the schedule is of another rule or model"
                    )
                self._record(entry, version)
                return
            if entry.action == "flush":
                self.flush()
                self._record(entry)
                return
            self.step(entry.worker, len(entry.batches))
            self._record(entry)
            self._used += len(entry.batches)
            if entry.action == "push":
                self.push(entry.worker)
        except ValueError as error:
            self._fail(ValueError(f"schedule[{place}], {_shown(entry)}, does not fit: {error}."))
        except tf.errors.OpError as error:
            error.add_note(f"Raised on worker {entry.worker}, by schedule[{place}].")
            self._give_up(entry.worker)
            raise

    def _record(self, entry: Entry, version: Any = None) -> None:
        """Takes down an entry that was played; mini-batches count from where recording began."""
        if self.recorder is None:
            return
        if entry.batches:
            first = self.recorder.first_batch
            if first is None:
                first = self.recorder.first_batch = self._used
            batches = tuple(b - first for b in entry.batches)
            self.recorder.entries.append((entry.worker, "step", batches))
        if entry.action != "step":
            self.recorder.note(entry.worker, entry.action, version)

    def _fail(self, error: Exception) -> None:
        self._give_up(None)
        raise error

    def _give_up(self, failed: int | None) -> None:
        """After an error the rest of the schedule means nothing: what is whole is kept."""
        self.mend()
        self._next, self._schedule, self._owner = 0, [], {}
        self._granted = self._used = 0
        self.queues = BatchQueues(self.num_workers)
        if self._program is not None:
            self._discard(failed)

    def begin(self, program: Program) -> None:
        """Makes `program` the one whose turns are called, all workers new."""
        self._program = program
        self.queues = BatchQueues(self.num_workers)
        self._since_fetch = [None] * self.num_workers
        none = [0] * self.num_workers
        self.scheduler.clear(none)
        self.scheduler.restored(none, none, 0)

    # -- turns --------------------------------------------------------------------------------

    def fetch(self, worker: int) -> int:
        """The worker fetches; gives the version."""
        self._since_fetch[worker] = 0
        return int(self.program.fetch[worker]())

    def step(self, worker: int, steps: int) -> None:
        """The worker computes on the next `steps` mini-batches of its queue."""
        scheduler, task, since = self.scheduler, self.tasks[worker], self._since_fetch[worker]
        exchange = scheduler.exchange
        if not steps:
            return
        if since is None:
            raise ValueError(f"worker {worker} has not fetched before")
        if task.unsent + steps > exchange.push_every:
            raise ValueError(
                f"{task.unsent + steps} mini-batches would go into one message, and push_every is "
                f"{exchange.push_every}"
            )
        if since + steps > exchange.fetch_every:
            raise ValueError(
                f"worker {worker} would use what it fetched for {since + steps} mini-batches, and "
                f"fetch_every is {exchange.fetch_every}"
            )
        self._since_fetch[worker] = since + steps
        scheduler.available += steps
        scheduler.taken(task, steps)
        at_once = min(steps, exchange.push_every, exchange.fetch_every, scheduler.longest_call)
        for first in range(0, steps, at_once):
            count = min(at_once, steps - first)
            self.program.work[worker](steps_tensor(count), self.queues.of(worker))
            self.program.running.begin()

    def push(self, worker: int) -> None:
        """The worker sends what it has accrued, and the shard takes it in."""
        task = self.tasks[worker]
        if task.open is None:
            raise ValueError(f"worker {worker} has nothing to send")
        self.scheduler.counted(task, self.scheduler.collected(task), self.clock())
        self.program.push[worker](tf.constant(True))

    def flush(self) -> None:
        """The shard uses what its rule has collected so far."""
        if self.program.flush is not None:
            self.program.flush()


def _needs(schedule: Sequence[Entry]) -> list[int]:
    """How many mini-batches must be handed out for each entry, or, if it has none, the next."""
    needs, following = [0] * len(schedule), 1 << 62
    for place in range(len(schedule) - 1, -1, -1):
        batches = schedule[place].batches
        if batches:
            following = max(batches) + 1
        needs[place] = following
    return needs


def _shown(entry: Entry) -> tuple[Any, ...]:
    if entry.action in ("fetch", "flush"):
        return (entry.worker, entry.action)
    return (entry.worker, entry.action, entry.batches)
