"""How training goes on after a task took a part of it along: where from, and by which command."""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
from collections.abc import Sequence

ENDS_TRAINING = "That ends training."
"""The note of an error that says all that a user can do about it."""
# What the launcher tells worker and ps processes.
THREADS = "TF_DSGD_THREADS"
PARENT_FD = "TF_DSGD_PARENT_FD"
# How many worker tasks are one worker, where it starts them in groups.
TASKS_PER_WORKER = "TF_DSGD_TASKS_PER_WORKER"
# What it tells the script: the command that starts all of it again, and two files, open: where the
# chief notes its last checkpoint, and where it finds who has ended.
COMMAND = "TF_DSGD_COMMAND"
BACKUP_FD = "TF_DSGD_BACKUP_FD"
ENDED_FD = "TF_DSGD_ENDED_FD"


def how_to_go_on(command: str, backup: str | None) -> str:
    """What is said where a task took a part of the training along."""
    if backup:
        return f"The last checkpoint is in {backup}. To go on from it: {command}"
    return (
        "No checkpoint was written yet; tf_dsgd.callbacks.BackupAndRestore writes them. To start "
        f"again: {command}"
    )


def advice(backup: str | None) -> str:
    """The end of an error that ends training; `backup` is the last checkpoint."""
    return how_to_go_on(command(), backup)


def shards_lost(names: Sequence[str], backup: str | None) -> RuntimeError:
    """The error that the loss of a part of the model is."""
    others = "" if os.environ.get(COMMAND) else "Tasks that have ended must be started again. "
    error = RuntimeError(
        f"Lost {', '.join(names)}, and the part of the model it held. {others}{advice(backup)}"
    )
    error.add_note(ENDS_TRAINING)
    return error


def copies_lost(updates: int, backup: str | None) -> RuntimeError:
    """The error that the loss of all workers is where they alone have the last updates."""
    what = "1 update" if updates == 1 else f"{updates} updates"
    error = RuntimeError(
        f"All workers were lost, and with them {what} that no other copy of the model has. "
        f"{advice(backup)}"
    )
    error.add_note(ENDS_TRAINING)
    return error


def command() -> str:
    """What starts this training again: the launcher's command line, or this process's."""
    launched = os.environ.get(COMMAND)
    if launched:
        return launched
    if hasattr(sys, "ps1") or "ipykernel" in sys.modules:
        return "run this session's cells again, in a new process"
    return shlex.join(sys.orig_argv)


_noted: list[str] = []


def last_noted() -> str | None:
    """The last checkpoint that this process wrote, and has not deleted."""
    return _noted[0] if _noted else None


def note(backup: str | None) -> None:
    """Keeps the last checkpoint, and tells the launcher, if any: that survives this process."""
    _noted[:] = [backup] if backup else []
    passed = os.environ.get(BACKUP_FD, "")
    if not passed.isdecimal():
        return
    with contextlib.suppress(OSError):  # a process of the script's own has not inherited the file
        os.ftruncate(int(passed), 0)
        os.pwrite(int(passed), os.fsencode(backup or ""), 0)


def ended() -> set[str]:
    """The addresses of tasks that have ended, and that the launcher, if any, starts no more."""
    passed = os.environ.get(ENDED_FD, "")
    if passed.isdecimal():
        with contextlib.suppress(OSError):
            return set(os.pread(int(passed), 1 << 20, 0).decode(errors="replace").split())
    return set()
