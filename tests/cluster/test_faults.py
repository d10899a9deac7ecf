"""Workers that are killed and stopped, on real processes, under every rule.

The same faults at every phase of a round, under every configuration, are in
`tests/engine/test_faults.py`, on the simulator.
"""

import json
import os

import pytest

from tests.cluster import processes
from tests.cluster.observing import MODULE, SCRIPTS, exit_of, log, report
from tests.conformance import registry

pytestmark = pytest.mark.slow

# One of each exchange, local and server rule; a launcher for each group. Those of OFTEN are one of
# each exchange and of each way to count messages on a shard; the others differ from them in
# arithmetic that the simulator's faults go through, and run where TF_DSGD_LONG is set.
OFTEN = {"downpour_3_5", "downpour_bounded", "softsync", "downpour_adaptive_revision"}
OFTEN |= {"averaging", "averaging_each_step", "elastic"}
GROUPS = {
    "downpour": [
        "downpour",
        "downpour_3_5",
        "downpour_update",
        "downpour_bounded",
        "downpour_threshold",
    ],
    "server": [
        "softsync",
        "softsync_bounded",
        "downpour_adaptive_revision",
        "downpour_delay_compensated",
        "downpour_fasgd",
    ],
    "averages": [
        "averaging",
        "averaging_each_step",
        "averaging_block_momentum",
        "averaging_diloco",
        "elastic",
    ],
}
if not os.environ.get("TF_DSGD_LONG"):
    GROUPS = {group: [name for name in names if name in OFTEN] for group, names in GROUPS.items()}
SCRIPT = str(SCRIPTS / "faulty.py")
SECONDS = 150.0  # of one configuration; a quiet machine takes 15


def chief(asked, workers):
    options = ("--workers", str(workers), "--ps", "2", "--restart_workers", "99")
    return processes.started(*MODULE, *options, SCRIPT, json.dumps(asked))


@pytest.mark.beside_others
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.timeout(900)
def test_all_workers_but_one_are_killed_or_stopped(group):
    """Each example is used once an epoch: the script asserts it, on every shard."""
    with chief(GROUPS[group], workers=4) as process:
        for configuration in GROUPS[group]:
            got = report(process, "RESULT", processes.START_SECONDS + SECONDS)
            assert got["configuration"] == configuration
            assert got["struck"] == [[0, False], [1, False], [2, True]], log(process)
            assert min(got["incarnations"][:3]) > 0, log(process)  # each was lost, and came back
            assert sum(got["steps"]) == got["expected"]
        # TensorFlow's calls to processes that were killed take seconds each to be given up.
        assert exit_of(process, 90.0)[0] == 0, log(process)
    assert "has not answered for 5 s and counts as lost" in process.text


@pytest.mark.beside_others
def test_every_strategy_is_among_them():
    names = [name for group in GROUPS.values() for name in group]
    made = {type(registry.make(name, "local")).__name__ for name in names}
    assert made == registry.STRATEGIES - set(registry.WITHOUT_PS)


@pytest.mark.parametrize("configuration", ["downpour", "downpour_3_5"])
def test_a_stopped_worker_holds_nobody(configuration):
    """Not for its timeout of 60 s nor until it goes on after 12 s, and another is killed.

    That one may be back so soon that it joins meanwhile: then TensorFlow has to be told of a
    cluster without the stopped one, which is lost by that.
    """
    with chief(configuration, workers=3) as process:
        got = report(process, "RESULT", processes.START_SECONDS + SECONDS)
        assert exit_of(process, 90.0)[0] == 0, log(process)
    assert got["struck"] == [[0, False], [1, True]], log(process)
    assert got["lost"] in ([1, 0, 0], [1, 1, 0]), log(process)
    assert got["longest"] < 9.0, log(process)  # 5 to 6 were seen: it is asked for 5
    assert got["batches"] > 50  # with what both have under way it would be a dozen


@pytest.mark.beside_others
def test_a_worker_lost_as_it_draws_what_it_took():
    """Others draw it. That each example was used once an epoch is asserted by the script."""
    options = ("--workers", "2", "--ps", "2", "--restart_workers", "9")
    script = str(SCRIPTS / "lost_as_it_draws.py")
    with processes.started(*MODULE, *options, script) as process:
        steps = report(process, "RESULT", processes.START_SECONDS + SECONDS)
        assert exit_of(process, 90.0)[0] == 0, log(process)
    assert sum(steps) == 1200 and min(steps) > 0
