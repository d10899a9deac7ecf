"""What the package says to whoever watches a job."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import traceback
from collections.abc import Iterator
from typing import Any

from tf_dsgd import floods, resuming
from tf_dsgd._tf_errors import WHOLE, as_raised

NOTHING_TRAINED = "Nothing was trained."
"""The note of an error that comes before training, of what a user gave or of another task."""
_said_in_a_line = {NOTHING_TRAINED}
"""The notes of errors that say all that a user can do about them."""
_WITH_BACKUPS = "tf_dsgd.callbacks.BackupAndRestore"


def say(message: str, version: str = "") -> None:
    """Writes a line."""
    who = f"tf_dsgd {version}" if version else "tf_dsgd"
    # Line and end in one piece: other threads and processes write, too.
    print(f"{who}: {message}\n", end="", file=sys.stderr, flush=True)


def end_scripts_in_a_line(
    *notes: str, says_interrupts: bool = True, backups: str = _WITH_BACKUPS
) -> None:
    """A script that is ended by an error with one of these notes says the error, and no traceback.

    That is written to a file, which is named before, with all that TensorFlow said. So it is with a
    script that Ctrl-C ends in a call of Keras or of this package.

    Args:
        *notes: those of such errors.
        says_interrupts: whether Ctrl-C has a line, or ends the script without a word.
        backups: with what the same command would go on.
    """
    _said_in_a_line.update(notes)
    ours = getattr(sys.excepthook, "of_tf_dsgd", False)  # this one, or that of launch/early
    if sys.excepthook is not sys.__excepthook__ and not ours:
        return  # somebody else's, who knows why

    def hook(kind: type[BaseException], error: BaseException, where: Any) -> None:
        said = as_raised(error)
        known = bool(_said_in_a_line.intersection(getattr(said, "__notes__", ())))
        interrupted = kind is KeyboardInterrupt and _trains(where)
        if not known and not interrupted:
            sys.__excepthook__(kind, error, where)
            return
        if interrupted and not says_interrupts:
            return
        with tempfile.NamedTemporaryFile(
            "w", prefix="tf_dsgd-traceback-", suffix=".txt", delete=False
        ) as file:
            traceback.print_exception(kind, error, where, file=file)
            print(getattr(error, WHOLE, ""), file=file)
        last = str(said) if kind is RuntimeError else f"{_line(where)}{kind.__name__}: {said}"
        if interrupted:
            goes_on = f"With {backups} the same command would go on from there"
            written = resuming.last_noted()
            goes_on = f"{goes_on}." if written is None else resuming.advice(written)
            last = f"{_line(where)}{kind.__name__}. {goes_on}"
        lines = f"the traceback is in {file.name}", last
        floods.say_behind("".join(f"tf_dsgd: {line}\n" for line in lines))

    hook.of_tf_dsgd = True  # type: ignore[attr-defined]
    sys.excepthook = hook


@contextlib.contextmanager
def before_training() -> Iterator[None]:
    """Within, an error is one of what the user gave, or of another task: a line says all of it."""
    end_scripts_in_a_line()
    try:
        yield
    except (ValueError, TypeError, OSError, RuntimeError) as error:
        error.add_note(NOTHING_TRAINED)
        raise


def _trains(where: Any) -> bool:
    """Whether a traceback leads into Keras or this package."""
    modules = [sys.modules.get(name) for name in ("keras", "tf_dsgd")]
    folders = tuple(os.path.dirname(str(m.__file__)) + os.sep for m in modules if m is not None)
    files = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(where)]
    return any(file.startswith(folders) for file in files)


def _line(where: Any) -> str:
    """The line of the script; before it stand Python's own, of `python -m`."""
    for frame, line in traceback.walk_tb(where):
        if not frame.f_code.co_filename.startswith("<frozen"):
            return f"{frame.f_code.co_filename}:{line}: "
    return ""
