"""Ctrl-C between two turns, or where a trace bears it, instead of anywhere; and not swallowed."""

from __future__ import annotations

import _thread
import contextlib
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

from tf_dsgd import _tf
from tf_dsgd.console import say

TRACES = "Ctrl-C ends fit as soon as the trace of its step can be left; a second one, at once"
_AGAIN_SECONDS = 0.01
_points: list[Callable[[], None]] = []
"""Of the blocks that the main thread is in, what lets an interrupt through at a point."""


@contextlib.contextmanager
def held_back(
    at_most: int | None = None, said: str = "", *, until_a_point: bool = False
) -> Iterator[Callable[[], None]]:
    """Within, SIGINT waits until the end of the block, or until what this yields is called.

    Its handler then runs as it would have. A message that a worker has numbered must reach the
    shard or be refused by it. An interrupt between the two calls, which Python would raise as soon
    as the first comes back, would lose it. TensorFlow's tracing, interrupted, leaves half a graph,
    and may raise a SystemError instead. Where no Python function handles SIGINT, or in another
    thread than the main one, nothing is to be held back.

    Args:
        at_most: so many signals wait; the next is not held back, for a user who has waited enough.
        said: to whoever interrupts, at once, if it waits.
        until_a_point: whether it comes at `point`, too.
    """
    handler = signal.getsignal(signal.SIGINT)
    if not callable(handler) or threading.current_thread() is not threading.main_thread():
        yield lambda: None
        return
    received: list[tuple[int, Any]] = []

    def let_through() -> None:
        if received:
            handler(*received.pop())

    def receive(number: int, frame: Any) -> None:
        received.append((number, frame))
        if at_most is not None and len(received) > at_most:
            received.clear()
            handler(number, frame)
        elif said:
            with contextlib.suppress(RuntimeError):  # it came within another line
                say(said)

    signal.signal(signal.SIGINT, receive)
    _points.append(let_through if until_a_point else _nothing)
    try:
        yield let_through
    finally:
        _points.pop()
        signal.signal(signal.SIGINT, handler)
    let_through()


def _nothing() -> None:
    """Nothing comes through."""


def point() -> None:
    """Where an interrupt may come while a step is traced: as an error of the step's own would.

    Such errors are provided for; in the middle of TensorFlow's code they would not be.
    """
    if _points and threading.current_thread() is threading.main_thread():
        _points[-1]()


def not_swallowed() -> None:
    """From now on a Ctrl-C that falls into a finaliser comes again, after it.

    Python prints what `__del__` raises and goes on: one in sixty was lost that way while workers
    in other processes trained, as TensorFlow frees handles at every step. Holds for the process.
    """
    former = sys.unraisablehook
    if getattr(former, "of_tf_dsgd", False):
        return

    def hook(unraisable: Any) -> None:
        if issubclass(unraisable.exc_type, KeyboardInterrupt):
            _again_later()  # here, or in the finaliser, it would be swallowed again
        else:
            former(unraisable)

    hook.of_tf_dsgd = True  # type: ignore[attr-defined]
    sys.unraisablehook = hook


def not_where_it_does_harm() -> None:
    """From now on a Ctrl-C waits while code runs that would break by it, or swallow it.

    `tf.function` keeps its traces in an ordered dictionary, which calls Python to compare keys.
    What is raised there leaves the dictionary with a key half removed, and each later call may end
    with a KeyError of TensorFlow's, in another `fit`, too. Keras passes over whatever is raised
    while it makes numbers of the logs: one Ctrl-C in a hundred was lost there. Holds for the
    process, where Python's own handler would raise the KeyboardInterrupt; one of the user's is
    left alone.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _raise_where_it_does_none)


def _raise_where_it_does_none(number: int, frame: Any) -> None:
    within = frame
    while within is not None:
        if _tf.is_harmed_by_interrupts(within.f_code):
            _again_later()
            return
        within = within.f_back
    signal.default_int_handler(number, frame)


def _again_later() -> None:
    again = threading.Timer(_AGAIN_SECONDS, _thread.interrupt_main)
    again.daemon = True
    again.start()
