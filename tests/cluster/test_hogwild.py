"""Hogwild! while workers are killed: each mini-batch counts once."""

from tests.cluster import processes
from tests.cluster.observing import MODULE, SCRIPTS, exit_of, log, report


def test_what_killed_workers_had_sent_counts_once():
    options = ("--workers", "3", "--ps", "2", "--restart_workers", "99")
    with processes.started(*MODULE, *options, str(SCRIPTS / "hogwild.py")) as process:
        got = report(process, "RESULT", 240.0)
        assert exit_of(process, 90.0)[0] == 0, log(process)
    assert got["struck"] >= 2, got
    assert got["least"] == got["most"] == 4.0, got  # once an epoch
    assert got["steps"] == [1600, 1600]
    assert got["in_flight"] == [0, 0] and got["sent"] == got["counted"], got
