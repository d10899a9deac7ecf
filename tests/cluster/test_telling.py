"""What tasks are told of functions: nobody waits for a stopped one, and none misses a function.

Each of the eager context's methods that `_tf_remote` replaces has a test that fails without it; the
last two here show the harm itself.
"""

import pytest

from tests.cluster import processes
from tests.cluster.observing import MODULE, SCRIPTS, exit_of, log, report

pytestmark = pytest.mark.slow

SILENT_SECONDS = 8.0
"""Of `scripts/telling.py`: within so long a ping counts as not answered."""
SCRIPT = str(SCRIPTS / "telling.py")


def telling(*arguments, workers=2):
    with processes.started(
        *MODULE, "--workers", str(workers), "--ps", "0", SCRIPT, *arguments
    ) as process:
        result = report(process, "RESULT", 120.0)
        assert exit_of(process, 60.0)[0] == 0, log(process)
    return result


def test_nobody_waits_for_a_worker_that_is_stopped_to_be_told():
    found = telling("stopped")
    assert max(found.values()) < SILENT_SECONDS / 2, found


@pytest.mark.parametrize(
    ("method", "kind"), [("add_c_function", "made"), ("remove_function", "freed")]
)
def test_a_method_that_is_not_replaced(method, kind):
    """Python stands still until the ping of the stopped worker is over."""
    found = telling("stopped", method)
    assert 0.75 * SILENT_SECONDS < found[kind] < 3 * SILENT_SECONDS, found


def test_functions_end_while_a_task_joins():
    """What it is told of the end of functions it does not know ends the stream to it."""
    (lost, of), (lost_unguarded, of_unguarded) = telling("joins", workers=3)
    assert (lost, lost_unguarded > 0) == (0, True), (lost_unguarded, of_unguarded)
    assert of > 5
