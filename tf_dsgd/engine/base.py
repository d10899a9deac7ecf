"""What engines share: the ledger's balance, errors, checkpoints, and bringing workers to rest."""

from __future__ import annotations

import abc
import contextlib
import functools
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import tensorflow as tf

from tf_dsgd import _tf_earlier
from tf_dsgd.console import say
from tf_dsgd.engine.program import Program
from tf_dsgd.engine.schedule import Recorder
from tf_dsgd.engine.scheduler import Scheduler
from tf_dsgd.engine.shard import Shard
from tf_dsgd.engine.snapshot import Snapshot
from tf_dsgd.engine.state import Store
from tf_dsgd.engine.timing import Stopwatch
from tf_dsgd.engine.work import Source
from tf_dsgd.membership.task import Task
from tf_dsgd.resuming import copies_lost
from tf_dsgd.transport.aside import Aside


class Engine(abc.ABC):
    """Runs programs: `grant` batches to it one by one, `drain` before looking at the model.

    Who does what next is the `scheduler`'s. An engine carries it out: it implements what is
    abstract here, and overrides nothing.

    Args:
        store: what workers own.
        scheduler: who does what next.
    """

    virtual_clock: ClassVar[bool] = False
    """Whether seconds are simulated."""
    counts_messages: ClassVar[bool] = True
    """Whether the engine knows what was sent; else only shards can tell."""

    def __init__(self, store: Store, scheduler: Scheduler):
        self.store = store
        self.scheduler = scheduler
        self.turn = threading.RLock()
        """Held by who hands out, or waits for workers: one thread trains, and others may read."""
        self._threads: dict[int, threading.Thread] = {}
        """Workers' own, where they have some."""
        self.shards: list[Shard] = []
        self.watches = [Stopwatch() for _ in scheduler.tasks]
        """What each worker's time goes to."""
        self.last_backup: str | None = None
        """Where the last checkpoint is, for an error that says what is lost."""
        self.recorder: Recorder | None = None
        """Takes down who fetched and sent what, where that was asked for."""
        self._audited = 0
        """Mini-batches that had been handed out at the last audit."""
        self._surplus: list[int] = []
        """What each shard had counted then beyond that, by errors that ended training."""
        self._program: Program | None = None
        self._stream: Any = None
        self._connections = _tf_earlier.connections()

    # -- what the engines differ in -----------------------------------------------------------

    @property
    @abc.abstractmethod
    def can_record(self) -> bool:
        """Whether this engine keeps a recorder informed."""

    @abc.abstractmethod
    def prepare(self, program: Program) -> None:
        """Traces what this engine will call; on the thread, and in the context, of the step."""

    @abc.abstractmethod
    def _grant(self, program: Program, stream: Any) -> None:
        """What `grant` does."""

    @abc.abstractmethod
    def _await_begun(self, program: Program) -> None:
        """What `await_begun` does."""

    @abc.abstractmethod
    def _drain(self) -> None:
        """What `drain` does."""

    @abc.abstractmethod
    def snapshot(self) -> Snapshot:
        """What shards and workers have counted so far. Waits for no worker's round."""

    @abc.abstractmethod
    def clock(self) -> float:
        """Seconds, from any beginning."""

    @abc.abstractmethod
    def state(self) -> dict[str, np.ndarray]:
        """What a checkpoint has to hold of the engine itself; called at rest."""

    @abc.abstractmethod
    def check(self, state: Mapping[str, np.ndarray]) -> None:
        """Raises a ValueError if `restore` cannot set this."""

    @abc.abstractmethod
    def restore(self, state: Mapping[str, np.ndarray]) -> None:
        """Sets what `state` gave, of an engine of this kind or of another; called at rest."""

    @abc.abstractmethod
    def quiesce(self) -> None:
        """At rest: waits also for those whose message another has sent.

        What they still send may be new to counters that are restored next.
        """

    @abc.abstractmethod
    def explained(self) -> contextlib.AbstractContextManager[None]:
        """Within, state is read or written from outside; what TensorFlow raises is explained."""

    @abc.abstractmethod
    def tracing(self) -> contextlib.AbstractContextManager[None]:
        """Within, a step is traced; waits before for a worker where none is there."""

    @abc.abstractmethod
    def _source(self, stream: Any) -> Source | None:
        """Where the scheduler draws mini-batches of this stream from."""

    @abc.abstractmethod
    def _at_rest(self, task: Task, action: Callable[[], Any]) -> None:
        """Does what calls a worker while all are at rest; it may be lost by that."""

    # -- what they share ----------------------------------------------------------------------

    def grant(self, program: Program, stream: Any) -> None:
        """Lets the workers take one more batch; may wait for room. Raises workers' errors."""
        with self.turn:
            self._grant(program, stream)

    def await_begun(self, program: Program) -> None:
        """Waits until a mini-batch handed out is in the running metrics, unless one is."""
        with self.turn:
            self._await_begun(program)

    def drain(self) -> None:
        """Waits until every batch handed out is done and every message is in the shard."""
        if threading.current_thread() in self._threads.values():
            raise RuntimeError(
                "A worker's step read a variable of the model from Python, which would wait for "
                "itself. Read it in a callback instead."
            )
        with self.turn:
            self._drain()

    def unless_another_does(self, action: Callable[[], Any]) -> None:
        """Does what belongs to these, unless another thread is at one of them."""
        if self.turn.acquire(blocking=False):
            try:
                action()
            finally:
                self.turn.release()

    @property
    def tasks(self) -> list[Task]:
        """The workers."""
        return self.scheduler.tasks

    @property
    def num_workers(self) -> int:
        """Number of workers."""
        return len(self.scheduler.tasks)

    @property
    def handed_out(self) -> int:
        """Mini-batches given to workers since training began."""
        return self.scheduler.handed_out

    @property
    def is_at_rest(self) -> bool:
        """Whether a drain has nothing to wait for."""
        return not self.scheduler.unfinished and self.handed_out == self._audited

    @property
    def has_program(self) -> bool:
        """Whether a step was handed to the workers yet."""
        return self._program is not None

    @property
    def program(self) -> Program:
        """The program that the workers run now."""
        if self._program is None:
            raise RuntimeError("No step was handed to the workers yet.")
        return self._program

    def messages_sent(self) -> list[int] | None:
        """Messages that each worker has sent under new numbers; None where only shards can tell."""
        return self.scheduler.messages_sent() if self.counts_messages else None

    def numbers(self) -> list[int]:
        """The number of each worker's last message."""
        return [task.number for task in self.tasks]

    def counted(self) -> Snapshot:
        """What shards and workers have counted so far."""
        now = self.clock()
        return Snapshot(
            seconds=now,
            wall_seconds=time.perf_counter(),
            shards=tuple(shard.counters() for shard in self.shards),
            spent=np.stack([watch.read(now) for watch in self.watches]),
            undivided=sum(watch.undivided for watch in self.watches),
        )

    def _switch(self, program: Program, stream: Any) -> None:
        """From here on workers run this program, on batches of this source."""
        if self._connections != _tf_earlier.connections():
            raise RuntimeError(
                "This strategy was made before another one connected this process to a cluster: "
                "TensorFlow has made its devices anew since, and would lose what the functions of "
                "this strategy assign. Its model can still be read, and saved. Make the strategy "
                "and the model anew."
            )
        if program is not self._program or stream is not self._stream:
            self.drain()
            self._release_stream()
            if program is not self._program:
                program.forget_fetched()  # or workers would miss what other programs have updated
            self._program, self._stream = program, stream
            self.scheduler.source = self._source(stream)
            self.scheduler.backs_up = program.has_backup_tasks
        self.scheduler.batch_bytes = stream.batch_bytes

    def _release_stream(self) -> None:
        """Lets go of the batches' source in a thread of its own.

        TensorFlow's iterators, when freed, may wait for a second for the thread that tunes them.
        """
        last = [self._stream]
        self._stream = self.scheduler.source = None
        if last[0] is not None:
            Aside(functools.partial(_let_go, last), "tf_dsgd frees a dataset", daemon=False)

    def nobody_begins(self) -> RuntimeError:
        """The error that it is where workers wait for one another, and mini-batches are left."""
        standing = "; ".join(
            f"worker {t.index} has sent {t.clock} messages since the last drain and has "
            f"{t.unsent} mini-batches unsent"
            for t in self.scheduler.present
        )
        return RuntimeError(
            f"Mini-batches are left, and no worker may begin: {standing}. Each waits for another, "
            "by may_start of "
            f"{type(self.scheduler.exchange).__name__}. If that is a rule of tf_dsgd, please "
            "report it."
        )

    def _come_to_rest(self) -> None:
        """The end of a drain, when every message was taken in."""
        with self.explained():
            with self.mending():
                self._flush()
            self.program.lent.take_back()
            self._audit()
        self.scheduler.rest()

    def mend(self) -> None:
        """After an error: nobody waits for ever for a lock that it has left behind."""
        for shard in self.shards:
            with contextlib.suppress(tf.errors.OpError):  # a shard that is gone
                shard.mend()

    @contextlib.contextmanager
    def mending(self) -> Iterator[None]:
        """Within are calls that hold a shard's lock."""
        try:
            yield
        except tf.errors.OpError:
            self.mend()
            raise

    def _flush(self) -> None:
        """Shards use what they have collected and not used."""
        if not self.scheduler.worked:
            return
        if self.program.flush is not None:
            self.program.flush()
        if self.program.ends_with_fetch:
            for task in self.scheduler.present:
                if self.store.present[task.index]:
                    self._at_rest(task, functools.partial(self._fetch_at_rest, task))
        if self.program.begin_anew is not None:
            self.show_model()
            self.program.begin_anew()
        self.scheduler.worked = False

    def show_model(self) -> None:
        """What is read outside becomes a worker's model, where workers have the only ones.

        That of the first one that is there, once it has taken in what the others sent. No worker
        computes meanwhile.

        Raises:
            RuntimeError: if all were lost, and with them what they have done since the last time.
        """
        show, log = self.program.show, self.shards[0].log
        if show is None or log is None:
            return
        for task in self.scheduler.present:
            if self.store.present[task.index]:
                self._at_rest(task, functools.partial(self._fetch_at_rest, task))
                self._at_rest(task, show[task.index])
                if self.store.present[task.index]:  # else it was lost by that
                    return
        error = self.all_lost()
        if error is not None:
            raise error

    def all_lost(self) -> RuntimeError | None:
        """The error that it is where no worker is left that has a model, if updates go with them.

        None if what is read outside has them all. From here on it counts as if it had.
        """
        log = self.shards[0].log
        if log is None:
            return None
        version = self.shards[0].version.numpy()
        updates = int(version) - int(log.shown.numpy())
        if not updates:
            return None
        log.shown.assign(version)
        log.edition.assign_add(1)
        return copies_lost(updates, self.last_backup)

    def _fetch_at_rest(self, task: Task) -> None:
        version = self.program.fetch[task.index]()
        self.note(task, "fetch", version)

    def note(self, task: Task, action: str, version: Any = None) -> None:
        """Takes down what a worker did, where that was asked for."""
        if self.recorder is not None:
            self.recorder.note(task.index, action, version)

    def _audit(self) -> None:
        """Every shard has counted each mini-batch that was handed out, once."""
        if self.handed_out == self._audited or not self.shards:
            return
        counted = [shard.steps_done() for shard in self.shards]
        surplus = [count - self.handed_out for count in counted]
        if surplus != (self._surplus or [0] * len(counted)):
            message = (
                f"The ledger does not balance: {self.handed_out} mini-batches were handed out, and "
                f"shards have counted {counted} (before: {self._audited}, and {self._surplus}). "
                "Gradients were lost or used twice: that is a defect of tf_dsgd; please report it."
            )
            self._balance()
            raise RuntimeError(message)
        self._audited = self.handed_out

    def _balance(self) -> None:
        """From now on audits compare with what is counted now."""
        self._audited = self.handed_out
        self._surplus = [shard.steps_done() - self.handed_out for shard in self.shards]

    def restored(self, numbers: Sequence[int], handed_out: int) -> None:
        """After the shards' counters were restored: messages are numbered from `numbers` on."""
        # Stragglers number the message that others have sent in their name.
        own = [n - (t.owes is not None) for n, t in zip(numbers, self.tasks, strict=True)]
        self.store.restore_sequences(own)
        numbered = self.shards[0].counters().numbered.tolist()
        self.scheduler.restored(numbers, numbered, handed_out)
        self._balance()

    def _discard(self, failed: int | None) -> None:
        """After an error: sends what is whole, has the failed worker's message refused."""
        for task in self.tasks:
            try:
                with self.mending():
                    self._send_what_is_whole(task, task.index != failed)
            except tf.errors.OpError as error:
                if task.index != failed:
                    say(f"what worker {task.index} had not sent is lost: {error.message}")
        try:
            numbers = self.store.sequences()
        except tf.errors.OpError:
            numbers = self.numbers()
        if self._stream is not None:
            self._stream.drop_handed_out()
        self._stream = None
        self.scheduler.clear(numbers)
        if self._program is not None:
            with contextlib.suppress(tf.errors.OpError):  # of a shard that is gone
                # Or workers would keep rows that a message changed which was refused.
                self._program.forget_fetched()
        try:
            self._balance()
        except tf.errors.OpError:  # a shard is gone, which is what ends training
            self._surplus = []

    def _send_what_is_whole(self, task: Task, valid: bool) -> None:
        if task.owes is not None:  # what it has accrued was sent by another: it is refused
            self.program.push[task.index](tf.constant(True))
        unsent = task.open is not None
        if task.sent is not None and task.sent.message is not None:
            self.program.deliver(*task.sent.message)
        elif task.sent is not None:
            unsent = True
        if unsent:
            self.program.push[task.index](tf.constant(valid))


def _let_go(last: list[Any]) -> None:
    stream = last.pop()
    if stream.pipelines is not None:
        stream.pipelines.end()


@contextlib.contextmanager
def nothing_to_explain() -> Iterator[None]:
    """For engines within one process."""
    yield


def steps_tensor(steps: int) -> tf.Tensor:
    """A count as the traced functions take it."""
    return tf.constant(steps, tf.int32)
