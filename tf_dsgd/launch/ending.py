"""How processes end: by which signals, and in words."""

from __future__ import annotations

import signal
from pathlib import Path


def catches(pid: int, number: int) -> bool:
    """Whether a process handles a signal, as Linux says; elsewhere, as in gVisor, no."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return False
    caught = [int(line.split()[1], 16) for line in lines if line.startswith("SigCgt:")]
    return bool(caught and caught[0] >> (number - 1) & 1)


def ending(code: int) -> str:
    """How a process ended, from its code."""
    if code >= 0:
        return f"exited with code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"
