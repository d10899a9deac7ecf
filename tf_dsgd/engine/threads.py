"""A thread for each worker, which does what the scheduler says; and the main thread, which waits.

How a round is carried out is a `Rounds`': on this process's devices (`engine.local`) or on tasks of
a cluster (`engine.remote`). Threads exist while there is work: a drain ends them.
"""

from __future__ import annotations

import abc
import atexit
import contextlib
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from tf_dsgd._tf_errors import in_short
from tf_dsgd.engine import in_a_row
from tf_dsgd.engine.base import Engine
from tf_dsgd.engine.program import Program
from tf_dsgd.engine.schedule import BatchQueues
from tf_dsgd.engine.scheduler import Scheduler
from tf_dsgd.engine.snapshot import Snapshot
from tf_dsgd.engine.state import Store
from tf_dsgd.engine.work import Next, Source, What
from tf_dsgd.membership import deadlines
from tf_dsgd.membership.lease import Lease
from tf_dsgd.membership.task import Task


class Rounds(abc.ABC):
    """How a worker's thread carries out what the scheduler says. Errors are the thread's."""

    engine: ThreadsEngine
    """Whose threads these are; set by it."""

    @property
    @abc.abstractmethod
    def can_record(self) -> bool:
        """Whether a recorder is kept informed."""

    @abc.abstractmethod
    def prepare(self, program: Program) -> None:
        """Traces what will be called."""

    @abc.abstractmethod
    def source(self, stream: Any) -> Source | None:
        """As `Engine._source`."""

    @abc.abstractmethod
    def scope(self, task: Task) -> contextlib.AbstractContextManager[Any]:
        """Within, the worker's thread runs."""

    @abc.abstractmethod
    def round(self, task: Task, program: Program, steps: int) -> int:
        """Computes mini-batches that a worker has taken; gives how many it has taken next."""

    @abc.abstractmethod
    def send(self, task: Task, program: Program) -> None:
        """Sends what a worker has accrued, or what another has sent in its place."""

    @abc.abstractmethod
    def run(self, task: Task, program: Program, lease: Lease) -> None:
        """Computes another worker's lease, and sends it in that one's name."""

    @abc.abstractmethod
    def call(self, task: Task, action: Callable[[], Any]) -> None:
        """Does what calls a worker at rest; the worker may be lost by that."""

    @abc.abstractmethod
    def counted(self) -> Snapshot:
        """What shards and workers have counted so far."""

    @abc.abstractmethod
    def explained(self) -> contextlib.AbstractContextManager[None]:
        """As `Engine.explained`."""

    @abc.abstractmethod
    def tracing(self) -> contextlib.AbstractContextManager[None]:
        """As `Engine.tracing`."""

    @abc.abstractmethod
    def failed(self, task: Task, error: BaseException) -> BaseException | None:
        """After a call failed: the error that ends training; None if only the worker was lost."""

    @abc.abstractmethod
    def granted(self, program: Program, stream: Any) -> None:
        """Called in the main thread after a batch was handed out."""

    @abc.abstractmethod
    def show(self) -> None:
        """Called in the main thread, for logs: shows what workers have reported."""

    @abc.abstractmethod
    def look(self) -> None:
        """Looks after the workers; called by the main thread now and then while it waits."""

    @abc.abstractmethod
    def unblock(self, seconds: float) -> None:
        """Called now and then while workers' last calls are waited for, for so long already."""

    @abc.abstractmethod
    def discarded(self) -> None:
        """Called as an error ends training: what workers had to show is not shown."""

    @abc.abstractmethod
    def close(self) -> None:
        """Ends what runs beside the workers' threads."""

    @abc.abstractmethod
    def cut(self) -> None:
        """After `close`: ends calls to other processes, as this one ends; workers' threads fail."""


