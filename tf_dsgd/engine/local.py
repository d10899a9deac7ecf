"""Workers on this process's devices; the shard is the same memory.

A worker's round is two calls: `work`, on copies of its own, and, under the shard's lock, a push
together with the next fetch.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tf_dsgd.engine.base import nothing_to_explain, steps_tensor
from tf_dsgd.engine.program import Program
from tf_dsgd.engine.snapshot import Snapshot
from tf_dsgd.engine.threads import Rounds
from tf_dsgd.engine.timing import moment
from tf_dsgd.engine.work import Source
from tf_dsgd.membership.lease import Lease
from tf_dsgd.membership.task import Task

LONGEST_CALL = 10


class LocalRounds(Rounds):
    """Rounds of workers that cannot be lost."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()

    @property
    def _lock(self) -> contextlib.AbstractContextManager[Any]:
        """The shard's; none where functions lock for themselves, but for a recorder's order."""
        free = all(shard.lock_free or shard.log is not None for shard in self.engine.shards)
        ordered = self.engine.recorder is not None and not self.engine.shards[0].lock_free
        return contextlib.nullcontext() if free and not ordered else self._mutex

    @property
    def can_record(self) -> bool:
        return True

    def prepare(self, program: Program) -> None:
        _ = program.work, program.push, program.exchange, program.fetch, program.flush
        _ = program.show, program.begin_anew

    def source(self, stream: Any) -> Source | None:
        return None  # workers' own functions take from the queue

    def scope(self, task: Task) -> contextlib.AbstractContextManager[Any]:
        return tf.device(self.engine.store.worker_devices[task.index])

    def explained(self) -> contextlib.AbstractContextManager[None]:
        return nothing_to_explain()

    def tracing(self) -> contextlib.AbstractContextManager[None]:
        return nothing_to_explain()

    def call(self, task: Task, action: Callable[[], Any]) -> None:
        action()

    def counted(self) -> Snapshot:
        with self._lock:  # between two messages
            return self.engine.counted()

    def failed(self, task: Task, error: BaseException) -> BaseException | None:
        self.engine.mend()
        return error

    def granted(self, program: Program, stream: Any) -> None:
        """Nobody comes or goes."""

    def show(self) -> None:
        """What workers have to show is here."""

    def look(self) -> None:
        """Nobody comes or goes."""

    def unblock(self, seconds: float) -> None:
        """A round ends by itself."""

    def discarded(self) -> None:
        """Workers show what they have in variables."""

    def close(self) -> None:
        """Nothing runs beside."""

    def cut(self) -> None:
        """A round ends by itself."""

    # -- a worker's thread ------------------------------------------------------------------

    def round(self, task: Task, program: Program, steps: int) -> int:
        engine = self.engine
        watch, exchange = engine.watches[task.index], engine.scheduler.exchange
        with engine.changed:
            engine.scheduler.begins(task, engine.clock())
        if task.fetch_next:
            self._fetch(task, program)
        watch.enter("compute")
        self._work(task, program, steps)
        watch.enter("wait")
        done = task.step
        task.fetch_next = exchange.fetch_due(done)
        sending = exchange.push_due(done)
        with engine.changed:
            lease = engine.scheduler.collected(task) if sending else None
            following = engine.scheduler.take(task, sending=sending)
            engine.took(task, following)
        if lease is not None:
            self._push(task, program, lease, following)
        return following

    def _work(self, task: Task, program: Program, steps: int) -> None:
        recorder = self.engine.recorder
        program.work[task.index](steps_tensor(steps), self.engine.queue(task))
        program.running.begin()
        if recorder is not None:
            recorder.stepped(task.index, steps)

    def send(self, task: Task, program: Program) -> None:
        with self.engine.changed:
            lease = self.engine.scheduler.collected(task)
        self._push(task, program, lease, 0)

    def run(self, task: Task, program: Program, lease: Lease) -> None:
        raise RuntimeError(f"{task!r} cannot run {lease!r}: local workers have no backup tasks.")

    def _push(self, task: Task, program: Program, lease: Lease, following: int) -> None:
        """Sends; fetches in the same call if the next round has begun and wants that."""
        engine, m = self.engine, task.index
        watch, pushed = engine.watches[m], None
        engine.await_turn(task)
        with self._lock:
            watch.enter("push")
            if following and task.fetch_next:
                version, pushed = program.exchange[m]()
                task.fetch_next = False
                engine.note(task, "push")
                engine.note(task, "fetch", version)
            else:
                program.push[m](tf.constant(True))
                engine.note(task, "push")
        if pushed is not None:
            watch.enter("fetch", at=moment(float(pushed)))
        watch.enter("wait")
        with engine.changed:
            engine.scheduler.counted(task, lease, engine.clock())
            engine.stepped_on()

    def _fetch(self, task: Task, program: Program) -> None:
        watch = self.engine.watches[task.index]
        with self._lock:
            watch.enter("fetch")
            self.engine.note(task, "fetch", program.fetch[task.index]())
        watch.enter("wait")
        task.fetch_next = False
