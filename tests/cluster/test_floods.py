"""What TensorFlow itself says on a cluster, of which `tests/test_floods.py` has copies."""

import contextlib
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


PYTHON = str(SCRIPTS / "failing_python.py")
LINE = 1 + Path(PYTHON).read_text().splitlines().index(
    next(line for line in Path(PYTHON).read_text().splitlines() if "that is named" in line)
)
SERVE = ("-m", "tf_dsgd.serve")


@pytest.mark.parametrize(
    ("where", "code"),
    [
        ("threads", "numpy_function"),
        ("launcher", "generator"),
        ("cluster", "py_function"),
    ],
)
def test_python_code_that_fails_in_a_pipeline_ends_the_script_in_a_few_lines(where, code):
    """TensorFlow says each such error twice, with the whole traceback."""
    with contextlib.ExitStack() as stack:
        given = {"TF_CPP_MIN_LOG_LEVEL": ""}
        program = (PYTHON, code)
        if where == "launcher":
            program = (*MODULE, "--workers", "1", *program)
        if where == "cluster":
            chief, worker, ps = stack.enter_context(processes.addresses(3))
            cluster = {"chief": [chief], "worker": [worker], "ps": [ps]}
            for job in ("worker", "ps"):
                config = processes.tf_config(job, 0, **cluster)
                stack.enter_context(processes.started(*SERVE, TF_CONFIG=config))
            given["TF_CONFIG"] = processes.tf_config("chief", 0, **cluster)
        process = stack.enter_context(processes.started(*program, **given))
        process.line_with("READY")
        before = len(process.lines)
        assert exit_of(process, processes.START_SECONDS)[0] == 1, log(process)
    (kept,) = re.findall(r"TensorFlow's lines .* go to (\S+)", process.text)
    lines = [x for x in process.lines[before:] if kept not in x and " variables, " not in x]
    assert len(lines) == 3, process.text
    (traceback,) = re.findall(r"the traceback is in (\S+)", lines[0])
    assert re.search(r"failing_python\.py:\d+: UnknownError: BadRowError: no row \d+$", lines[1])
    assert re.search(rf"^of the file \(at \S+failing_python\.py:{LINE}, \w*PyFunc, in ", lines[2])
    for file in (traceback, kept):
        assert "that is named" in Path(file).read_text()
        Path(file).unlink()
