"""Where the checkout is, and how the tests here start Python on it."""

import os
import subprocess
import sys
from pathlib import Path

from tests.cluster import warm

ROOT = Path(__file__).resolve().parents[2]

SKIPPED_DIRECTORIES = {"build", "dist", "_build", "results", "venv", "__pycache__"}


def python_sources() -> set[str]:
    """Every Python file of the checkout, relative to its root."""
    found = set()
    for path in ROOT.rglob("*.py"):
        parts = path.relative_to(ROOT).parts
        if not any(part in SKIPPED_DIRECTORIES or part.startswith(".") for part in parts):
            found.add("/".join(parts))
    return found


def run_python(
    *arguments: str, timeout: float = 240, cwd: Path | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Runs this Python in a process of its own, which imports the package from the checkout."""
    return _run(subprocess.Popen, arguments, timeout, cwd, environment)


def run_script(
    *arguments: str, timeout: float = 240, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """`run_python` of a script whose process begins with TensorFlow imported, where it can."""
    popen = warm.Popen if sys.platform == "linux" else subprocess.Popen
    return _run(popen, arguments, timeout, cwd, {})


def _run(popen, arguments, timeout, cwd, environment):
    variables = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "CUDA_VISIBLE_DEVICES": "-1",
        **environment,
    }
    pipe = subprocess.PIPE
    with popen(
        [sys.executable, *arguments],
        stdin=pipe,
        stdout=pipe,
        stderr=pipe,
        text=True,
        cwd=cwd or ROOT,
        env=variables,
    ) as process:
        try:
            out, err = process.communicate("", timeout=timeout)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)
