"""A cluster whose tasks are on hosts of their own, which meet by their addresses alone."""

import contextlib
import json
import sys
import time

import pytest

from benchmarks import hosts
from tests.cluster import processes
from tests.cluster.observing import (
    MADE_BEFORE,
    SCRIPTS,
    exit_of,
    log,
    measures_no_seconds,
    report,
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="network namespaces are Linux's"),
]


@contextlib.contextmanager
def cluster(script, ps=True, named=True, timeout=10):
    """A chief that runs this, a ps if so and two workers: hosts, the chief and the far worker.

    Unless it is `named`, nobody's configuration has the chief's address.
    """
    with contextlib.ExitStack() as stack:
        try:
            on = stack.enter_context(hosts.made(3))
        except PermissionError as error:
            pytest.skip(str(error))
        chief, near, far = on
        addresses = {
            "chief": [f"{chief.address}:5000"],
            "worker": [f"{near.address}:5001", f"{far.address}:5001"],
        }
        if ps:
            addresses["ps"] = [f"{near.address}:5000"]
        if not named:
            del addresses["chief"]

        def start(job, index, host, *program):
            task = {"TF_CONFIG": processes.tf_config(job, index, **addresses)}
            if job not in addresses:
                task = {"JOBS": json.dumps(addresses)}
            task["TIMEOUT"] = str(timeout)
            return stack.enter_context(processes.started(*program, host=host, **task))

        serve = ("-m", "tf_dsgd.serve")
        if ps:
            start("ps", 0, near, *serve)
        start("worker", 0, near, *serve)
        worker = start("worker", 1, far, *serve)
        yield on, start("chief", 0, chief, str(script)), worker


def found_at_the_end(chief):
    """What vanishing.py reports as it is told to end."""
    chief.popen.stdin.write("end\n")
    chief.popen.stdin.flush()
    found = report(chief, "RESULT")
    assert exit_of(chief, 60.0)[0] == 0, log(chief)
    return found


@measures_no_seconds
def test_what_was_made_before_the_strategy_stays_usable_and_others_reach_the_chief():
    with cluster(SCRIPTS / "made_before.py") as (_, chief, _):
        found = report(chief, "RESULT")
        assert exit_of(chief, 60.0)[0] == 0, log(chief)
    assert found == MADE_BEFORE, log(chief)


@measures_no_seconds
def test_a_host_that_vanishes_is_lost_and_joins_again_and_each_example_counts_once_an_epoch():
    with cluster(SCRIPTS / "vanishing.py") as (on, chief, _):
        chief.line_with("EPOCH 3")
        on[2].cut_off()
        chief.line_with("lost worker 1")
        on[2].joined_again()
        chief.line_with("joined")
        found = found_at_the_end(chief)
    assert found["counts"] == [found["epochs"]], log(chief)


@measures_no_seconds
def test_a_chief_whose_address_nobody_was_given_is_found():
    """TensorFlow would be told of it as "localhost", which is every host's own."""
    with cluster(SCRIPTS / "vanishing.py", named=False) as (_, chief, _):
        chief.line_with("EPOCH 3")
        found = found_at_the_end(chief)
    assert found["counts"] == [found["epochs"]], log(chief)


@measures_no_seconds
def test_a_host_that_vanishes_after_its_worker_has_ended_holds_nobody_up():
    """Until it counts as silent each question to it takes its time, in which nobody waits."""
    with cluster(SCRIPTS / "vanishing.py", timeout=120) as (on, chief, worker):
        chief.line_with("EPOCH 3")
        worker.popen.terminate()
        chief.line_with("lost worker 1")
        on[2].cut_off()
        epoch = int(chief.line_with("EPOCH").split()[1])
        # 16 mini-batches each, and not one in a second.
        chief.line_with(f"EPOCH {epoch + 60}", 40.0)
        found = found_at_the_end(chief)
    assert found["counts"] == [found["epochs"]], log(chief)


@measures_no_seconds
@pytest.mark.parametrize("ps", [True, False])
def test_an_outage_shorter_than_the_timeout_is_no_loss(ps):
    with cluster(SCRIPTS / "vanishing.py", ps) as (on, chief, _):
        chief.line_with("EPOCH 3")
        on[1].cut_off()  # a worker, and the ps if there is one: in any case weights
        time.sleep(3.0)  # of the 10 s after which they count as lost
        on[1].joined_again()
        epoch = int(chief.line_with("EPOCH").split()[1])
        chief.line_with(f"EPOCH {epoch + 10}")
        found = found_at_the_end(chief)
    assert found["counts"] == [found["epochs"] / (1 if ps else 2)], log(chief)
    assert "lost" not in log(chief).lower(), log(chief)


@measures_no_seconds
def test_the_others_go_on_without_a_host_that_vanished_and_nobody_waits_for_a_ps_that_did():
    with cluster(SCRIPTS / "vanishing.py") as (on, chief, _):
        chief.line_with("EPOCH 3")
        on[2].cut_off()
        chief.line_with("lost worker 1")
        epoch = int(chief.line_with("EPOCH").split()[1])
        chief.line_with(f"EPOCH {epoch + 50}")
        on[1].cut_off()
        chief.line_with("Lost ps 0", 60.0)
        code, _ = chief.wait(30.0)
    assert code == 1
    assert "worker 0" not in log(chief), log(chief)
