"""Calls of the chief by which workers send to one another: what `engine.post` has done.

A message goes by a call to its sender, of which a part runs on the receiver; TensorFlow's Send and
Recv carry it between the two. Each such call is in a thread of its own: one that is stopped holds
up nobody's call but that to itself, which is let go of when it counts as lost.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tf_dsgd.engine.mail import MailParts
from tf_dsgd.engine.members import Members
from tf_dsgd.membership import deadlines
from tf_dsgd.membership.mailboxes import Due
from tf_dsgd.transport.aside import Aside


class ClusterWire:
    """See `engine.post.Wire`.

    Args:
        mail: the functions that are called.
        members: the workers.
    """

    def __init__(self, mail: MailParts, members: Members):
        self._mail = mail
        self._members = members
        self._pairs: dict[tuple[int, int], tuple[Any, Any]] = {}
        """By sender and receiver: of which incarnation each is, and what sends."""
        _ = mail.fetch, mail.collect, mail.model, mail.begin, mail.clear  # traced here, and
        _ = mail.scalars, mail.count, mail.shown, mail.show  # in the main thread

    def _on(self, m: int) -> Any:
        return tf.device(self._members.store.worker_devices[m])

    def _here(self, *values: Any) -> list[tf.Tensor]:
        with self._members.here():
            return [tf.constant(value, tf.int64) for value in values]

    # -- to one worker ----------------------------------------------------------------------

    def clear(self, m: int) -> None:
        with self._on(m):
            self._mail.clear[m]()

    def begin(self, m: int, model: Sequence[tf.Tensor], version: int) -> None:
        where = self._here(version)
        with self._on(m):
            self._mail.begin[m](*where, *model)

    def begin_as(
        self, m: int, giver: int, incarnation: int, model: Sequence[tf.Tensor], version: int
    ) -> None:
        call = Aside(lambda: self.begin(m, model, version), f"tf_dsgd gives worker {m} a model")
        self._ended(call, giver, incarnation)

    def where(self, due: Due) -> list[tf.Tensor]:
        """What a function that takes in messages is told of them."""
        taken = np.array(due.messages, np.int64).reshape(-1, 2)
        told = self._here(taken, np.array(due.thrown, np.int64), due.version)
        with self._members.here():
            return [*told, *self._mail.scalars()]

    def fetch(self, m: int, due: Due) -> tf.Tensor:
        where = self.where(due)
        with self._on(m):
            return self._mail.fetch[m](*where)

    def round(self, function: Any, inputs: Sequence[Any], key: int, due: Due) -> Any:
        """The header of a round's message."""
        where = [*self._here(key), *self.where(due)]
        return function(*where, *inputs).numpy()

    def taken(self, m: int) -> int:
        return int(self._members.store.clock.of(m).numpy()[-1])

    def model(self, m: int) -> list[tf.Tensor]:
        def read() -> list[tf.Tensor]:
            with self._on(m):
                return list(self._mail.model[m]())

        incarnation = self._members.tasks[m].incarnation
        call = Aside(read, f"tf_dsgd reads worker {m}'s model")
        return list(self._ended(call, m, incarnation))

    def brought(self, m: int) -> list[tf.Tensor]:
        model = self.model(m)
        with self._members.here():
            return [tf.identity(value) for value in model]

    def collect(self, m: int, key: int) -> np.ndarray:
        where = self._here(key)
        with self._on(m):
            return np.asarray(self._mail.collect[m](*where).numpy())

    # -- from one to another ----------------------------------------------------------------

    def send(self, source: int, key: int, targets: Sequence[int]) -> set[int]:
        known = {m: self._members.tasks[m].incarnation for m in (source, *targets)}
        arrived, missing = set[int](), list(targets)
        deadline = time.monotonic() + deadlines.SEND_SECONDS
        while missing:
            calls = {j: self._send((source, known[source]), key, (j, known[j])) for j in missing}
            failed = {
                j: error for j, call in calls.items() if (error := self._failed(call, j, known[j]))
            }
            arrived.update(calls.keys() - failed.keys())
            missing = [j for j in failed if not self._members.is_gone(j, known[j])]
            if not missing or self._members.is_gone(source, known[source]):
                break
            error = failed[missing[0]]
            if self._members.scheduler.stopped:
                raise error
            if time.monotonic() > deadline:
                raise self._cannot_reach(source, missing[0], error) from error
            time.sleep(deadlines.RETRY_SECONDS)
        return arrived

    def _send(self, source: tuple[int, int], key: int, target: tuple[int, int]) -> Aside:
        """A call of a worker, which is given with its incarnation, to another."""
        (k, _), (j, _) = source, target
        between, function = self._pairs.get((k, j), (None, None))
        if between != (source, target):  # who sends keeps where the other was
            devices = self._members.store.worker_devices
            function = self._mail.sending(devices[k], devices[j])
            self._pairs[k, j] = (source, target), function
        where = self._here(key)

        def send() -> None:
            with self._on(k):
                function(*where)

        return Aside(send, f"tf_dsgd sends from worker {k} to {j}")

    def _failed(self, call: Aside, target: int, incarnation: int) -> tf.errors.OpError | None:
        """The error of a call that sends, if it failed, or is let go of."""
        try:
            self._ended(call, target, incarnation)
        except tf.errors.OpError as error:
            return error
        return None

    def _ended(self, call: Aside, m: int, incarnation: int) -> Any:
        """What a call gives that needs worker m, unless that one counts as lost before its end."""
        while not call.wait(deadlines.CALL_SECONDS):
            if self._members.connection.worker_is_silent(m):
                self._members.lose(self._members.tasks[m])
            if self._members.tasks[m].incarnation != incarnation:
                raise self.gone(m)
        return call.result()

    def _cannot_reach(self, source: int, target: int, error: tf.errors.OpError) -> RuntimeError:
        name = self._members.connection.worker_name
        why = error.message.strip().rpartition("\n")[2]
        return RuntimeError(
            f"{name(source)} cannot reach {name(target)}, to which it has to send, and both answer "
            f"the chief. Let all workers connect to each other. TensorFlow says: {why}"
        )

    # -- who is lost ------------------------------------------------------------------------

    def lost(self, m: int, incarnation: int, error: Exception) -> bool:
        return isinstance(error, tf.errors.OpError) and self._members.is_gone(m, incarnation)

    def gone(self, m: int) -> tf.errors.OpError:
        name = self._members.connection.worker_name(m)
        return tf.errors.UnavailableError(None, None, f"{name} is lost.")

    # -- here -------------------------------------------------------------------------------

    def edition(self) -> int:
        with self._members.here():  # and not on the device of the thread that asks
            return int(self._mail.log.edition.numpy())

    def shown(self) -> tuple[list[tf.Tensor], int]:
        with self._members.here():
            version, model = self._mail.shown()
        return model, int(version)

    def show(self, model: Sequence[tf.Tensor], version: int) -> None:
        with self._members.here():
            self._mail.show(*self._here(version), *model)

    def count(self, header: np.ndarray) -> bool:
        with self._members.here():
            return bool(self._mail.count(tf.constant(header)))

    def withdraw(self, header: np.ndarray) -> None:
        with self._members.here():
            self._mail.withdraw(tf.constant(header))

    def all_lost(self) -> Exception | None:
        with self._members.here():
            return self._members.engine.all_lost()
