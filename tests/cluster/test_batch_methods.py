"""L-BFGS on processes: the iterates of a NumPy twin, although workers are killed and stopped."""

import os
import re
import signal

import numpy as np

from tests.algorithms import batch_twin
from tests.cluster import processes
from tests.cluster.observing import (
    MODULE,
    SCRIPTS,
    exit_of,
    log,
    measures_no_seconds,
    report,
    roles,
    said,
)
from tests.cluster.scripts import batch_method
from tf_dsgd.algorithms.batch_methods import Settings


def _twin():
    x, y = batch_method.data()
    x = np.hstack([x, np.ones((len(x), 1))]).astype(np.float64)

    def function(w):
        error = x @ w[:, None] - y
        return np.mean(error**2), 2 * (x.T @ error)[:, 0] / len(x)

    found, _ = batch_twin.run(
        function, np.zeros(batch_method.FEATURES + 1), Settings(), batch_method.EPOCHS
    )
    return [function(w)[0] for w in found], found[-1]


@measures_no_seconds
def test_a_worker_killed_and_one_stopped_within_a_pass_change_no_iterate():
    """Each portion counts once: a sum that was not sent goes to others, and a late one is refused.

    Both are struck while they hold the sum of some portions and compute others. A backup task does
    what the stopped one has, before that one counts as lost.
    """
    options = (*MODULE, "--workers", "3", "--ps", "2")
    with processes.started(*options, str(SCRIPTS / "batch_method.py")) as process:
        pids = {name: pid for name, (_, pid) in roles(process, 5).items()}
        for epoch, worker, number in ((1, 1, signal.SIGKILL), (3, 2, signal.SIGSTOP)):
            line = said(process, f"AT {epoch} ")
            os.kill(pids[f"worker {worker}"], number)
            assert int(line.split()[-1]) >= batch_method.HELD, log(process)
        got = report(process, "RESULT", 120.0)
        os.kill(pids["worker 2"], signal.SIGCONT)
        assert exit_of(process, 60.0)[0] == 0, log(process)
    lost = re.search(r"lost worker 1 at .*?(\d+) unfinished mini-batches go", log(process))
    assert lost and int(lost[1]) >= batch_method.HELD, log(process)
    # Of what the one that was stopped held another's message counts, whether it was lost or not.
    late = re.search(r"lost worker 2 at .*?(\d+) unfinished mini-batches go", log(process))
    assert got["by_a_backup_task"] if late is None else late[1] == "0", log(process)
    losses, weights = _twin()
    np.testing.assert_allclose(got["losses"], losses, rtol=1e-5)
    np.testing.assert_allclose(got["weights"], weights, rtol=1e-3, atol=1e-5)
    assert got["in_flight"] == 0
    assert got["evaluations"] == int(got["evaluations"]) and len(set(got["steps"])) == 1
