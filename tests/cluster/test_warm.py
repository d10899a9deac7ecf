"""The process that forks warm programs has one thread, whatever is installed."""

import sys

import pytest

from tests.packaging.repository import ROOT, run_python

pytestmark = [
    pytest.mark.beside_others,
    pytest.mark.skipif(sys.platform != "linux", reason="clusters begin warm on Linux alone"),
]
# What pandas does by way of pyarrow: its allocator starts a thread.
STARTS_A_THREAD = """
import threading
threading.Thread(target=threading.Event().wait, daemon=True).start()
"""
PROGRAM = """
import os, sys
from tests.cluster import warm

def threads():
    return len(os.listdir("/proc/self/task"))

warm._import()
print(threads(), "pandas" in sys.modules, "keras" in sys.modules)
import pandas
print(threads() - 1, pandas.__file__)
"""


def test_pandas_is_not_imported_where_it_is_installed(tmp_path):
    module = tmp_path / "pandas.py"
    module.write_text(STARTS_A_THREAD)
    path = f"{tmp_path}:{ROOT}"
    result = run_python("-c", PROGRAM, PYTHONPATH=path, OPENBLAS_NUM_THREADS="1")
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == ["1 False True", f"1 {module}"]
