"""How messages go from worker to worker, and how a worker gets a model: by calls of the chief.

One thread of the chief's for each worker calls `Post`, which knows by `Mailboxes` who has what, and
has a `Wire` do it. It imports no TensorFlow: tests run it on another wire, with random histories.
"""

from __future__ import annotations

import collections
import contextlib
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, Protocol

from tf_dsgd.membership.mailboxes import Due, Mailboxes
from tf_dsgd.membership.task import Task


class Wire(Protocol):
    """Calls to workers. Each raises the error that it failed with, unless it says otherwise."""

    def clear(self, m: int) -> None:
        """Empties a worker's mailbox."""

    def begin(self, m: int, model: Any, version: int) -> None:
        """A worker's model becomes that one, which has so many messages in it."""

    def begin_as(self, m: int, giver: int, incarnation: int, model: Any, version: int) -> None:
        """The same, of a model that another worker gives, which is of that incarnation."""

    def fetch(self, m: int, due: Due) -> Any:
        """A worker takes in messages, after which its mailbox is empty."""

    def taken(self, m: int) -> int:
        """How many messages a worker's model has in it, as the worker says."""

    def model(self, m: int) -> Any:
        """A worker's model, at this moment. It stays where it is."""

    def brought(self, m: int) -> Any:
        """A worker's model, at this moment, brought here."""

    def collect(self, m: int, key: int) -> Any:
        """A worker leaves what it has accrued in its mailbox; gives the message's header."""

    def send(self, source: int, key: int, targets: Sequence[int]) -> Collection[int]:
        """A message goes from one worker's mailbox to others'; gives to whom it came.

        Of the others each is lost when this returns, or the sender is.
        """

    def lost(self, m: int, incarnation: int, error: Exception) -> bool:
        """After a call failed that was not the caller's own worker's: whether that one is lost."""

    def gone(self, m: int) -> Exception:
        """The error of a call to a worker that is lost."""

    # -- here, and at once: under the lock ------------------------------------------------------

    def edition(self) -> int:
        """How often all had to begin anew with what is read outside."""

    def shown(self) -> tuple[Any, int]:
        """The model that is read outside, and how many messages it has in it."""

    def show(self, model: Any, version: int) -> None:
        """A model that was brought here becomes what is read outside."""

    def count(self, header: Any) -> bool:
        """Whether a message is new to the counters, which count it."""

    def withdraw(self, header: Any) -> None:
        """A message counts as one that failed."""

    def all_lost(self) -> Exception | None:
        """The error that it is where nobody has a model that has the last updates in it.

        None where what is read outside has them. From then on it counts as if it had.
        """


