"""StalenessMonitor while a worker is killed and comes back: training goes on, all is counted."""

import os
import signal

import numpy as np
import pytest

from tests.cluster import observing as lost
from tf_dsgd import report


@pytest.mark.slow
@pytest.mark.beside_others
def test_a_worker_that_is_killed_and_comes_back(tmp_path):
    options = ("--workers", "2", "--ps", "1", "--restart_workers", "1")
    arguments = {"steps": 400, "epochs": 10_000, "monitor": str(tmp_path)}
    with lost.launched(*options, **arguments) as process:
        _, pid = lost.roles(process, 3)["worker 1"]
        lost.steps_where(process, lambda steps: min(steps) > 50, 60.0)
        os.kill(pid, signal.SIGKILL)
        lost.said(process, "lost worker 1")
        process.line_with("joined")
        back = lost.report(process, "STEPS")
        lost.steps_where(process, lambda steps: steps[1] > back[1] + 50, 60.0)
        done = lost.stop(process)
        assert lost.ended(process, 30.0)[0] == 0
    run = report.read(tmp_path)
    assert run.ended
    assert run.samples[-1]["steps"] == done["steps"]
    assert sum(sum(sample["workers"]["steps"]) for sample in run.samples) == done["steps"]
    after = [s for s in run.samples if s["steps"] > sum(back)]
    for kind in report.KINDS:
        spent = np.array([s["workers"][f"{kind}_seconds"] for s in run.samples])
        assert (spent.sum(0) > 0).all(), kind
    assert sum(s["workers"]["compute_seconds"][1] for s in after) > 0
