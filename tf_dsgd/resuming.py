"""How training goes on after a task took a part of it along: where from, and by which command."""

from __future__ import annotations

import contextlib
import functools
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from typing import Any

from tf_dsgd.launch import BACKUP_FD, COMMAND, how_to_go_on


def advice(backup: str | None) -> str:
    """The end of an error that ends training; `backup` is the last checkpoint."""
    return how_to_go_on(command(), backup)


def shards_lost(names: Sequence[str], backup: str | None) -> RuntimeError:
    """The error that the loss of a part of the model is."""
    return RuntimeError(
        f"Lost {', '.join(names)}, and the part of the model it held. Tasks that the launcher did "
        f"not start have to be started again. {advice(backup)}"
    )


_explanations: list[Callable[[], str | None]] = []


def explain_uncaught(explanation: Callable[[], str | None]) -> None:
    """Has an error that ends this process end with what `explanation` gives, if anything.

    `fit` says by itself why training ends. What fails in a step that runs in the chief, as
    `evaluate`'s do, is TensorFlow's error, and goes through Keras alone.
    """
    if not _explanations:
        sys.excepthook = functools.partial(_show, sys.excepthook)
    _explanations.append(explanation)


def _show(shown: Callable[..., Any], kind: Any, error: BaseException, trace: Any) -> None:
    if isinstance(error, Exception):
        texts = dict.fromkeys(explanation() for explanation in _explanations)
        for text in texts:
            if text is not None and text not in str(error):
                error.add_note(text)
    shown(kind, error, trace)


def command() -> str:
    """What starts this training again: the launcher's command line, or this process's."""
    launched = os.environ.get(COMMAND)
    if launched:
        return launched
    if hasattr(sys, "ps1") or "ipykernel" in sys.modules:
        return "run this session's cells again, in a new process"
    return shlex.join(sys.orig_argv)


def note(backup: str | None) -> None:
    """Tells the launcher, if there is one, of the last checkpoint: it survives this process."""
    passed = os.environ.get(BACKUP_FD, "")
    if not passed.isdecimal():
        return
    with contextlib.suppress(OSError):  # a process of the script's own has not inherited the file
        os.ftruncate(int(passed), 0)
        os.pwrite(int(passed), (backup or "").encode(), 0)
