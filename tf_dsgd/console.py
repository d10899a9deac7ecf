"""What the package says to whoever watches a job."""

from __future__ import annotations

import sys
import tempfile
import traceback
from typing import Any


def say(message: str, version: str = "") -> None:
    """Writes a line."""
    who = f"tf_dsgd {version}" if version else "tf_dsgd"
    # Line and end in one piece: other threads and processes write, too.
    print(f"{who}: {message}\n", end="", file=sys.stderr, flush=True)


def end_scripts_in_a_line(note: str) -> None:
    """A script that is ended by an error with this note says the error, and no traceback.

    That is written to a file, which is named before.
    """
    if sys.excepthook is not sys.__excepthook__:
        return  # somebody else's, who knows why; or this one

    def hook(kind: type[BaseException], error: BaseException, where: Any) -> None:
        if note not in getattr(error, "__notes__", ()):
            sys.__excepthook__(kind, error, where)
            return
        with tempfile.NamedTemporaryFile(
            "w", prefix="tf_dsgd-traceback-", suffix=".txt", delete=False
        ) as file:
            traceback.print_exception(kind, error, where, file=file)
        say(f"the traceback is in {file.name}")
        say(str(error))

    sys.excepthook = hook
