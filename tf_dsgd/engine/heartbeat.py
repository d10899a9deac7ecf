"""Notices tasks that do not answer: stopped, or behind a network that swallows packets.

gRPC's own pings (`tf_dsgd.channels`) find those of which somebody waits for the answer to a call
that has just begun. A round may be longer, and a ps be needed by workers and not by the chief. So
the chief asks all tasks now and then, and when one has not answered for long, closes its own
connections to it. Whatever waits for that task then ends with the error of a lost one, in whichever
thread.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable

from tf_dsgd import probing

# Between two questions, and until one that is not answered counts.
_ASK_SECONDS = 5.0


class Heartbeat(threading.Thread):
    """Asks tasks whether they are there.

    Args:
        addresses: of the tasks.
        tell: called after every question with the addresses that have not answered for
            `timeout_seconds`, and with those that have answered this one; gives False when nobody
            wants to know any more.
        timeout_seconds: how long a task may be silent.
    """

    def __init__(
        self,
        addresses: Iterable[str],
        tell: Callable[[set[str], set[str]], bool],
        timeout_seconds: float,
    ):
        super().__init__(name="tf_dsgd asks tasks", daemon=True)
        self._addresses = list(addresses)
        self._tell = tell
        self._timeout = timeout_seconds
        self._ask_seconds = min(_ASK_SECONDS, timeout_seconds / 4)
        self._ended = threading.Event()

    def end(self) -> None:
        """Asks no more."""
        self._ended.set()

    def run(self) -> None:
        """Asks until nobody wants to know."""
        since: dict[str, float] = {}
        while not self._ended.wait(self._ask_seconds):
            asked = time.monotonic()
            silent = probing.not_answering(self._addresses, self._ask_seconds)
            since = {address: since.get(address, asked) for address in silent}
            now = time.monotonic()
            for_long = {a for a, began in since.items() if now - began >= self._timeout}
            if not self._tell(for_long, set(self._addresses) - silent):
                return
