"""Processes that are ended while they write checkpoints.

Usage: writers.py FOLDER kill SEED TIMES | writers.py FOLDER exit. A child writes checkpoints in a
loop; it is killed at random moments, or ends at its n-th operation on a file, for every n. After
each end the folder is read. Prints one line of JSON.
"""

import contextlib
import json
import os
import signal
import sys
import time
from pathlib import Path

import numpy as np

from tf_dsgd.callbacks.checkpoint_files import Checkpoints, read_arrays, write_arrays

FILE_OPERATIONS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.scandir"}
NUMBERS = 50_000


def write(checkpoints, value):
    """One whose files all hold the same number."""

    def fill(folder):
        write_arrays(folder / "a.npz", {"value": np.full(NUMBERS, value)})
        (folder / "b.json").write_text(json.dumps([value] * 1000))

    checkpoints.write({"value": value}, fill)


def value_of(folder, keep):
    """What the newest checkpoint holds, everywhere; None if there is none."""
    checkpoint = Checkpoints(folder, keep).newest()
    if checkpoint is None:
        return None
    values = {
        checkpoint.origin["value"],
        *read_arrays(checkpoint.path / "a.npz")["value"].tolist(),
        *json.loads((checkpoint.path / "b.json").read_text()),
    }
    (value,) = values
    return value


def child(run):
    """A child process; `run` does not return."""
    pid = os.fork()
    if not pid:
        try:
            run()
        finally:
            os._exit(1)
    return pid


def killed(folder, seed, times):
    """Kills a writer at random moments; gives the values found after each."""
    random = np.random.default_rng(seed)
    found, partial = [], 0
    for _ in range(times):
        start = value_of(folder, 2) or 0

        def run(start=start):
            checkpoints = Checkpoints(folder, 2)
            checkpoints.newest()
            for value in range(start + 1, 1 << 30):
                write(checkpoints, value)

        pid = child(run)
        while value_of_name(folder) <= start:  # until it is in its loop
            time.sleep(0.001)
        time.sleep(random.uniform(0.0, 0.1))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        partial += any(path.name.startswith(".") for path in folder.iterdir())
        found.append(value_of(folder, 2))
    return {"found": found, "partial": partial, "left": names(folder)}


def value_of_name(folder):
    """The newest checkpoint's number, which is its value; looks at names alone."""
    with contextlib.suppress(OSError):
        return max((int(n[-8:]) for n in os.listdir(folder) if n[0] == "c"), default=0)
    return 0


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def ended_everywhere(folder):
    """Ends a writer of the third checkpoint before each of its operations on files in turn."""
    found = []
    for place in range(1, 1000):
        here = folder / str(place)
        for value in (1, 2):
            write(Checkpoints(here, 1), value)

        def run(here=here, place=place):
            count = 0

            def end_at_place(event, _):
                nonlocal count
                if event in FILE_OPERATIONS:
                    count += 1
                    if count == place:
                        os._exit(7)

            sys.addaudithook(end_at_place)
            write(Checkpoints(here, 1), 3)
            os._exit(0)

        status = os.waitstatus_to_exitcode(os.waitpid(child(run), 0)[1])
        if status not in (0, 7):
            raise RuntimeError(f"The writer ended with {status}.")
        value = value_of(here, 1)
        write(Checkpoints(here, 1), value + 1)  # the next one is not in its way
        found.append([value, value_of(here, 1), names(here)])
        if status == 0:
            return found
    raise RuntimeError("The writer does not end.")


if __name__ == "__main__":
    where, mode, *numbers = sys.argv[1:]
    if mode == "kill":
        result = killed(Path(where), *map(int, numbers))
    else:
        result = ended_everywhere(Path(where))
    print(json.dumps(result))
