"""What a launcher's processes read and write: its own streams, or pipes to it."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TextIO


def pipes(prefix: bytes, is_script: bool) -> tuple[int | None, int | None]:
    """What `subprocess.Popen` makes of a process's output and its errors; None: it has ours.

    The first script has a terminal itself. What is no terminal is written here alone, so that
    lines of several processes do not mix.
    """
    if not is_script:
        return subprocess.PIPE, subprocess.STDOUT
    if prefix:
        return subprocess.PIPE, subprocess.PIPE
    out, error = (None if is_terminal(s) else subprocess.PIPE for s in (sys.stdout, sys.stderr))
    if out is not None and error is not None and same_file(sys.stdout, sys.stderr):
        error = subprocess.STDOUT  # in the order in which it comes
    return out, error


def is_terminal(stream: TextIO | None) -> bool:
    """Or nothing at all."""
    return stream is None or stream.closed or stream.isatty()


def same_file(one: TextIO, other: TextIO) -> bool:
    """Whether both lead to one file, terminal or pipe."""
    try:
        return os.path.sameopenfile(one.fileno(), other.fileno())
    except (OSError, ValueError, AttributeError):
        return False


def terminal_input() -> bool:
    """A process in the background that reads from the terminal would be stopped."""
    return sys.stdin is None or sys.stdin.closed or sys.stdin.isatty()
