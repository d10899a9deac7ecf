"""Workers that take turns as a schedule says.

What the exchange rule would decide (who begins, when it fetches and sends) is the schedule's here;
fetch, local steps and push are the program's own functions.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tf_dsgd.algorithm import ExchangeRule
from tf_dsgd.engine.base import Engine, steps_tensor
from tf_dsgd.engine.interrupts import held_back
from tf_dsgd.engine.program import Program
from tf_dsgd.engine.schedule import BatchQueues, Entry
from tf_dsgd.engine.state import Store


class ScheduledEngine(Engine):
    """Plays a schedule, as far as batches were handed out for it.

    Args:
        store: what workers own.
        exchange: its periods bound how many mini-batches may go into a message.
        schedule: the entries.
    """

    def __init__(self, store: Store, exchange: ExchangeRule, schedule: Sequence[Entry]):
        super().__init__(store, exchange)
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

    def prepare(self, program: Program) -> None:
        _ = program.work, program.fetch, program.push, program.flush

    def grant(self, program: Program, stream: Any) -> None:
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

    def settle(self) -> None:
        if self._program is None:
            return
        self._advance()
        self._play_while(self._only_sends)
        self._check_done()
        for worker in self.workers:
            if worker.unsent:
                self.push(worker.index)
        self._come_to_rest()

    def _advance(self) -> None:
        self._play_while(lambda: self._needs[self._next] <= self._granted)

    def _play_while(self, condition: Callable[[], bool]) -> None:
        try:
            with held_back() as let_interrupts_through:
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
                return
            if entry.action == "flush":
                self.flush()
                return
            self.step(entry.worker, len(entry.batches))
            self._used += len(entry.batches)
            if entry.action == "push":
                self.push(entry.worker)
        except ValueError as error:
            self._fail(ValueError(f"schedule[{place}], {_shown(entry)}, does not fit: {error}."))
        except tf.errors.OpError as error:
            error.add_note(f"Raised on worker {entry.worker}, by schedule[{place}].")
            self._give_up(entry.worker)
            raise

    def _fail(self, error: Exception) -> None:
        self._give_up(None)
        raise error

    def _give_up(self, failed: int | None) -> None:
        """After an error the rest of the schedule means nothing: what is whole is kept."""
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
        self._reset()

    # -- turns --------------------------------------------------------------------------------

    def fetch(self, worker: int) -> int:
        """The worker fetches; gives the version."""
        self._since_fetch[worker] = 0
        return int(self.program.fetch[worker]())

    def step(self, worker: int, steps: int) -> None:
        """The worker computes on the next `steps` mini-batches of its queue."""
        state, since = self.workers[worker], self._since_fetch[worker]
        if not steps:
            return
        if since is None:
            raise ValueError(f"worker {worker} has not fetched before")
        if state.unsent + steps > self.exchange.push_every:
            raise ValueError(
                f"{state.unsent + steps} mini-batches would go into one message, and push_every is "
                f"{self.exchange.push_every}"
            )
        if since + steps > self.exchange.fetch_every:
            raise ValueError(
                f"worker {worker} would use what it fetched for {since + steps} mini-batches, and "
                f"fetch_every is {self.exchange.fetch_every}"
            )
        self._since_fetch[worker] = since + steps
        self._taken(state, steps)
        at_once = min(steps, self._longest_call)
        for first in range(0, steps, at_once):
            count = min(at_once, steps - first)
            self.program.work[worker](steps_tensor(count), self.queues.of(worker))

    def push(self, worker: int) -> None:
        """The worker sends what it has accrued, and the shard takes it in."""
        state = self.workers[worker]
        if not state.unsent:
            raise ValueError(f"worker {worker} has nothing to send")
        state.unsent = 0
        state.clock += 1
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
