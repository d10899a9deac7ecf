"""Workers that are bound to the slowest one, when that one stands still, is lost and comes back."""

import json
import os
import signal

import pytest

from tests.cluster import processes
from tests.cluster.observing import (
    BATCH,
    MODULE,
    SCRIPTS,
    SEED,
    exit_of,
    log,
    report,
    roles,
    said,
)

pytestmark = pytest.mark.slow
BOUND = 2


def steps(process):
    """(the steps of each worker, the chief's processor seconds), as it says next."""
    line = process.line_with("STEPS ", 20.0).removeprefix("STEPS ")
    numbers, seconds = line.rsplit(" ", 1)
    return json.loads(numbers), float(seconds)


def until(process, condition, lines=200):
    """Reads steps until they meet the condition."""
    for _ in range(lines):
        now, _ = steps(process)
        if condition(now):
            return now
    raise AssertionError(log(process))


def all_more(now, before, number):
    return all(a >= b + number for a, b in zip(now, before, strict=True))


@pytest.mark.timeout(300)
def test_a_worker_that_stands_still_is_waited_for_until_it_is_lost():
    """A clock is a worker's number of messages, here of mini-batches: all in one epoch."""
    options = json.dumps({"max_staleness": BOUND, "seed": SEED})
    script = str(SCRIPTS / "bounded.py")
    launch = (*MODULE, "--workers", "3", "--ps", "1", "--restart_workers", "9")
    with processes.started(*launch, script, options) as process:
        pid = roles(process, 4)["worker 2"][1]
        until(process, lambda now: min(now) > 0)
        for _ in range(10):
            now, _ = steps(process)
            assert max(now) - min(now) <= BOUND + 1

        os.kill(pid, signal.SIGSTOP)
        steps(process)  # what was read before the signal
        last, _ = steps(process)
        while (now := steps(process)[0]) != last:
            last = now
        _, before = steps(process)
        for _ in range(10):  # a second, in which the others wait for worker 2
            now, seconds = steps(process)
            assert now == last and max(now) - min(now) <= BOUND + 1
        assert seconds - before < 0.5, "the chief's threads spin"

        processes.kill(pid)
        until(process, lambda now: all_more(now[:2], last[:2], 100))
        assert said(process, "tf_dsgd: lost worker 2", 1.0)

        said(process, "tf_dsgd: worker 2 at")  # joined
        again, _ = steps(process)
        until(process, lambda now: all_more(now, again, 100))
        process.popen.stdin.write("\n")
        process.popen.stdin.flush()
        total, sent, applied, refused = report(process, "STOPPED")
        assert (total, sent) == (applied, applied + refused)

        got = report(process, "COLLECTED", 240.0)
        assert exit_of(process, 30.0)[0] == 0, log(process)
    assert_each_message_is_in_one_collection(got)


def assert_each_message_is_in_one_collection(got):
    """Also of those of a worker that was killed while the shard collected."""
    assert [len(who) for _, _, who in got["killed"]] == [1]
    assert got["came_back"]
    handed_out = 400 * got["epochs"]
    assert got["steps"] == got["applied"] == handed_out
    assert got["updates"] == got["every"] == handed_out // 4
    for tally in got["times"].values():
        assert tally == [[got["epochs"], BATCH * 400]]
