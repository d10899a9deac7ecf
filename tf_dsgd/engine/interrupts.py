"""Ctrl-C between two turns instead of within one."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any


@contextlib.contextmanager
def held_back() -> Iterator[Callable[[], None]]:
    """Within, SIGINT waits until the end of the block, or until what this yields is called.

    Its handler then runs as it would have. A message that a worker has numbered must reach the
    shard or be refused by it. An interrupt between the two calls, which Python would raise as soon
    as the first comes back, would lose it. Where no Python function handles SIGINT, or in another
    thread than the main one, nothing is to be held back.
    """
    handler = signal.getsignal(signal.SIGINT)
    if not callable(handler) or threading.current_thread() is not threading.main_thread():
        yield lambda: None
        return
    received: list[tuple[int, Any]] = []

    def let_through() -> None:
        if received:
            handler(*received.pop())

    signal.signal(signal.SIGINT, lambda number, frame: received.append((number, frame)))
    try:
        yield let_through
    finally:
        signal.signal(signal.SIGINT, handler)
    let_through()
