"""Workers' calls that fail at any moment, many in a minute: nothing is lost or done twice."""

import json
import time

import pytest

from tests.cluster import processes
from tests.cluster.observing import MODULE, SCRIPTS, SEED, exit_of, log, report

pytestmark = [pytest.mark.slow, pytest.mark.beside_others]
SECONDS = 240.0  # a quiet machine takes 15
LATE = {"faults": [0, 0, 0], "slow": [0.4, 0.1], "until": {"refused": 20}}
LOST = {"until": {"lost": 10, "before": 1, "after": 1, "later": 1}}


def downpour(push_every, fetch_every, **arguments):
    return {"arguments": {"push_every": push_every, "fetch_every": fetch_every, **arguments}}


@pytest.mark.timeout(SECONDS + 90)
@pytest.mark.parametrize(
    "options",
    [
        pytest.param(downpour(1, 1, max_staleness=1) | LATE, id="late"),
        # Four are sent together, of which two are computed before a drain begins, in which another
        # computes them, too.
        pytest.param(downpour(4, 2) | LATE | {"batches": 7}, id="late at drains"),
        pytest.param(downpour(1, 1, max_staleness=1) | LOST, id="lost"),
        pytest.param(downpour(4, 2, max_staleness=1) | LOST, id="lost with a part of a message"),
        pytest.param(downpour(1, 4) | LOST, id="lost as a message travels"),
        pytest.param(downpour(2, 2) | LOST | {"pipelines": True}, id="lost with pipelines"),
        pytest.param(
            {"strategy": "PeriodicAveragingStrategy", "arguments": {"average_every": 4}} | LOST,
            id="lost, averaging",
        ),
    ],
)
def test_nothing_is_lost_or_done_twice(options):
    seed = SEED or time.time_ns() % 10_000
    script = str(SCRIPTS / "failing_calls.py")
    options = json.dumps(options | {"seed": seed, "seconds": SECONDS / 2})
    with processes.started(*MODULE, "--workers", "3", "--ps", "2", script, options) as process:
        try:
            result = report(process, "RESULT", SECONDS)
        except AssertionError as error:
            raise AssertionError(f"{options}: {log(process)[-4000:]}") from error
        assert exit_of(process, 60.0)[0] == 0, log(process)
    until = json.loads(options)["until"]
    assert all(result.get(name, 0) >= count for name, count in until.items()), result
