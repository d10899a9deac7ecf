"""All tasks of a cluster are asked now and then whether they answer; else their calls are ended."""

from __future__ import annotations

import contextlib
import functools
import time
import weakref
from collections.abc import Iterable, Sequence

from tf_dsgd.console import say
from tf_dsgd.membership import deadlines
from tf_dsgd.membership.task import Task
from tf_dsgd.transport import probing
from tf_dsgd.transport.aside import Aside
from tf_dsgd.transport.connection import Connection
from tf_dsgd.transport.heartbeat import Heartbeat
from tf_dsgd.transport.names import close_connections


class Probes:
    """Asks tasks whether they answer, in a thread of its own.

    Args:
        connection: to the tasks.
        timeout_seconds: how long a task may say nothing.
        tasks: the workers.
    """

    def __init__(self, connection: Connection, timeout_seconds: float, tasks: Sequence[Task]):
        self._connection = connection
        self._timeout = timeout_seconds
        self._tasks = tasks
        self._called = time.monotonic()
        self._calling: Aside | None = None
        """What has tasks answer calls."""
        self._heartbeat: Heartbeat | None = None
        self.named: set[str] = set()
        """Tasks whose loss an error has said, and how to go on: nothing more is said of them."""

    def start(self) -> None:
        """From here on they are asked."""
        probe = functools.partial(_probe, weakref.ref(self))
        self._heartbeat = Heartbeat(probe, deadlines.probe_every(self._timeout))
        self._heartbeat.start()

    def end(self) -> None:
        """Asks no more."""
        if self._heartbeat is not None:
            self._heartbeat.end()
            self._heartbeat.join(deadlines.PROBE_SECONDS)

    def probe(self) -> float:
        """Asks all tasks whether they are there, and ends calls to those that have been silent.

        Whatever waits for a silent task ends with an error, by which it counts as lost. Those that
        answer have to answer TensorFlow's calls, too. Gives the seconds until the next time.
        """
        connection, asked = self._connection, time.monotonic()
        liveness, every = connection.liveness, deadlines.probe_every(self._timeout)
        addresses = set(connection.addresses())
        # One that has been silent for nearly as long as it may is not waited for beyond that.
        seconds = max(deadlines.glance(self._timeout), min(every, liveness.suspects_in(asked)))
        unheard = probing.not_answering(addresses, seconds)
        self._have_answer(addresses - unheard)
        suspects = liveness.probed(asked, time.monotonic(), addresses - unheard, unheard)
        # Some may have come back while others were asked, or are slow.
        again, asked = (suspects & unheard) - liveness.silent, time.monotonic()
        silent = probing.not_answering(again, deadlines.last_question(self._timeout))
        liveness.answered(again - silent, asked, time.monotonic())
        silent |= suspects - again
        self.condemn(silent)
        # TensorFlow waits for one that is lost, too, as it leaves.
        for address in connection.with_partners(silent):
            close_connections(address)
        return min(every, liveness.suspects_in(time.monotonic()))

    def condemn(self, addresses: Iterable[str]) -> None:
        """They count as silent, whoever uses them."""
        groups = self._connection.groups
        lost = {a for t in self._tasks if not t.is_present for a in groups[t.index].addresses}
        news = sorted(self._connection.liveness.condemn(addresses) - lost)
        # The loss of a part of the model ends training, whoever else is lost with it.
        for address in [*filter(self._connection.has_shard, news)] or news:
            name = self._connection.name_at(address)
            if name not in self.named:
                with contextlib.suppress(OSError):  # nobody is left to tell
                    say(f"{name} has not answered for {self._timeout:g} s and counts as lost")

    def _have_answer(self, answering: set[str]) -> None:
        """Has tasks answer calls now and then."""
        now = time.monotonic()
        if self._calling is not None:
            if not self._calling.wait(0.0):
                return
            calling, self._calling = self._calling, None
            calling.result()
        if now - self._called > deadlines.CALL_EVERY_SECONDS:
            self._called = now
            call = functools.partial(self._connection.ask, answering)
            self._calling = Aside(call, "tf_dsgd has tasks answer")


def _probe(probes: weakref.ref[Probes]) -> float | None:
    """Probes, if anybody wants to know."""
    found = probes()
    return None if found is None else found.probe()
