"""A table that no process but the parameter servers could hold."""

import psutil
import pytest

from tests.cluster import processes
from tests.cluster.observing import MODULE, SCRIPTS, exit_of, log, measures_no_seconds, report

ROWS, WIDTH = 10_000_000, 112


@measures_no_seconds
def test_chief_and_workers_train_in_less_memory_than_the_table_has():
    """The kernel refuses them more: a copy of the table, or of a gradient as large, would fail."""
    table = 4 * ROWS * WIDTH
    if psutil.virtual_memory().available < 1.5 * table:
        pytest.skip(f"two ps tasks need {table / 1e9:.1f} GB of memory, and some to work with")
    script = (str(SCRIPTS / "beyond_memory.py"), str(ROWS), str(WIDTH))
    with processes.started(*MODULE, "--workers", "2", "--ps", "2", *script) as process:
        held, limit, before, after, steps = report(process, "RESULT", 240.0)
        assert exit_of(process, 60.0)[0] == 0, log(process)
    assert limit < table <= held
    assert steps == 120 and before > 0.65 and after < 0.2, log(process)
    assert "lost" not in log(process)
