"""Which workers of a cluster are there: they may be lost, and come back.

A worker that is lost is fenced first: its shards take nothing more from that incarnation. Then
either its last message was applied, and its batches are done, or not, and they go to others. If
some shards have the message and others do not, another worker computes it again and sends it in the
lost one's name: who has it refuses it.
"""

from __future__ import annotations

import abc
import contextlib
import functools
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from tf_dsgd import _tf_remote, channels, probing
from tf_dsgd.algorithm import ExchangeRule
from tf_dsgd.aside import Aside
from tf_dsgd.connection import Connection, UnequalVersions, say
from tf_dsgd.engine.absence import LosesWorkers
from tf_dsgd.engine.base import WorkerState
from tf_dsgd.engine.heartbeat import Heartbeat
from tf_dsgd.engine.late import LateWork
from tf_dsgd.engine.state import Store
from tf_dsgd.engine.threads import ThreadsEngine
from tf_dsgd.engine.unapplied import CutOff, Unapplied
from tf_dsgd.resuming import advice, shards_lost
from tf_dsgd.sockets import close_connections

# How often lost workers are looked for.
_LOOK_SECONDS = 1.0
# How much longer than its timeout a worker has for joining, if it is there and the only one left.
_LAST_SECONDS = 60.0
# How long one that has been silent for long is waited for before its connections are closed.
_ANSWER_SECONDS = 1.0
# How long the main thread waits for a worker to join, before it goes on and looks again.
_JOIN_SECONDS = 2.0
# Errors of calls to a task that is gone, or whose connection was closed.
_BROKEN = (tf.errors.UnavailableError, tf.errors.AbortedError)
# What TensorFlow says of a task that has not answered gRPC's own question (`tf_dsgd.channels`).
_PING = "ping timeout"
# What it says of a function that a task was not told of, as it did not answer at that time.
_UNTOLD = (
    "function definition",
    "nor a name of a function registered",
    "not found in function library",
)
# What TensorFlow says when a task was replaced so fast that no connection broke, and, the last,
# when it did not answer while another joined, and was left out of the cluster.
_REPLACED = (
    *("unknown device", "remote_handle", "context_id", "Primary device is not remote"),
    "No worker known as",
)


