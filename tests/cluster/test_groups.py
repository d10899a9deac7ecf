"""Workers that are two tasks each, one of whose tasks is killed or stopped."""

import json
import re

import psutil
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


TASKS, LAYERS, WIDTH = 8, 16, 3584
GIVES_BACK = {
    "MALLOC_ARENA_MAX": "2",
    "MALLOC_MMAP_THRESHOLD_": "131072",
    "MALLOC_TRIM_THRESHOLD_": "131072",
}


def test_a_task_trains_in_less_memory_than_a_copy_of_the_model_has():
    """About five times its part at the peak: of eight, no task has as much as one whole copy.

    With memory given back as it is freed; what else malloc keeps differs from run to run.
    """
    copy = 4 * LAYERS * WIDTH**2
    if psutil.virtual_memory().available < 15 * copy:
        pytest.skip(f"all tasks together need {15 * copy / 1e9:.0f} GB of memory")
    sizes = ("--workers", str(TASKS), "--tasks_per_worker", str(TASKS), "--ps", "2")
    script = (str(SCRIPTS / "parts_beyond_memory.py"), *map(str, (TASKS, LAYERS, WIDTH)))
    with processes.started(*MODULE, *sizes, *script, **GIVES_BACK) as process:
        held, most, before, after, steps = report(process, "RESULT", 240.0)
        assert exit_of(process, 60.0)[0] == 0, log(process)
    assert held >= copy
    assert 2 * copy / TASKS < most < copy, log(process)  # its own part, and what comes of it
    assert steps == 6 and after < 0.9 * before, log(process)