class Post:
    """The messages of one program's workers.

    Args:
        wire: does what is called.
        lock: of the tasks, and of all that is counted here.
        tasks: the workers.
        make_lock: makes a lock.
    """

    def __init__(
        self,
        wire: Wire,
        lock: contextlib.AbstractContextManager[Any],
        tasks: Sequence[Task],
        make_lock: Callable[[], contextlib.AbstractContextManager[Any]] = threading.Lock,
    ):
        self._wire = wire
        self._lock = lock
        self._tasks = list(tasks)
        self._boxes = Mailboxes()
        self._edition: int | None = None
        self._models: dict[tuple[int, int], Any] = collections.defaultdict(make_lock)
        """By worker and incarnation: held while its model changes, or is read as it is."""

    # -- what a round needs -----------------------------------------------------------------

    def round(self, m: int, compute: Callable[[int, Due], Any]) -> None:
        """A worker takes in what there is, computes, and sends.

        Args:
            m: the worker.
            compute: called with the message's key and what is taken in before; gives the message's
                header.
        """
        with self._alone(m) as incarnation:
            self._enter(m, incarnation)
            key, due = self._due(m, incarnation)
            with self._as_far_as_it_came(m, incarnation, due):
                header = compute(key, due)
            with self._lock:
                here = self._took(m, incarnation, due)
                if here:
                    self._boxes.posted(m, key)
        if here:
            self._deliver(m, incarnation, key, header)

    def fetch(self, m: int) -> Any:
        """At rest: a worker takes in what there is, and has an empty mailbox then."""
        with self._alone(m) as incarnation:
            self._enter(m, incarnation)
            _, due = self._due(m, incarnation)
            with self._as_far_as_it_came(m, incarnation, due):
                version = self._wire.fetch(m, due)
            with self._lock:
                self._took(m, incarnation, due)
        return version

    def push(self, m: int, valid: bool) -> None:
        """A worker sends what it has accrued; what is not valid counts as failed."""
        with self._alone(m) as incarnation:
            with self._lock:
                key = self._boxes.key()
            header = self._wire.collect(m, key)
            with self._lock:
                self._see_who_left()
                here = self._boxes.is_whole(m, incarnation)
                if here:
                    self._boxes.posted(m, key)
        if valid and here:
            self._deliver(m, incarnation, key, header)
        elif not valid:
            with self._lock:
                self._wire.withdraw(header)
                if here:
                    self._boxes.discard(key)

    def show(self, m: int) -> None:
        """A worker's model becomes what is read outside."""
        with self._alone(m) as incarnation:
            with self._lock:
                self._see_who_left()
                if not self._boxes.is_whole(m, incarnation):
                    raise self._wire.gone(m)
            model = self._wire.brought(m)
            with self._lock:
                self._see_who_left()
                if not self._boxes.is_whole(m, incarnation):
                    raise self._wire.gone(m)
                self._wire.show(model, self._boxes.taken(m))

    # -- sending ----------------------------------------------------------------------------

    def _deliver(self, m: int, incarnation: int, key: int, header: Any) -> None:
        """Sends a message to all, and counts it when they have it; or its sender is lost."""
        while True:
            with self._lock:
                self._see_who_left()
                if self._boxes.workers.get(m) != incarnation:
                    return
                targets = self._boxes.missing(key)
                if not targets:
                    self._count(m, key, header)
                    return
                entries = [self._boxes.entry(j) for j in targets]
            arrived = self._wire.send(m, key, targets)
            with self._lock:
                for j, entry in zip(targets, entries, strict=True):
                    if j in arrived:
                        self._boxes.arrived(j, entry, key)

    def _count(self, m: int, key: int, header: Any) -> None:
        if not self._wire.count(header):
            raise RuntimeError(
                f"A message of worker {m} was refused, which has it counted twice or in a wrong "
                "order. That is a defect of tf_dsgd; please report it."
            )
        self._boxes.number(key)

    # -- taking in --------------------------------------------------------------------------

    def _due(self, m: int, incarnation: int) -> tuple[int, Due]:
        with self._lock:
            self._see_who_left()
            if not self._boxes.is_whole(m, incarnation):
                raise self._wire.gone(m)
            return self._boxes.key(), self._boxes.due(m)

    def _took(self, m: int, incarnation: int, due: Due) -> bool:
        """Under the lock: a worker has taken that in; False if it is lost by now."""
        self._see_who_left()
        if not self._boxes.is_whole(m, incarnation):
            return False
        self._boxes.took(m, due)
        return True

    @contextlib.contextmanager
    def _as_far_as_it_came(self, m: int, incarnation: int, due: Due) -> Iterator[None]:
        """A call that takes in messages may fail, before that or after it, or half-way."""
        try:
            yield
        except Exception:
            whole = False
            with contextlib.suppress(Exception):
                whole = self._wire.taken(m) == due.version
            with self._lock:
                if not (whole and self._took(m, incarnation, due)):
                    self._boxes.leaves(m)  # it begins anew, with another's model
            raise

    # -- who takes part ---------------------------------------------------------------------

    @contextlib.contextmanager
    def _alone(self, m: int) -> Iterator[int]:
        """Nobody else changes or reads that worker's model; gives its incarnation."""
        with self._lock:
            incarnation = self._tasks[m].incarnation
            alone = self._models[m, incarnation]
        with alone:
            yield incarnation

    def _see_who_left(self) -> None:
        """Under the lock: who was lost takes part no more; at another edition all begin anew."""
        edition = self._wire.edition()
        if edition != self._edition:
            self._edition = edition
            here = {task.index: task.incarnation for task in self._tasks if task.is_present}
            self._boxes.begin_anew(self._wire.shown()[1], here)
        for m, incarnation in self._boxes.workers.items():
            if not self._tasks[m].is_present or self._tasks[m].incarnation != incarnation:
                self._boxes.leaves(m)
                self._models.pop((m, incarnation), None)

    def _enter(self, m: int, incarnation: int) -> None:
        """A worker that has no model gets one, at a number from which on it has all messages."""
        with self._lock:
            self._see_who_left()
            if self._boxes.is_whole(m, incarnation):
                return
            joins = not self._boxes.is_full(m, incarnation)
            if joins:
                self._boxes.leaves(m)
            else:
                model, version = self._outside(self._boxes.taken(m))
        if joins:
            self._join(m, incarnation)
        else:
            self._wire.begin(m, model, version)
        with self._lock:
            self._see_who_left()
            if self._boxes.workers.get(m) != incarnation:
                raise self._wire.gone(m)
            self._boxes.begins(m)

    def _outside(self, wanted: int) -> tuple[Any, int]:
        """What is read outside, which has so many messages in it."""
        model, version = self._wire.shown()
        if version != wanted:
            raise RuntimeError(
                f"What is read outside is of version {version}, and workers were to begin with "
                f"version {wanted}. That is a defect of tf_dsgd; please report it."
            )
        return model, version

    def _join(self, m: int, incarnation: int) -> None:
        """A worker that came gets a model: what is read outside, if nothing has counted since.

        Else another worker's, and of what comes after it what was sent before it joined.
        """
        while True:
            self._wire.clear(m)  # of what came for a model that another was about to give it
            if self._begins_as_outside(m, incarnation) or self._begins_as_another(m, incarnation):
                return
            with self._lock:
                self._boxes.leaves(m)  # who gave it a model was lost meanwhile

    def _joins(self, m: int, incarnation: int, taken: int) -> None:
        if not self._tasks[m].is_present or self._tasks[m].incarnation != incarnation:
            raise self._wire.gone(m)
        self._boxes.joins(m, incarnation, taken)

    def _begins_as_outside(self, m: int, incarnation: int) -> bool:
        with self._lock:
            self._see_who_left()
            model, version = self._wire.shown()
            if version != self._boxes.version:
                return False
            self._joins(m, incarnation, version)
        self._wire.begin(m, model, version)
        return True

    def _begins_as_another(self, m: int, incarnation: int) -> bool:
        with self._lock:
            self._see_who_left()
            giver = self._boxes.giver(m)
            if giver is None:
                error = self._wire.all_lost()
                if error is None:
                    return False  # what is read outside has become the last one meanwhile
                raise error
        with self._alone(giver) as its_incarnation:
            with self._lock:
                self._see_who_left()
                if not self._boxes.is_full(giver, its_incarnation):
                    return False
                version = self._boxes.taken(giver)
                own = self._boxes.has_begun(giver)
                model = None if own else self._outside(version)[0]
                self._joins(m, incarnation, version)
                entry, keys = self._boxes.entry(m), self._boxes.lacks(m)
            try:
                model = self._wire.model(giver) if own else model
                sent = [key for key in keys if self._wire.send(giver, key, [m])]
            except Exception as error:
                if not self._wire.lost(giver, its_incarnation, error):
                    raise
                return False
            with self._lock:
                for key in sent:
                    self._boxes.arrived(m, entry, key)
            if len(sent) < len(keys):
                return False
        try:
            self._wire.begin_as(m, giver, its_incarnation, model, version)
        except Exception as error:
            if not self._wire.lost(giver, its_incarnation, error):
                raise
            return False
        return True