class AttendedEngine(LosesWorkers, ThreadsEngine):
    """What the chief of a cluster knows and does about workers that come and go."""

    def __init__(
        self,
        connection: Connection,
        exchange: ExchangeRule,
        timeout_seconds: float,
        late_after_seconds: float | None,
    ):
        self._connection = connection
        self._timeout = timeout_seconds
        self._made = False
        self._looked = self._asked = now = time.monotonic()
        present = connection.present()
        while not any(present) and time.monotonic() - now < timeout_seconds:
            time.sleep(0.1)  # they may be started again in this moment
            present = connection.present()
        self._lost = {m: now for m, here in enumerate(present) if not here}
        """Workers that are not there, and since when."""
        store = Store(
            connection.worker_devices(),
            len(connection.shard_devices()),
            present,
            self._worker_failed,
            self._assemble,
            connection.call,
        )
        store.may_be_late = late_after_seconds is not None
        super().__init__(store, exchange)
        self._made = True
        self._losing = threading.Lock()
        """Held while a worker is fenced: its own thread and the main one may both find it lost."""
        self._standing: tuple[float, Any] = now, None
        """Since when nothing has changed, as far as the main thread has seen, and what it saw."""
        self._unwelcome: set[int] = set()
        """Workers that are there, and may not join."""
        self._untold: set[int] = set()
        """Those that were lost for a function which they do not know, until they do a round."""
        self._joining: int | None = None
        """The lost worker that is being welcomed."""
        self._unapplied = Unapplied(self.num_workers)
        self._lateness = LateWork(self.num_workers, late_after_seconds)
        self._cut_off: list[CutOff] = []
        """Messages that are to be completed."""
        self._completing: dict[int, CutOff] = {}
        """By the worker that computes it again."""
        self._asking: Aside | None = None
        """What has tasks answer calls."""
        self._unresponsive: set[str] = set()
        """Addresses of tasks that are there, and answer no calls."""
        self._executors = [_tf_remote.SynchronousExecutor() for _ in self.workers]
        tell = functools.partial(_tell, weakref.ref(self))
        self._heartbeat = Heartbeat(connection.addresses(), tell, timeout_seconds)
        self._heartbeat.start()
        connection.reasons.append(functools.partial(_reason, weakref.ref(self)))

    @abc.abstractmethod
    def _batches(self, part: Any) -> int:
        """The number of mini-batches in a part of what was drawn."""

    @abc.abstractmethod
    def _give_back(self, held: list[Any]) -> int:
        """Puts batches that were taken at the disposal of other workers; gives their number."""

    @abc.abstractmethod
    def _not_awaited(self) -> set[int]:
        """Workers that others do not wait for, whatever these still do."""

    @abc.abstractmethod
    def _renewed(self, worker: WorkerState) -> None:
        """Called when all variables of a worker are new."""

    def _here(self) -> Any:
        """Within, tensors are made by this process, and travel with the call that takes them.

        TensorFlow makes a constant on another task by a call of its own, and holds Python's lock
        until it is answered: nobody here would do anything for as long as that task is stopped.
        """
        return tf.device(self._connection.host_device)

    @contextlib.contextmanager
    def explained(self) -> Iterator[None]:
        try:
            with _tf_remote.interruptible():
                yield
        except (tf.errors.OpError, SystemError) as error:
            reason = self._reason(error)
            if reason is None:
                raise
            raise reason from error

    def _reason(self, error: BaseException) -> RuntimeError | None:
        """What a failed call is due to, if tasks with shards were lost.

        Where a step is traced, TensorFlow's C code makes a SystemError of another.
        """
        silent = self._connection.silent_shards()
        if not silent and isinstance(error, (*_BROKEN, SystemError)):
            silent = self.silent_shards()
        return self._shards_lost(silent) if silent else None

    def silent_shards(self) -> list[str]:
        """Tasks with shards that cannot be reached, or do not answer, once a call to one failed.

        One that is killed may take connections for a moment more, and one that is stopped does.
        """
        deadline = time.monotonic() + _ANSWER_SECONDS + self._timeout / 4
        while True:
            unanswering = self._connection.unanswering_shards(_ANSWER_SECONDS)
            unreachable = self._connection.silent_shards()
            if unreachable or not unanswering or time.monotonic() > deadline:
                return unreachable or unanswering
            time.sleep(0.05)

    @contextlib.contextmanager
    def tracing(self) -> Iterator[None]:
        self._connection.use()
        with tf.init_scope():
            for worker in self.workers:
                here = worker.index not in self._lost
                if here and not self._connection.worker_listens(worker.index):
                    self._lose(worker)
            if len(self._lost) == self.num_workers:
                self._assemble()
        with self.explained():
            yield

    def close(self, seconds: float) -> None:
        self._heartbeat.end()
        super().close(seconds)
        self._heartbeat.join(_ANSWER_SECONDS)

    def hear_of(self, silent: set[str], answering: set[str]) -> None:
        """Called now and then with the addresses of tasks that have not answered for long.

        Whatever waits for them ends with an error, by which they count as lost. Those that answer
        have to answer TensorFlow's calls, too.
        """
        # Some may have come back while others were asked.
        silent = probing.not_answering(silent, _ANSWER_SECONDS)
        lost = {self._connection.worker_address(m) for m in list(self._lost)}
        self._unresponsive &= answering  # at the address of one that ended may be another next
        self._unresponsive |= self._ask(answering)
        answering = answering - self._unresponsive
        silent |= self._unresponsive
        self._connection.mute -= answering
        for address in silent - lost - self._connection.mute:
            self._say_silent(address)
        self._connection.mute |= silent
        for address in silent:  # TensorFlow waits for one that is lost, too, as it leaves
            close_connections(address)

    def _ask(self, answering: set[str]) -> set[str]:
        """Has tasks answer calls now and then; gives who has not for long."""
        now = time.monotonic()
        if self._asking is not None:
            if not self._asking.wait(0.0):
                address, began = self._connection.asked
                late = now - max(began, self._asked) > channels.ASK_SECONDS + self._timeout
                return {address} if late else set()
            asking, self._asking = self._asking, None
            asking.result()
        if now - self._asked > channels.ASK_SECONDS:
            self._asked = now
            ask = functools.partial(self._connection.ask, answering)
            self._asking = Aside(ask, "tf_dsgd has tasks answer")
        return set()

    def _hasten(self, seconds: float) -> None:
        # Workers wait for a task with shards without end; nothing goes on without it.
        if seconds > _ANSWER_SECONDS and self._connection.unanswering_shards(_ANSWER_SECONDS):
            for m in list(self._threads):
                close_connections(self._connection.worker_address(m))

    def _say_silent(self, address: str) -> None:
        name = self._connection.name_at(address)
        say(f"{name} has not answered for {self._timeout:g} s and counts as lost")

    def _look_now_and_then(self) -> None:
        if self._lost and time.monotonic() - self._looked > _LOOK_SECONDS:
            self._look()

    # -- who is lost ------------------------------------------------------------------------

    def _failed(self, worker: WorkerState, error: BaseException) -> None:
        self._executors[worker.index].clear_error()
        if not isinstance(error, tf.errors.OpError):
            super()._failed(worker, error)
            return
        try:
            with self.explained():
                if not self._worker_failed(worker.index, error):
                    super()._failed(worker, error)
        except (tf.errors.OpError, RuntimeError) as another:  # a shard is gone, too
            super()._failed(worker, another)

    def _worker_failed(self, m: int, error: tf.errors.OpError) -> bool:
        """After a call failed on a worker: whether it was lost; if so the others go on."""
        silent = self._connection.silent_shards()
        if silent:
            raise self._shards_lost(silent) from error
        if not self._was_lost(m, error):
            return False
        if _PING in str(error):
            address = self._connection.worker_address(m)
            self._say_silent(address)
            self._connection.mute.add(address)
        if self._made:
            self._lose(self.workers[m])
        else:  # it has sent nothing yet
            self._check_shards_go_on(m)
            self._lost[m] = time.monotonic()
        return True

    def _check_shards_go_on(self, m: int) -> None:
        """Raises the error that the loss of a worker is, where a part of the model goes with it."""
        if self._connection.shards_on_workers:
            raise self._shards_lost([self._connection.worker_name(m)])

    def _was_lost(self, m: int, error: tf.errors.OpError) -> bool:
        """Whether a failed call means that the worker's process is gone, or is another one."""
        if not self._connection.worker_listens(m):
            return True
        if isinstance(error, _BROKEN):
            return True
        if any(text in str(error) for text in _REPLACED) or not self._has_its_clock(m):
            return True
        untold = any(text in str(error) for text in _UNTOLD) and m not in self._untold
        if untold:
            self._untold.add(m)
        return untold

    def _has_its_clock(self, m: int) -> bool:
        """Whether a worker has its variables; another process at its address has none."""
        copy = self.store.clock.copies[m] if self._made else None
        if copy is None:
            return False
        try:
            copy.numpy()
        except tf.errors.OpError:
            return False
        return True

    def _shards_lost(self, names: list[str]) -> RuntimeError:
        return shards_lost(names, self.last_backup)

    def _lose(self, worker: WorkerState) -> None:
        """Fences a lost worker, and gives its batches to others if no shard has their gradients."""
        self._check_shards_go_on(worker.index)
        with self._losing:
            if worker.index not in self._lost:
                self._fence(worker)

    def _fence(self, worker: WorkerState) -> None:
        m = worker.index
        with self._changed:
            # Before shards refuse it: who has computed its message meanwhile takes it for sent only
            # if this is the incarnation in whose name it was sent.
            self.store.incarnations[m] = incarnation = self.store.incarnations[m] + 1
            self._lateness.has_computed(m)
        self._connection.estrange(m)
        with self._here():
            last = [
                int(shard.fence(tf.constant(m, tf.int64), tf.constant(incarnation, tf.int64)))
                for shard in self.shards
            ]
        with self._changed:
            self.store.lose(m)
            self._lateness.forget(m)
            again = ""
            if m in self._completing:
                self._cut_off.append(self._completing.pop(m))
            clock = worker.clock - self._unapplied.applied[m]
            # It may have been about to draw what it had taken: nobody has that yet.
            count = worker.unsent - sum(self._batches(part) for part in self._unapplied.parts(m))
            parts, cut_off = self._unapplied.lose(m, last)
            if cut_off is not None:
                self._cut_off.append(cut_off)
                again = ", its last message is completed for ps tasks that had not got it"
            count += self._give_back(parts)
            self._available += count
            self.handed_out -= count
            worker.reset()
            worker.clock = clock + self._unapplied.applied[m]  # as many rounds have it in them
            self._lost[m] = time.monotonic()
            left = self.num_workers - len(self._lost)
            self._wake()
        say(
            f"lost {self._connection.worker_name(m)}; {count} unfinished mini-batches go to "
            f"others{again}, {left} of {self.num_workers} workers go on"
        )

    # -- who comes back ---------------------------------------------------------------------

    def _look(self) -> None:
        """Lets workers join that came, or came back; ends a wait that is in vain."""
        self._looked = now = time.monotonic()
        for m in list(self._lost):
            if not self._connection.worker_listens(m):
                self._unwelcome.discard(m)
            elif m in self._threads:
                continue  # it has not found out yet that its worker is lost
            elif m not in self._unwelcome and self._has_joined(m) and self._admits(m):
                self._welcome(m)
                with self._changed:
                    self._joining = None
                    self._wake()
        if len(self._lost) == self.num_workers:
            self._check_somebody_comes(now)
        self._end_standstill(now)
        if self._error is None:
            silent = self._connection.silent_shards()
            if silent:
                raise self._shards_lost(silent)

    def _end_standstill(self, now: float) -> None:
        """Where all wait for workers that answer nothing, and no rule does, these are lost.

        That is where nobody else can do their work: `late_after_seconds` later.
        """
        with self._changed:
            self._lateness.look_at_readers(now)
            working = self._threads.keys() - self._waiting - self._not_awaited()
            progress = working, self._available, [(w.clock, w.unsent) for w in self.workers]
        if progress != self._standing[1]:
            self._standing = now, progress
        waits = self._bounded or self._connection.shards_on_workers
        patience = self._lateness.patience
        if working and not waits and patience is not None and now - self._standing[0] > patience:
            self._connection.silence(self._connection.worker_address(m) for m in working)

    def _check_somebody_comes(self, now: float) -> None:
        """Ends training with an error once all workers have been lost for too long."""
        coming = self._lost.keys() - self._unwelcome
        there = any(self._connection.worker_listens(m) for m in coming)
        limit = self._timeout + _LAST_SECONDS * there
        if now - max(self._lost.values()) <= limit:
            return
        names = ", ".join(self._connection.worker_name(m) for m in self._lost)
        none_came = TimeoutError(
            f"All workers were lost, and none came back within {limit:g} s: {names}. "
            "Start them again, or allow more time with "
            f"tf_dsgd.TFCluster(worker_timeout_seconds=...). {advice(self.last_backup)}"
        )
        self._error = self._error or (None, none_came)
        self._lost = dict.fromkeys(self._lost, now)  # who trains again waits again

    def _admits(self, m: int) -> bool:
        """Whether nobody completes a message in that worker's name; from then on only it may."""
        with self._changed:
            busy = any(c.worker == m for c in self._completing.values())
            self._joining = None if busy else m
            return not busy

    def _assemble(self) -> None:
        """Waits in the main thread until a worker is there again."""
        if not self._made:
            raise RuntimeError(
                "All workers were lost while the strategy was made. Look at what their processes "
                "printed last, and start this script again."
            )
        say(f"no worker is there: waiting {self._timeout:g} s for one")
        while len(self._lost) == self.num_workers:
            self._look()
            self._raise_error()
            time.sleep(0.1)

    def _has_joined(self, m: int) -> bool:
        """Whether TensorFlow has let a worker in; it waits if that one stops meanwhile."""
        try:
            return self._connection.join(m, _JOIN_SECONDS)
        except UnequalVersions as error:  # the others go on; it is not asked again until it ends
            self._unwelcome.add(m)
            say(f"{error} It takes no part until then.")
        except tf.errors.OpError as error:
            self._say_gone_again(m, error)
        return False

    def _welcome(self, m: int) -> None:
        try:
            with self._here():
                self.store.renew(m, self.store.incarnations[m], self._unapplied.applied[m])
        except tf.errors.OpError as error:
            self._say_gone_again(m, error)
            return
        if not self.store.present[m]:
            self._connection.estrange(m, joining=True)  # lost again meanwhile
            return
        with self._changed:
            self._renewed(self.workers[m])
            self.workers[m].clock = max(self.workers[m].clock, self._slowest())
            del self._lost[m]
            self._start_threads()
            self._wake()
        say(f"{self._connection.worker_name(m)} joined")

    def _say_gone_again(self, m: int, error: tf.errors.OpError) -> None:
        self._connection.estrange(m, joining=True)
        here = self._connection.worker_listens(m)
        what = "has not joined yet" if here else "was lost again while it joined"
        why = error.message.partition("\n")[0]
        say(f"{self._connection.worker_name(m)} {what}: {why}")


def _tell(engine: weakref.ref[AttendedEngine], silent: set[str], answering: set[str]) -> bool:
    """Tells an engine, if it is still there, who does not answer, and who does."""
    found = engine()
    if found is None:
        return False
    found.hear_of(silent, answering)
    return True


def _reason(engine: weakref.ref[AttendedEngine], error: tf.errors.OpError) -> RuntimeError | None:
    found = engine()
    return None if found is None else found._reason(error)
