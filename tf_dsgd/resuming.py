"""How training goes on after a task took a part of it along: where from, and by which command."""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
from collections.abc import Sequence

from tf_dsgd.launch import BACKUP_FD, COMMAND, ENDED_FD, how_to_go_on


def advice(backup: str | None) -> str:
    """The end of an error that ends training; `backup` is the last checkpoint."""
    return how_to_go_on(command(), backup)


def shards_lost(names: Sequence[str], backup: str | None) -> RuntimeError:
    """The error that the loss of a part of the model is."""
    return RuntimeError(
        f"Lost {', '.join(names)}, and the part of the model it held. Tasks that the launcher did "
        f"not start have to be started again. {advice(backup)}"
    )


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


def ended() -> set[str]:
    """The addresses of tasks that have ended, and that the launcher, if any, starts no more."""
    passed = os.environ.get(ENDED_FD, "")
    if passed.isdecimal():
        with contextlib.suppress(OSError):
            return set(os.pread(int(passed), 1 << 20, 0).decode(errors="replace").split())
    return set()
