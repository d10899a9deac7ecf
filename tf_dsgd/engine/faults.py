"""A script of faults, and how a simulated cluster plays it."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import tensorflow as tf

from tf_dsgd.engine.scheduler import Scheduler
from tf_dsgd.engine.shard import Shard
from tf_dsgd.engine.state import Store
from tf_dsgd.engine.timing import Stopwatch
from tf_dsgd.engine.virtual_clock import Turn, VirtualClock
from tf_dsgd.membership.task import Task
from tf_dsgd.resuming import advice, shards_lost


class Fault(Protocol):
    """What befalls one task (`tf_dsgd.simulation.faults`)."""

    @property
    def job(self) -> str: ...
    @property
    def index(self) -> int: ...
    @property
    def step(self) -> int: ...
    @property
    def phase(self) -> str | None: ...
    @property
    def stops(self) -> bool: ...
    @property
    def seconds(self) -> float | None: ...


class InParts(NamedTuple):
    """Stands for a message that comes to some shards only."""

    message: Any
    shards: tuple[int, ...]


class FaultScript:
    """What is still to happen, and what has.

    Args:
        faults: all of it.
        num_workers: number of workers.
        timeout_seconds: how many virtual seconds a worker may be stopped until it counts as lost.
    """

    def __init__(self, faults: Iterable[Fault], num_workers: int, timeout_seconds: float):
        self._faults = sorted(faults, key=lambda fault: fault.step)
        self._begun = [0] * num_workers
        """Mini-batches that each worker has begun."""
        self.timeout = timeout_seconds
        self.struck: list[tuple[float, Fault]] = []
        """What has happened so far, and when."""
        self.with_message: dict[int, Fault] = {}
        """By worker: what happens as its next message comes to the shards."""

    def due(self, now: float, task: Task, steps: int, handed_out: int) -> Fault | None:
        """What happens in a round of so many mini-batches that a worker begins now."""
        done = self._begun[task.index]
        for fault in self._faults:
            if fault.job == "ps" and fault.step <= handed_out:
                self._faults.remove(fault)
                self.struck.append((now, fault))
                return fault
            if (fault.job, fault.index) == ("worker", task.index) and fault.step < done + steps:
                self._faults.remove(fault)
                if fault.phase != "fetch":
                    self._begun[task.index] += steps
                return fault
        self._begun[task.index] += steps
        return None


class Simulated(Protocol):
    """What faults are done to: the simulator."""

    store: Store
    scheduler: Scheduler
    turns: VirtualClock
    watches: list[Stopwatch]
    last_backup: str | None

    @property
    def shards(self) -> Sequence[Shard]: ...
    def take_in(self) -> None: ...
    def deliver(self, message: Any) -> None: ...
    def leave(self, task: Task) -> list[Any]: ...
    def wake(self) -> None: ...
    def show_model(self) -> None: ...
    def all_lost(self) -> RuntimeError | None: ...


class Faults:
    """Plays a script.

    Args:
        cluster: whose tasks are struck.
        script: what happens to them.
    """

    def __init__(self, cluster: Simulated, script: FaultScript):
        self._cluster = cluster
        self.script = script

    def due(self, task: Task, steps: int) -> Fault | None:
        """What happens to a worker in a round of so many mini-batches that begins now.

        Raises:
            RuntimeError: if a shard dies.
        """
        cluster = self._cluster
        found = self.script.due(cluster.turns.now, task, steps, cluster.scheduler.handed_out)
        if found is not None and found.job == "ps":
            raise shards_lost([f"/job:ps/task:{found.index}"], cluster.last_backup)
        return found

    def after_round(self, task: Task, fault: Fault) -> None:
        """A round's mini-batches are under way: it is struck now, or as its message arrives."""
        if fault.phase == "compute":
            self.strike(task, fault)
        else:
            self.script.with_message[task.index] = fault

    def cuts_off(self, turn: Turn) -> bool:
        """Whether a worker dies or stops as its message comes: some of the shards have it."""
        cluster, task = self._cluster, turn.task
        fault = self.script.with_message.pop(task.index, None)
        if fault is None:
            return False
        shards = tuple(range(len(cluster.shards)))
        half = len(shards) if fault.phase == "lock" else len(shards) // 2
        cluster.deliver(InParts(turn.message, shards[:half]))
        rest = InParts(turn.message, shards[half:])
        cluster.turns.put(cluster.turns.now, task, turn.lease, rest)
        self.strike(task, fault)
        if not fault.stops and not half:
            cluster.deliver(rest)  # after its sender was replaced
        return True

    def strike(self, task: Task, fault: Fault) -> None:
        """A worker dies, or stops for a while."""
        clock, script = self._cluster.turns, self.script
        script.struck.append((clock.now, fault))
        if not fault.stops:
            self._lose(task)
            if fault.seconds is not None:
                clock.after(fault.seconds, functools.partial(self._come_back, task, []))
            return
        seconds = fault.seconds or 0.0
        clock.delay(task, seconds)
        if seconds > script.timeout:
            goes_on = clock.now + seconds
            clock.after(script.timeout, functools.partial(self._time_out, task, goes_on))

    def _time_out(self, task: Task, goes_on: float) -> None:
        if not task.is_present:
            return
        self._cluster.scheduler.silent(task)
        on_their_way, clock = self._lose(task), self._cluster.turns
        clock.after(goes_on - clock.now, functools.partial(self._come_back, task, on_their_way))

    def _lose(self, task: Task) -> list[Any]:
        """Fences a worker, gives its mini-batches to others; gives its messages under way."""
        m, cluster = task.index, self._cluster
        cluster.take_in()
        incarnation = cluster.scheduler.lose(task, cluster.turns.now)
        number = tf.constant([m, incarnation], tf.int64)
        last = [int(shard.fence(number[0], number[1])) for shard in cluster.shards]
        cluster.store.lose(m)
        cluster.scheduler.fenced(task, last)
        cluster.watches[m].leave()
        self.script.with_message.pop(m, None)
        return cluster.leave(task)

    def _come_back(self, task: Task, on_their_way: Iterable[Any]) -> None:
        """A worker joins again; what it had sent comes first, and is refused."""
        cluster = self._cluster
        cluster.take_in()
        for message in on_their_way:
            cluster.deliver(message)
        if not cluster.scheduler.admits(task):
            raise RuntimeError(f"{task!r} joins while another completes a lease of it.")
        cluster.show_model()  # with which it begins, where no shard has one
        for log in [shard.log for shard in cluster.shards if shard.log is not None]:
            log.joins(task.index)
        cluster.store.renew(task.index, task.number)
        cluster.scheduler.joins(task)
        cluster.watches[task.index].enter("wait", at=cluster.turns.now)
        cluster.turns.put(cluster.turns.now, task)
        cluster.wake()

    def check_somebody_comes_back(self) -> None:
        """Raises the error that it is where nobody can go on, and nobody will in time."""
        cluster, events = self._cluster, self._cluster.turns.events
        scheduler, timeout = cluster.scheduler, self.script.timeout
        copies_lost = None if scheduler.present else cluster.all_lost()
        if copies_lost is not None:
            raise copies_lost
        left = scheduler.available + sum(lease.steps for lease in scheduler.orphans)
        if not events:
            raise RuntimeError(
                f"All workers were lost, and none comes back, to do {left} mini-batches that were "
                "handed out. Give one of them back_after."
            )
        if scheduler.present:
            return
        if events[0].time - max(task.since for task in scheduler.tasks) > timeout:
            raise TimeoutError(
                f"All workers were lost, and none came back within {timeout:g} virtual "
                f"seconds, to do {left} mini-batches that were handed out. Allow more time with "
                "tf_dsgd.SimulatedCluster(worker_timeout_seconds=...). "
                f"{advice(cluster.last_backup)}"
            )
