"""A thread that has tasks probed: stopped ones, or those behind a network that swallows packets.

gRPC's own pings (`transport.channels`) find those of which somebody waits for the answer to a call
that has just begun. A round may be longer, and a ps be needed by workers and not by the chief. So
the chief asks all tasks now and then, and when one has not answered for long, closes its own
connections to it. Whatever waits for that task then ends with the error of a lost one, in whichever
thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from absl import logging


class Heartbeat(threading.Thread):
    """Calls something again and again.

    Args:
        probe: asks the tasks; gives the seconds until the next call, or None when nobody wants to
            know any more.
        seconds: until the first call.
    """

    def __init__(self, probe: Callable[[], float | None], seconds: float):
        super().__init__(name="tf_dsgd asks tasks", daemon=True)
        self._probe = probe
        self._seconds = seconds
        self._ended = threading.Event()

    def end(self) -> None:
        """Asks no more."""
        self._ended.set()

    def run(self) -> None:
        """Asks until nobody wants to know."""
        seconds: float | None = self._seconds
        said: set[type] = set()
        while seconds is not None and not self._ended.wait(seconds):
            try:
                seconds = self._probe()
            except (OSError, RuntimeError) as error:
                # No room for a file or a thread: there may be again, and tasks may stop meanwhile.
                if type(error) not in said:
                    said.add(type(error))
                    logging.warning(
                        "tf_dsgd: tasks could not be asked whether they are there: %s", error
                    )
                seconds = self._seconds
