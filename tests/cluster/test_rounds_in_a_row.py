"""Workers that are killed in calls of several rounds: each mini-batch counts once."""

from tests.cluster import processes
from tests.cluster.observing import MODULE, SCRIPTS, exit_of, log, measures_no_seconds, report


@measures_no_seconds
def test_of_workers_killed_in_calls_of_several_rounds_nothing_is_lost():
    options = ("--workers", "2", "--ps", "2", "--restart_workers", "4")
    with processes.started(*MODULE, *options, str(SCRIPTS / "rounds_in_a_row.py")) as process:
        got = report(process, "RESULT", 240.0)
        assert exit_of(process, 90.0)[0] == 0, log(process)
    assert got["killed"] == [4, 4] and log(process).count("lost worker") == 2
    assert got["several"] > 100
    assert got["weights"] == [-3000.0] * 3
    assert (got["steps"], got["applied"], got["in_flight"]) == (3000, 3000, 0)
