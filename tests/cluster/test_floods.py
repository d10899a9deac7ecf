"""What TensorFlow itself says on a cluster, of which `tests/test_floods.py` has copies."""

import re
from pathlib import Path

import pytest

from tests.cluster import processes
from tests.cluster.observing import MODULE, NOISE, SCRIPTS, exit_of, log

pytestmark = [pytest.mark.slow, pytest.mark.beside_others]


def test_an_operation_that_fails_ends_the_script_in_one_line():
    """Under the launcher, which sifts all that its processes write."""
    script = str(SCRIPTS / "failing_op.py")
    options = ("--workers", "1", "--ps", "1", script)
    with processes.started(*MODULE, *options, TF_CPP_MIN_LOG_LEVEL="") as process:
        code, _ = exit_of(process, processes.START_SECONDS)
    assert code == 1, log(process)
    # What TensorFlow and Keras consist of, and Python went through for seconds as a chief ended.
    assert int(re.search(r"FROZEN (\d+)", process.text)[1]) > 100_000
    assert not [line for line in process.lines if NOISE.search(line)]
    assert "Traceback" not in process.text
    *_, before, last = process.lines
    assert re.search(r"failing_op\.py:\d+: InvalidArgumentError: indices\[", last), log(process)
    assert "= 9 is not in [0, 5) (at " in last and "table" in last
    (traceback,) = re.findall(r"the traceback is in (\S+)", before)
    (kept,) = re.findall(r"TensorFlow's lines .* go to (\S+)", process.text)
    assert "model.fit(" in Path(traceback).read_text()
    assert "[worker 0] W" in Path(kept).read_text()
    for file in (traceback, kept):
        Path(file).unlink()
