"""What the package says to whoever watches a job."""

from __future__ import annotations

import sys
import tempfile
import traceback
from typing import Any

from tf_dsgd._tf_errors import WHOLE


def say(message: str, version: str = "") -> None:
    """Writes a line."""
    who = f"tf_dsgd {version}" if version else "tf_dsgd"
    # Line and end in one piece: other threads and processes write, too.
    print(f"{who}: {message}\n", end="", file=sys.stderr, flush=True)


def end_scripts_in_a_line(*notes: str) -> None:
    """A script that is ended by an error with one of these notes says the error, and no traceback.

    That is written to a file, which is named before, with all that TensorFlow said.
    """
    if sys.excepthook is not sys.__excepthook__:
        return  # somebody else's, who knows why; or this one

    def hook(kind: type[BaseException], error: BaseException, where: Any) -> None:
        if not set(notes).intersection(getattr(error, "__notes__", ())):
            sys.__excepthook__(kind, error, where)
            return
        with tempfile.NamedTemporaryFile(
            "w", prefix="tf_dsgd-traceback-", suffix=".txt", delete=False
        ) as file:
            traceback.print_exception(kind, error, where, file=file)
            print(getattr(error, WHOLE, ""), file=file)
        say(f"the traceback is in {file.name}")
        say(str(error) if kind is RuntimeError else f"{_line(where)}{kind.__name__}: {error}")

    sys.excepthook = hook


def _line(where: Any) -> str:
    """The line of the script."""
    return f"{where.tb_frame.f_code.co_filename}:{where.tb_lineno}: " if where else ""
