"""Which workers of a cluster are there: they may be lost, and come back.

A worker that is lost is fenced first: its shards take nothing more from that incarnation, and say
which of its messages they have. What that means for its mini-batches is the scheduler's. This is
what the chief does about it: it tells shards and TensorFlow, makes variables, and names what was
lost.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from tf_dsgd import _tf_remote
from tf_dsgd._tf_errors import in_a_line, says_lacks_function, says_replaced, says_silent
from tf_dsgd.console import say
from tf_dsgd.engine.probes import Probes
from tf_dsgd.engine.scheduler import Scheduler
from tf_dsgd.engine.state import Store
from tf_dsgd.membership import deadlines
from tf_dsgd.membership.task import Task, TaskState
from tf_dsgd.resuming import advice, shards_lost
from tf_dsgd.transport import probing
from tf_dsgd.transport.connection import Connection, UnequalVersions
from tf_dsgd.transport.names import close_connections

if TYPE_CHECKING:
    from tf_dsgd.engine.threads import ThreadsEngine


# Errors of calls to a task that is gone, or whose connection was closed.
_BROKEN = (tf.errors.UnavailableError, tf.errors.AbortedError)


class Members:
    """What the chief of a cluster knows and does about workers that come and go.

    Args:
        connection: to the tasks.
        timeout_seconds: how long a task may say nothing.
        renewed: called with a worker whose variables are all new.
    """

    def __init__(
        self,
        connection: Connection,
        timeout_seconds: float,
        renewed: Callable[[Task], None],
    ):
        self.connection = connection
        self._timeout = timeout_seconds
        self._renewed = renewed
        self._engine: ThreadsEngine | None = None
        now = time.monotonic()
        present = connection.present()
        while not any(present) and time.monotonic() - now < timeout_seconds:
            time.sleep(0.1)  # they may be started again in this moment
            present = connection.present()
        self.tasks = [Task(m, now, here=here) for m, here in enumerate(present)]
        of_parts = connection.part_devices()
        self.store = Store(
            [first for first, *_ in of_parts],
            len(connection.shard_devices()),
            self.tasks,
            self.was_lost_by,
            self.assemble,
            connection.call,
            of_parts,
        )
        self._losing = threading.Lock()
        """Held while a worker is fenced: its own thread and the main one may both find it lost."""
        self._unfenced: set[int] = set()
        """Lost workers of which not every shard may know: telling them failed half-way."""
        self._standing: tuple[float, Any] = now, None
        """Since when nothing has changed, as far as the main thread has seen, and what it saw."""
        self._looked = now
        self.probes = Probes(connection, timeout_seconds, self.tasks)

    def attend(self, engine: ThreadsEngine) -> None:
        """From here on workers take part in training, and are probed."""
        self._engine = engine
        self.probes.start()
        self.connection.reasons.append(functools.partial(_reason, weakref.ref(self)))

    @property
    def engine(self) -> ThreadsEngine:
        """Whose workers these are."""
        if self._engine is None:
            raise RuntimeError(
                "All workers were lost while the strategy was made. Look at what their processes "
                "printed last, and start this script again."
            )
        return self._engine

    @property
    def scheduler(self) -> Scheduler:
        """Who does what next."""
        return self.engine.scheduler

    def here(self) -> Any:
        """Within, tensors are made by this process, and travel with the call that takes them.

        TensorFlow makes a constant on another task by a call of its own, and holds Python's lock
        until it is answered: nobody here would do anything for as long as that task is stopped.
        """
        return tf.device(self.connection.host_device)

    def close(self) -> None:
        """Asks tasks no more."""
        self.probes.end()

    def cut(self) -> None:
        """Ends all calls to tasks: for the end of this process."""
        for address in self.connection.addresses():
            close_connections(address)

    # -- what a failed call is due to -------------------------------------------------------

    @contextlib.contextmanager
    def explained(self) -> Iterator[None]:
        """As `Engine.explained`."""
        try:
            with _tf_remote.interruptible():
                yield
        except (tf.errors.OpError, SystemError) as error:
            reason = self.reason(error)
            if reason is None:
                raise
            raise reason from error

    def reason(self, error: BaseException) -> RuntimeError | None:
        """What a failed call is due to, if tasks with shards were lost.

        Where a step is traced, TensorFlow's C code makes a SystemError of another.
        """
        lost = self._lost_shards(error, must_answer=True)
        return self._shards_lost(lost) if lost else None

    def _lost_shards(self, error: BaseException, must_answer: bool) -> list[str]:
        """Tasks with shards that have ended, or do not answer, once a call failed.

        Where the call's connection broke, it is waited until that is known: a task that is out of
        reach may be there again, one that is killed may take connections for a moment more, and one
        that is stopped does.

        Args:
            error: the call's.
            must_answer: whether one that can be reached has to answer within a while.
        """
        connection, seconds = self.connection, deadlines.PROBE_SECONDS
        begin = time.monotonic()
        while True:
            ended = connection.ended_shards(seconds)
            if ended or not isinstance(error, (*_BROKEN, SystemError)):
                return ended
            if self._engine is not None and self._engine.has_failed:
                return []  # of another error, which does not wait for this one
            unreachable = connection.silent_shards()
            missing = unreachable
            if must_answer and not missing:
                missing = connection.unanswering_shards(seconds)
            most = self._timeout if unreachable else seconds + self._timeout / 4
            if not missing or time.monotonic() - begin > most:
                return missing
            time.sleep(0.05)

    @property
    def last_backup(self) -> str | None:
        """Where the last checkpoint is."""
        return None if self._engine is None else self._engine.last_backup

    def _shards_lost(self, names: list[str]) -> RuntimeError:
        self.probes.named.update(names)
        return shards_lost(names, self.last_backup)

    def _check_shards_go_on(self, task: Task) -> None:
        """Raises the error that the loss of a worker is, where a part of the model goes with it."""
        if self.connection.shards_on_workers:
            raise self._shards_lost([self.connection.worker_name(task.index)])

    def was_lost_by(self, m: int, error: tf.errors.OpError) -> bool:
        """After a call failed on a worker: whether it was lost; if so the others go on."""
        lost = self._lost_shards(error, must_answer=False)
        if lost:
            raise self._shards_lost(lost) from error
        task = self.tasks[m]
        if not self.means_lost(task, error):
            return False
        self._say_if_silent(m, error)
        if self._engine is None:  # it has sent nothing yet
            self._check_shards_go_on(task)
            if task.is_present:
                task.become(TaskState.LOST)
        else:
            self.lose(task)
        return True

    def _say_if_silent(self, m: int, error: tf.errors.OpError) -> None:
        """After a call failed to a worker: says so if that was as it does not answer."""
        if says_silent(error):
            addresses = self.connection.groups[m].addresses
            self.probes.condemn(probing.not_answering(addresses, deadlines.GLANCE_SECONDS))

    def is_gone(self, m: int, incarnation: int) -> bool:
        """After a call failed that touches several workers: whether this one was lost by that."""
        task = self.tasks[m]
        if not task.is_present or task.incarnation != incarnation:
            return True
        there = self.connection.worker_listens(m) and self._has_its_clock(task)
        if not there:
            self.lose(task)
        return not there

    def means_lost(self, task: Task, error: tf.errors.OpError) -> bool:
        """Whether a failed call means that the worker's process is gone, or is another one."""
        if not self.connection.worker_listens(task.index) or isinstance(error, _BROKEN):
            return True
        if says_replaced(error) or not self._has_its_clock(task):
            return True
        if self.store.num_parts > 1 and self.connection.was_replaced(task.index):
            return True  # one that has no clock
        lacks = says_lacks_function(error) and not task.lacked_function
        task.lacked_function = task.lacked_function or lacks
        return lacks

    def _has_its_clock(self, task: Task) -> bool:
        """Whether a worker has its variables; another process at its address has none."""
        copy = None if self._engine is None else self.store.clock.copies[task.index]
        if copy is None:
            return False
        try:
            with tf.device(copy.device):  # and not on that of the thread that asks
                copy.numpy()
        except tf.errors.OpError as error:
            self._say_if_silent(task.index, error)
            return False
        return True

    # -- who is lost ------------------------------------------------------------------------

    def lose(self, task: Task) -> None:
        """Fences a lost worker; its mini-batches go to others if no shard has their gradients."""
        self._check_shards_go_on(task)
        with self._losing:
            if task.is_present or task.index in self._unfenced:
                self._fence(task)

    def _fence(self, task: Task) -> None:
        m, engine = task.index, self.engine
        with engine.changed:
            if task.is_present:
                self.scheduler.lose(task, time.monotonic())
                self._unfenced.add(m)
        self.connection.groups[m].leave_out()
        with self.here():
            told = [tf.constant(number, tf.int64) for number in (m, task.incarnation)]
            last = [int(shard.fence(*told)) for shard in engine.shards]
        with engine.changed, self.here():
            self.store.lose(m)
            loss = self.scheduler.fenced(task, last)
            self._unfenced.discard(m)
            left = len(self.scheduler.present)
            error = None if left else engine.all_lost()
            if error is not None:
                engine.fail(None, error)  # also if they come back
            engine.wake()
        held = ", what its codec had held back is gone" if self.store.holds_back else ""
        say(
            f"lost {self.connection.worker_name(m)}; {loss.words()}{held}, "
            f"{left} of {len(self.tasks)} workers go on"
        )

    # -- who answers ------------------------------------------------------------------------

    def unblock(self, seconds: float) -> None:
        """Ends calls of workers that wait for a task with shards; nothing goes on without it."""
        if seconds > deadlines.PROBE_SECONDS and self.connection.unanswering_shards(
            deadlines.PROBE_SECONDS
        ):
            for task in self.tasks:
                if self.engine.has_thread(task):
                    for address in self.connection.groups[task.index].addresses:
                        close_connections(address)

    # -- who comes back ---------------------------------------------------------------------

    def look_now_and_then(self) -> None:
        """Looks, if anybody is lost, and that was not asked lately."""
        if time.monotonic() - self._looked > deadlines.LOOK_SECONDS:
            self._looked = time.monotonic()
            if self._absent() or self._silent_at_rest():
                self.look()

    def _absent(self) -> list[Task]:
        return [task for task in self.tasks if not task.is_present]

    def _silent_at_rest(self) -> list[Task]:
        """Workers that do not answer, and have no call under way that would tell of it."""
        is_silent = self.connection.worker_is_silent
        silent = [task for task in self.scheduler.present if is_silent(task.index)]
        return [t for t in silent if t.index not in self.engine.working()]

    def look(self) -> None:
        """Lets workers join that came, or came back; ends a wait that is in vain."""
        self._looked = now = time.monotonic()
        for task in self._silent_at_rest():
            self._check_shards_go_on(task)
            with self.engine.changed:
                if task.index in self.engine.working():
                    continue  # it has begun a call, which will tell
                self.scheduler.silent(task)
            self.lose(task)
        for m in list(self._unfenced):
            self.lose(self.tasks[m])
        absent = self._absent()
        answering = self.connection.answering([task.index for task in absent])
        listening = self._listening(absent, answering)
        for task in absent:
            if task.index not in answering:
                if task.state is TaskState.REFUSED and task.index not in listening:
                    task.become(TaskState.LOST)
            elif self.engine.has_thread(task):
                continue  # it has not found out yet that its worker is lost
            elif task.state is TaskState.REFUSED and self.connection.was_replaced(task.index):
                task.become(TaskState.LOST)
            elif task.state is TaskState.LOST and self._may_join(task) and self._is_connected(task):
                self._join(task)
        if not self.scheduler.present:
            self._check_somebody_comes(now, listening)
        self._end_standstill(now)
        if not self.engine.has_failed:
            silent = self.connection.ended_shards()
            if silent:
                raise self._shards_lost(silent)
        self._looked = time.monotonic()  # looking may take as long as looks are apart

    def _end_standstill(self, now: float) -> None:
        """Where all wait for workers that answer nothing, and no rule does, these are lost.

        That is where nobody else can do their work: `late_after_seconds` later.
        """
        scheduler, engine = self.scheduler, self.engine
        least = scheduler.backup_after
        with engine.changed:
            for task in self.tasks:
                slow = task.read_since is not None and least is not None
                slow = slow and now - (task.read_since or now) > (least or 0.0)
                if slow and not task.read_is_slow:
                    engine.wake()  # those who wait for it under a bound do so no longer
                task.read_is_slow = slow
            working = engine.working()
            progress = working, scheduler.available, [(t.clock, t.unsent) for t in self.tasks]
        if progress != self._standing[1]:
            self._standing = now, progress
        waits = scheduler.exchange.bounds_staleness or self.connection.shards_on_workers
        if working and not waits and least is not None and now - self._standing[0] > least:
            groups = self.connection.groups
            self.connection.silence(a for m in working for a in groups[m].addresses)

    def _listening(self, absent: list[Task], answering: set[int]) -> set[int]:
        """Those of the absent workers that are there, where something hangs on that.

        A glance may miss one on a busy machine: it joins later, but is not taken for gone.
        """
        if len(absent) < len(self.tasks) and all(t.state is not TaskState.REFUSED for t in absent):
            return answering
        slow = [task.index for task in absent if task.index not in answering]
        return answering | self.connection.reached(slow)

    def _may_join(self, task: Task) -> bool:
        """Whether nobody completes a lease of that worker: TensorFlow is not told of it before."""
        with self.engine.changed:
            orphans = self.scheduler.orphans
            return not any(o.owner == task.index and o.runner is not None for o in orphans)

    def _check_somebody_comes(self, now: float, listening: set[int]) -> None:
        """Ends training with an error once all workers have been lost for too long."""
        coming = [task for task in self.tasks if task.state is not TaskState.REFUSED]
        there = any(task.index in listening for task in coming)
        limit = self._timeout + deadlines.LAST_SECONDS * there
        if now - max(task.since for task in self.tasks) <= limit:
            return
        names = ", ".join(self.connection.worker_name(task.index) for task in self.tasks)
        none_came = TimeoutError(
            f"All workers were lost, and none came back within {limit:g} s: {names}. "
            "Start them again, or allow more time with "
            f"tf_dsgd.TFCluster(worker_timeout_seconds=...). {advice(self.last_backup)}"
        )
        with self.engine.changed:
            self.engine.fail(None, none_came)
        for task in self.tasks:
            task.since = now  # who trains again waits again

    def assemble(self) -> None:
        """Waits in the main thread until a worker is there again."""
        engine = self.engine
        say(f"no worker is there: waiting {self._timeout:g} s for one")
        while not self.scheduler.present:
            self.look()
            engine.raise_error()
            time.sleep(0.1)

    def _is_connected(self, task: Task) -> bool:
        """Whether TensorFlow has let a worker in; it waits if that one stops meanwhile."""
        try:
            return self.connection.join(task.index, deadlines.JOIN_SECONDS)
        except UnequalVersions as error:  # the others go on; another process may come
            task.become(TaskState.REFUSED)
            say(f"{error} It takes no part until then.")
        except tf.errors.OpError as error:
            self._say_gone_again(task, error)
        return False

    def _join(self, task: Task) -> None:
        """A worker takes part again, once nobody completes a lease in its name."""
        engine = self.engine
        with engine.changed:
            if not self.scheduler.admits(task):
                return
        try:
            # One that was not there before may have a GPU; another process may have none.
            self.store.move(task.index, self.connection.part_devices()[task.index])
            with self.here():
                self.store.renew(task.index, task.number)
            with engine.changed:
                here = self.store.present[task.index]
                if here:
                    self._renewed(task)
                    self.scheduler.joins(task)
                    engine.start_threads()
                    engine.wake()
        except tf.errors.OpError as error:
            self._say_gone_again(task, error)
            return
        finally:
            with engine.changed:
                self.scheduler.gone_again(task)  # unless it has joined
                engine.wake()
        if not here:
            self.connection.groups[task.index].leave_out(joining=True)  # lost again meanwhile
            return
        say(f"{self.connection.worker_name(task.index)} joined")

    def _say_gone_again(self, task: Task, error: tf.errors.OpError) -> None:
        with self.engine.changed:
            self.scheduler.gone_again(task)
        self.connection.groups[task.index].leave_out(joining=True)
        here = self.connection.worker_listens(task.index)
        what = "has not joined yet" if here else "was lost again while it joined"
        why = in_a_line(error.message)
        say(f"{self.connection.worker_name(task.index)} {what}: {why}")

    @contextlib.contextmanager
    def tracing(self) -> Iterator[None]:
        """As `Engine.tracing`."""
        self.connection.use()
        with tf.init_scope():
            for task in self.scheduler.present:
                if self.connection.worker_has_ended(task.index):
                    self.lose(task)
            if not self.scheduler.present:
                self.assemble()
        with self.explained():
            yield


def _reason(members: weakref.ref[Members], error: tf.errors.OpError) -> RuntimeError | None:
    found = members()
    return None if found is None else found.reason(error)
