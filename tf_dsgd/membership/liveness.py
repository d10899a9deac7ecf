"""The one verdict on who is alive, of all tasks of a cluster, by address.

Tasks are probed now and then, and have to answer TensorFlow's calls, too. One that has done neither
for the user's timeout is silent: whatever waits for it is ended, and it counts as lost. So is one
of which gRPC's own pings, or somebody whom others wait for, found that it does not answer. Who
answers again is silent no more.

A verdict is read from any thread: it is replaced whole.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Set

from tf_dsgd.membership import deadlines


class Liveness:
    """Who does not answer.

    Args:
        timeout_seconds: how long a task may say nothing.
    """

    def __init__(self, timeout_seconds: float):
        self._timeout = timeout_seconds
        self._writing = threading.Lock()  # verdicts come from several threads
        self._silent: frozenset[str] = frozenset()
        self._heard: dict[str, float] = {}
        """When each was last asked what it answered; or for the first time."""
        self._probed: float | None = None
        """When the last round of probes ended."""
        self._unheard: dict[str, float] = {}
        """Of those that did not answer the last probe."""
        self._unresponsive: frozenset[str] = frozenset()
        """Those that are there, and do not answer calls."""
        self._call: tuple[str, float] | None = None
        """The call that is under way: to whom, and since when."""

    def is_silent(self, address: str) -> bool:
        """Whether the verdict on a task is that it does not answer."""
        return address in self._silent

    @property
    def silent(self) -> frozenset[str]:
        """All of which it is."""
        return self._silent

    def probed(self, asked: float, now: float, answered: Set[str], unheard: Set[str]) -> set[str]:
        """After a round of probes; gives those that have been silent for too long by now.

        They are to be asked once more before they are condemned: some may be back.

        Args:
            asked: when the round began.
            now: when it ended.
            answered: who answered.
            unheard: who did not.
        """
        # Of time in which this process itself stood still nobody was silent.
        most = 2 * deadlines.probe_every(self._timeout) + deadlines.glance(self._timeout)
        if self._probed is not None and now - self._probed > most:
            surplus = now - self._probed - most
            self._heard = {a: since + surplus for a, since in self._heard.items()}
            with self._writing:
                if self._call is not None:
                    self._call = self._call[0], self._call[1] + surplus
        self._probed = now
        self._heard.update(dict.fromkeys(answered, asked))
        self._unheard = {a: self._heard.setdefault(a, asked) for a in unheard}
        with self._writing:
            # At the address of one that ended may be another next.
            self._unresponsive = unresponsive = self._unresponsive & answered | self._overdue(now)
            self._silent = self._silent - (answered - unresponsive)
        most = deadlines.suspected_after(self._timeout)
        overdue = {a for a, since in self._unheard.items() if now - since >= most}
        return overdue | unresponsive

    def answered(self, addresses: Set[str], asked: float, now: float) -> None:
        """After suspects were asked once more, from `asked` to `now`: these are there."""
        self._probed = now
        self._heard.update(dict.fromkeys(addresses, asked))
        self._unheard = {a: s for a, s in self._unheard.items() if a not in addresses}

    def suspects_in(self, now: float) -> float:
        """Seconds until the next of those that do not answer will have been silent for too long.

        Those that are condemned do not count.
        """
        waited = [since for a, since in self._unheard.items() if a not in self._silent]
        if not waited:
            return math.inf
        return max(0.0, min(waited) + deadlines.suspected_after(self._timeout) - now)

    def condemn(self, addresses: Iterable[str]) -> set[str]:
        """They do not answer; gives those of which that is news."""
        with self._writing:
            news = set(addresses) - self._silent
            self._silent = self._silent | news
        return news

    def calls(self, address: str, now: float) -> None:
        """A task has to answer a call from now on."""
        with self._writing:
            self._call = address, now

    def called(self, answered: bool) -> None:
        """It did, or the call ended otherwise. One that answers calls was not there before."""
        with self._writing:
            if answered and self._call is not None:
                self._unresponsive = self._unresponsive - {self._call[0]}
            self._call = None

    def asks_no_more(self, address: str) -> None:
        """A task is not called any more, so that nobody would find that it answers again."""
        with self._writing:
            self._unresponsive = self._unresponsive - {address}

    def _overdue(self, now: float) -> frozenset[str]:
        call = self._call
        if call is None:
            return frozenset()
        address, since = call
        overdue = now - since > deadlines.CALL_EVERY_SECONDS + self._timeout
        return frozenset([address] if overdue else [])
