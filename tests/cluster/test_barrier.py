"""Workers that wait for each other, while some of them are killed."""

import json
import os
import signal
import time

import pytest

from tests.cluster import processes
from tests.cluster.observing import (
    MODULE,
    SCRIPTS,
    SEED,
    exit_of,
    log,
    measures_no_seconds,
    report,
    roles,
    said,
)

STEPS, EVERY, WORKERS = 300, 3, 3


@measures_no_seconds
@pytest.mark.parametrize("run", range(int(os.environ.get("TF_DSGD_REPEAT", "1"))))
def test_nobody_waits_for_a_worker_that_was_killed(run):
    options = (*MODULE, "--workers", str(WORKERS), "--ps", "2", "--restart_workers", "9")
    with processes.started(*options, str(SCRIPTS / "barrier.py"), str(SEED + run)) as process:
        got = report(process, "RESULT", 240.0)
        assert exit_of(process, 90.0)[0] == 0, log(process)
    assert [len(who) for _, _, who in got["killed"]] == [1, 2], json.dumps(got)
    assert got["came_back"]
    total = STEPS * got["epochs"]
    assert got["steps"] == [total, total]
    assert got["in_flight"] == [0, 0] and got["cut_off"] == 0
    # A round is at most 9 mini-batches of three workers, and its mean moves by 1 to 3.
    assert total / (EVERY * WORKERS) <= got["averages"] <= total / 2
    assert got["iterations"] == total // WORKERS
    for weight in got["weights"]:
        assert total / WORKERS * 0.8 <= -weight <= total


@measures_no_seconds
@pytest.mark.parametrize("run", range(int(os.environ.get("TF_DSGD_REPEAT", "1"))))
@pytest.mark.parametrize("strategy", [("averaging",), ("bounded",), ("bounded", "reading")])
def test_what_a_stopped_worker_is_late_with_is_done_by_another(strategy, run):
    """Nobody waits until it counts as lost, and what it sends when it goes on is refused.

    As it is read it has nothing that another could do, and holds nobody up under a bound for longer
    than a late one.
    """
    options = (*MODULE, "--workers", "3", "--ps", "2")
    with processes.started(*options, str(SCRIPTS / "straggler.py"), *strategy) as process:
        seconds, reasons = report(process, "DONE", 180.0)
        assert exit_of(process, 60.0)[0] == 0, log(process)
    assert seconds < 60.0
    repeated = reasons["repeated"]
    assert repeated == 0 if "reading" in strategy else repeated >= 1
    assert reasons["replaced"] == reasons["failed"] == 0
    assert "lost" not in log(process)


@measures_no_seconds
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_without_ps_tasks_a_lost_worker_is_an_error_that_names_it(number):
    """Others wait for what a stopped one holds, without end."""
    options = (*MODULE, "--workers", "3", "--ps", "0")
    with processes.started(*options, str(SCRIPTS / "no_ps.py")) as process:
        address, pid = roles(process, 3)["worker 1"]
        said(process, "TRAINING")
        start = time.monotonic()
        os.kill(pid, number)
        code, _ = exit_of(process, 60.0)
        assert time.monotonic() - start < 45.0  # the error, and TensorFlow's own ending
    assert code == 1, log(process)
    (error,) = [line for line in process.lines if line.startswith("tf_dsgd: Lost")]
    assert f"worker 1 at {address}" in error and "BackupAndRestore" in error


def test_nobody_waits_as_a_late_worker_counts_as_lost():
    """Workers' threads, which end with an epoch, once waited 20 s for its variables to be freed."""
    options = ("--workers", "3", "--ps", "1")
    with processes.started(*MODULE, *options, str(SCRIPTS / "straggler_then_lost.py")) as process:
        longest, lost, steps, expected = report(process, "RESULT", 200.0)
        assert exit_of(process, 90.0)[0] == 0, log(process)
    assert lost and steps == expected
    assert longest < 12.0, log(process)  # of which 3 are the patience
