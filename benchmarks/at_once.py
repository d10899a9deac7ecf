"""Processes that begin what is measured at one moment, and know nothing of one another."""

import json
import subprocess
import sys
import threading
from collections.abc import Sequence

import processor_time

WAIT_SECONDS = 300.0
"""For other processes, until they are ready or done."""


def run(command: Sequence[str], number: int, seconds: float = 0.0) -> dict:
    """Starts a command so often; gives what all together did.

    Each calls `begin`, and ends with a line of JSON.

    Args:
        command: of each.
        number: how many.
        seconds: that each takes, once it was told to begin, on top of WAIT_SECONDS.
    """
    members = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(number)
    ]
    timer = threading.Timer(WAIT_SECONDS + seconds, lambda: [m.kill() for m in members])
    timer.start()
    try:
        for member in members:
            if member.stdout is None or member.stdout.readline() != "ready\n":
                raise SystemExit(f"{command}: a process ended before it was ready")
        for member in members:
            if member.stdin is not None:
                member.stdin.write("go\n")
                member.stdin.flush()
        results = [json.loads(member.communicate()[0]) for member in members]
    finally:
        timer.cancel()
        for member in members:
            member.kill()
            member.wait(WAIT_SECONDS)
    return {
        "steps": sum(result["steps"] for result in results),
        "seconds": max(result["seconds"] for result in results),
        "steps_per_second": sum(result["steps_per_second"] for result in results),
        "cpu_seconds": {
            processor_time.WORKERS: sum(sum(r["cpu_seconds"].values()) for r in results)
        },
    }


def begin() -> None:
    """In one of the processes: it is ready, and goes on when all are."""
    print("ready", flush=True)
    if sys.stdin.readline() != "go\n":
        raise SystemExit("The process that started this one is gone.")