class ThreadsEngine(Engine):
    """Asynchronous workers, each with a thread of this process.

    Args:
        store: what workers own.
        scheduler: who does what next.
        rounds: how that is carried out.
    """

    def __init__(self, store: Store, scheduler: Scheduler, rounds: Rounds):
        super().__init__(store, scheduler)
        mutex = threading.Lock()
        self.changed = threading.Condition(mutex)
        """The lock of scheduler, tasks and leases, and of what follows."""
        self._idle = threading.Condition(mutex)
        """Workers wait here for batches; where there are many it would cost to wake all of them."""
        self._waiting: set[int] = set()
        """Workers whose threads wait."""
        self._stalled: tuple[float, Any] | None = None
        """Since when, in this wait of the main thread, all have waited, and where they stood."""
        self._error: tuple[int | None, BaseException] | None = None
        self._own_queues = BatchQueues(store.num_workers)
        """Of workers that take turns: no other gets what one has taken."""
        self.rounds = rounds
        rounds.engine = self
        atexit.register(_close, weakref.ref(self))

    @property
    def can_record(self) -> bool:
        return self.rounds.can_record

    @property
    def stream(self) -> Any:
        """Where batches come from now."""
        return self._stream

    def clock(self) -> float:
        return time.perf_counter()

    def state(self) -> dict[str, np.ndarray]:
        return {}

    def check(self, state: Mapping[str, np.ndarray]) -> None:
        """Anything can be set: there is nothing to set."""

    def restore(self, state: Mapping[str, np.ndarray]) -> None:
        """There is nothing to set."""

    def quiesce(self) -> None:
        self.scheduler.draining = True  # or a thread that has nothing to do would wait for batches
        try:
            self.until(lambda: not self._threads)
        finally:
            self.scheduler.draining = False

    def explained(self) -> contextlib.AbstractContextManager[None]:
        return self.rounds.explained()

    def tracing(self) -> contextlib.AbstractContextManager[None]:
        return self.rounds.tracing()

    def _source(self, stream: Any) -> Source | None:
        return self.rounds.source(stream)

    def _at_rest(self, task: Task, action: Callable[[], Any]) -> None:
        self.rounds.call(task, action)

    def prepare(self, program: Program) -> None:
        self.rounds.prepare(program)

    def snapshot(self) -> Snapshot:
        return self.rounds.counted()

    # -- the main thread --------------------------------------------------------------------

    def _grant(self, program: Program, stream: Any) -> None:
        self._switch(program, stream)
        with self.explained():
            program.lent.lend()
        self.rounds.granted(program, stream)
        scheduler = self.scheduler
        with self.changed:
            scheduler.available += 1
            scheduler.arrivals.came(time.monotonic())
            exchange = scheduler.exchange
            most = min(exchange.steps_to_event(0), scheduler.longest_call)
            enough = scheduler.available % scheduler.portion(most) == 0
            if enough and in_a_row.wakes(scheduler):  # one more worker may begin
                self.start_threads()
                waits = exchange.bounds_staleness or exchange.in_turn
                if waits or stream.pipelines is not None:
                    self._idle.notify_all()  # not every worker may take it
                else:
                    self._idle.notify()
            room = max(in_a_row.room(scheduler, n) for n in (most, in_a_row.number(scheduler)))
            if scheduler.available <= room and self._error is None:
                return
        self.until(lambda: scheduler.available <= room)
        self.raise_error()

    def _await_begun(self, program: Program) -> None:
        if not program.running.begun:
            scheduler, running = self.scheduler, program.running
            scheduler.wants_short_round = True
            try:
                # Nothing is under way after a checkpoint, where mini-batches are passed over.
                self.until(lambda: running.begun or not (scheduler.unfinished or self.working()))
            finally:
                scheduler.wants_short_round = False
            self.raise_error()
        self.rounds.show()

    def _drain(self) -> None:
        if self._program is None:
            return
        self.scheduler.draining = True
        try:
            self.until(lambda: not (self._awaited() or self.scheduler.unfinished))
        finally:
            self.scheduler.draining = False
        self.raise_error()
        self._come_to_rest()
        self.raise_error()  # all may have been lost by that
        self.rounds.show()

    def _awaited(self) -> bool:
        """Whether there are workers whose threads a drain waits for."""
        return any(self.scheduler.is_awaited(self.tasks[m]) for m in self._threads)

    def until(self, condition: Callable[[], bool]) -> None:
        """Waits in the main thread for `condition` or a worker's error; keeps workers going."""
        self._stalled = None
        while True:
            with self.changed:
                self.start_threads()
                self.wake()
                if self.changed.wait_for(
                    lambda: self._error is not None or condition(), deadlines.LOOK_SECONDS
                ):
                    return
                self._check_not_stalled()
            self.rounds.look()

    def _check_not_stalled(self) -> None:
        """Ends a wait in which all workers wait for one another, which nothing else would end."""
        scheduler = self.scheduler
        if not scheduler.unfinished or not self._threads or self._threads.keys() - self._waiting:
            self._stalled = None
            return
        now = time.monotonic()
        standing = (
            scheduler.available,
            [(t.clock, t.unsent, scheduler.limit(t)) for t in self.tasks],
        )
        if self._stalled is None or self._stalled[1] != standing:
            self._stalled = now, standing
        elif now - self._stalled[0] > deadlines.STALLED_SECONDS:
            self._stalled = None
            self.fail(None, self.nobody_begins())

    def working(self) -> set[int]:
        """Workers whose threads are in a call for which others wait."""
        busy = self._threads.keys() - self._waiting
        return {m for m in busy if self.scheduler.is_awaited(self.tasks[m])}

    def has_thread(self, task: Task) -> bool:
        """Whether a worker's thread runs."""
        return task.index in self._threads

    @property
    def has_failed(self) -> bool:
        """Whether an error is about to end training."""
        return self._error is not None

    def fail(self, failed: int | None, error: BaseException) -> None:
        """Training ends with this error; the first one counts. Under the lock."""
        self.scheduler.stopped = True
        self._error = self._error or (failed, in_short(error))

    def raise_error(self) -> None:
        """Raises what ends training, once, when all workers have stopped."""
        if self._error is None:
            return
        began = time.monotonic()
        while self._threads:
            with self.changed:
                self.wake()
                self.changed.wait_for(lambda: not self._threads, deadlines.LOOK_SECONDS)
            self.rounds.unblock(time.monotonic() - began)
        (failed, error), self._error = self._error, None
        try:
            self.rounds.discarded()
            self._own_queues = BatchQueues(self.num_workers)
            self._discard(failed)
        finally:
            self.scheduler.stopped = False
        raise error

    def start_threads(self) -> None:
        """Under the lock: whoever takes part has a thread, if there is work."""
        if len(self._threads) == self.num_workers or not self.scheduler.unfinished:
            return
        for task in self.tasks:
            if task.index in self._threads or not self.scheduler.joined(task):
                continue
            name = f"tf_dsgd worker {task.index}"
            thread = threading.Thread(target=self._run, args=(task,), name=name, daemon=True)
            self._threads[task.index] = thread
            thread.start()

    def wake(self) -> None:
        """Lets everybody look again at what he waits for."""
        self.changed.notify_all()
        self._idle.notify_all()

    def stepped_on(self) -> None:
        """After a worker took batches or sent: those look again to whom it makes a difference."""
        self.changed.notify_all()
        exchange = self.scheduler.exchange
        if exchange.bounds_staleness or exchange.in_turn or self.scheduler.draining:
            self._idle.notify_all()

    # -- a worker's thread ------------------------------------------------------------------

    def _run(self, task: Task) -> None:
        watch = self.watches[task.index]
        watch.enter("wait")
        try:
            with self.rounds.scope(task):
                self._work(task)
        except BaseException as error:  # handed to the main thread, which raises it
            self._failed(task, error)
        finally:
            watch.leave()
            with self.changed:
                self._threads.pop(task.index, None)
                self.wake()

    def _failed(self, task: Task, error: BaseException) -> None:
        ends = self.rounds.failed(task, error)
        if ends is not None:
            ends.add_note(f"Raised on worker {task.index}.")
            with self.changed:
                self.fail(task.index, ends)

    def _work(self, task: Task) -> None:
        while True:
            program, doing = self._next(task)
            if doing.what is What.END:
                return
            if doing.what is What.ROUND:
                steps = doing.steps
                while steps:
                    steps = self.rounds.round(task, program, steps)
            elif doing.lease is not None and doing.what is not What.SEND_REFUSED:
                self.rounds.run(task, program, doing.lease)
            else:
                self.rounds.send(task, program)
            with self.changed:
                self.scheduler.ends(task)
                self.changed.notify_all()

    def _next(self, task: Task) -> tuple[Program, Next]:
        """What the worker does next, having waited for that."""
        with self.changed:
            while True:
                now = time.monotonic()
                doing = self.scheduler.next(task, now)
                if doing.what is What.ROUND:
                    self.took(task, doing.steps)
                if doing.what is not What.WAIT:
                    return self.program, doing
                seconds = deadlines.IDLE_SECONDS
                if doing.until is not None:
                    seconds = min(seconds, doing.until - now)
                self._waiting.add(task.index)
                woken = self._idle.wait(seconds)
                self._waiting.discard(task.index)
                if not woken and doing.until is None and not task.leases:
                    return self.program, Next(What.END)

    def took(self, task: Task, steps: int) -> None:
        """A worker has taken mini-batches. Under the lock."""
        if not steps:
            return
        if self.recorder is not None:
            self.recorder.take(task.index, steps, self._stream.queue)
        elif self.scheduler.exchange.in_turn:
            for _ in range(steps):
                self._own_queues.move(self._stream.queue, task.index)
        if in_a_row.is_left(self.scheduler):
            self._idle.notify()
        self.stepped_on()

    def queue(self, task: Task) -> tf.Tensor:
        """Where a worker takes the mini-batches from that it has taken by number."""
        if self.recorder is not None:
            return self.recorder.queues.of(task.index)
        if self.scheduler.exchange.in_turn:
            return self._own_queues.of(task.index)
        return self._stream.queue

    def await_turn(self, task: Task) -> None:
        """Waits, in a worker's thread, until its message is next; or until training ends."""
        with self.changed:
            while not (self.scheduler.stopped or self.scheduler.may_send(task)):
                self._waiting.add(task.index)
                self.changed.wait(deadlines.LOOK_SECONDS)
                self._waiting.discard(task.index)

    def close(self, seconds: float) -> None:
        """Ends the threads after the round each is in, waiting at most that long for all."""
        self.rounds.close()
        with self.changed:
            self.scheduler.stopped = True
            self.wake()
            at_once = min(seconds, deadlines.CUT_SECONDS)
            ended = self.changed.wait_for(lambda: not self._threads, at_once)
        if not ended:
            self.rounds.cut()
        with self.changed:
            self.changed.wait_for(lambda: not self._threads, seconds - at_once)
            self.scheduler.stopped = bool(self._threads) or self._error is not None


def _close(engine: weakref.ref[ThreadsEngine]) -> None:
    """At exit: TensorFlow must not be taken down under a running worker."""
    live = engine()
    if live is not None:
        live.close(deadlines.CLOSE_SECONDS)
