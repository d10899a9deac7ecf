"""What is done in a thread of its own, as it may wait without end."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from tf_dsgd import _tf_remote


class Aside:
    """An action under way in a thread; calls of it to other tasks wait for nobody else's.

    Args:
        action: it.
        name: the thread's.
        daemon: whether it may be under way when the process ends.
    """

    def __init__(self, action: Callable[[], Any], name: str, *, daemon: bool = True):
        self._result: Any = None
        self._error: BaseException | None = None
        self._done = threading.Event()
        threading.Thread(target=self._run, args=(action,), name=name, daemon=daemon).start()

    def _run(self, action: Callable[[], Any]) -> None:
        try:
            with _tf_remote.SynchronousExecutor().scope():
                self._result = action()
        except BaseException as error:  # raised where the result is asked for
            self._error = error
        finally:
            self._done.set()

    def wait(self, seconds: float) -> bool:
        """Whether it is done within that time."""
        # Not by joining the thread: after Ctrl-C in that Python takes one for ended that runs.
        return self._done.wait(seconds)

    def result(self) -> Any:
        """What the action gave, once it is done, or raises what it raised; to be asked once."""
        error, self._error = self._error, None
        try:
            if error is not None:
                raise error
            return self._result
        finally:
            del error  # whose traceback has this frame
