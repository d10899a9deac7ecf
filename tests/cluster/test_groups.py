"""Workers that are two tasks each, one of whose tasks is killed or stopped."""

import json
import re

import pytest

from tests.cluster import processes
from tests.cluster.observing import MODULE, SCRIPTS, exit_of, log, report

pytestmark = pytest.mark.slow

SCRIPT = str(SCRIPTS / "grouped.py")
SECONDS = 150.0  # a quiet machine takes 20
OPTIONS = (*MODULE, "--workers", "4", "--tasks_per_worker", "2", "--ps", "2")


STRUCK = [[3, False], [0, False], [1, True]]
"""(task, whether it is stopped): the second of one worker, the first of the other, its second."""


@pytest.mark.beside_others
def test_a_worker_is_lost_with_one_of_its_tasks_and_joins_when_it_is_whole():
    """Each example is used once an epoch: the script asserts it, on every shard."""
    arguments = ("--restart_workers", "9", SCRIPT, json.dumps(STRUCK))
    with processes.started(*OPTIONS, *arguments) as process:
        got = report(process, "RESULT", processes.START_SECONDS + SECONDS)
        assert exit_of(process, 90.0)[0] == 0, log(process)
    assert got["struck"] == sorted(STRUCK), log(process)
    assert got["incarnations"][0] >= 2 and got["incarnations"][1] >= 1, log(process)
    for first in (0, 2):
        both = rf"worker {first} at \S+ and worker {first + 1} at \S+"
        assert re.search(f"lost {both}; ", process.text), log(process)
        assert re.search(f"{both} joined", process.text), log(process)
    assert re.search(r"worker 1 at \S+ has not answered for 5 s and counts as lost", process.text)
    assert sum(got["steps"]) == got["expected"]
    assert min(got["steps"]) > 0
