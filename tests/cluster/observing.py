"""Clusters that tests start, and what they say."""

import contextlib
import json
import os
import re
import subprocess
import time
from pathlib import Path

import pytest

from tests.cluster import processes

SCRIPTS = Path(__file__).parent / "scripts"
TRAIN = str(SCRIPTS / "train.py")
CONNECT = str(SCRIPTS / "connect.py")
MODULE = ("-m", "tf_dsgd.launch")
ROLE = re.compile(r"tf_dsgd \S+: ((?:worker|ps) \d) of \d at (127\.0\.0\.1:\d+) \(pid (\d+)\)")
BATCH = 4  # of the scripts
SEED = int(os.environ.get("TF_DSGD_KILL_SEED", "0"))  # another one kills at other moments

# What TensorFlow itself writes as it is imported, before the package can say anything.
NOISE = re.compile(r"WARNING: All log messages before|[IWE]\d{4} |^To enable the following")

# What the script made_before.py finds where everything is as it should be.
MADE_BEFORE = {
    "learns": True,
    "steps": 210,
    "variable": 3.0,
    "function": 9.0,
    "constant": 9.0,
    "table": [5.0, -1.0],
    "mutable": [7, -1],
    "words": [[3, 2], [2, 0]],
    "layer": [[3, 1]],
    "dataset": [0.0, 3.0, 6.0],
    "model": True,
    "weights": "/job:localhost/replica:0/task:0/device:CPU:0",
    "assigned": [5.0, [5.0, 6.0]],
    "refused": "This strategy was made before another one connected this process ",
    "freed": True,
    "restored": [5.0, 6.0],
}


def measures_no_seconds(test):
    """A decorator: the test may run beside others, which is what `slow` ones do."""
    return pytest.mark.slow(pytest.mark.beside_others(test))


def launched(*options, script=TRAIN, **arguments):
    return processes.started(*MODULE, *options, script, json.dumps(arguments))


def log(process):
    return "\n".join(line for line in process.lines if not NOISE.search(line))


def rest(process):
    """Everything that it said until now."""
    with contextlib.suppress(AssertionError):
        process.line_with("\0", 0.2)  # reads all lines
    return log(process)


def said(process, text, seconds=processes.START_SECONDS):
    """The line with `text`, which may have been read already."""
    for line in process.lines:
        if text in line:
            return line
    return process.line_with(text, seconds)


def roles(process, count):
    """Task -> (address, pid), as each first said."""
    deadline = time.monotonic() + processes.START_SECONDS
    while len(found := dict(_roles(process.lines))) < count:
        process.line_with("(pid", max(0.0, deadline - time.monotonic()))
    return found


def _roles(lines):
    for line in lines:
        if match := ROLE.search(line):
            name, address, pid = match.groups()
            yield name, (address, int(pid))


def report(process, name, seconds=processes.START_SECONDS):
    """What the script says next under that name."""
    deadline = time.monotonic() + seconds
    while True:
        line = process.line_with(name + " ", max(0.0, deadline - time.monotonic()))
        if line.startswith(name + " "):  # and no line of a traceback
            return json.loads(line.removeprefix(name))


def steps_where(process, condition, seconds):
    """Reads the steps of each worker, as the script says them, until they meet the condition."""
    deadline = time.monotonic() + seconds
    while True:
        steps = report(process, "STEPS", max(0.0, deadline - time.monotonic()))
        if condition(steps):
            return steps


def stop(process):
    """Has the script end at the end of its epoch; what it printed as DONE."""
    process.popen.stdin.write("stop\n")
    process.popen.stdin.flush()
    return report(process, "DONE")


def exit_of(process, seconds):
    """The exit code and the seconds it took; fails with what is left and what it said."""
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        here = [" ".join(each.cmdline()[1:4]) for each in process.descendants()]
        text = rest(process)
        raise AssertionError(f"still there after {seconds} s, with {here}: {text}") from None


def ended(process, seconds):
    """As `exit_of`; fails also if a process of the family is left."""
    family = process.descendants()
    assert family, "the test looked too late"
    result = exit_of(process, seconds)
    assert not processes.gone(family, 5.0), log(process)
    return result
