"""Where the checkout is, and how the tests here start Python on it."""

import os
import subprocess
import sys
from pathlib import Path

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
    variables = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "CUDA_VISIBLE_DEVICES": "-1",
        **environment,
    }
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        timeout=timeout,
        cwd=cwd or ROOT,
        env=variables,
        check=False,
    )
