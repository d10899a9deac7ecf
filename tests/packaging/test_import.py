"""`import tf_dsgd`, each time in a process of its own."""

import pytest

from tests.packaging.repository import run_python

pytestmark = pytest.mark.medium

# A setting that TensorFlow accepts only until its devices are initialised.
DEVICES_UNTOUCHED = """
import gc
import tf_dsgd
assert gc.get_freeze_count() > 100_000  # Python went through these for seconds as a script ended
import tensorflow as tf
tf.config.threading.set_inter_op_parallelism_threads(2)
"""

BLOCK_TENSORFLOW = """
import importlib.abc
import sys

class Blocker(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "tensorflow":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Blocker())
"""

# Prints the message of an ImportError that has no other error behind it.
IMPORT = """
try:
    import tf_dsgd
except ImportError as error:
    assert error.__cause__ is None
    assert error.__suppress_context__ or error.__context__ is None
    print(error)
"""


def message_of_import_error(code: str, **environment: str) -> str:
    result = run_python("-c", code, **environment)
    assert result.returncode == 0, result.stderr
    (line,) = result.stdout.splitlines()
    return line


def test_import_initialises_no_device():
    result = run_python("-c", DEVICES_UNTOUCHED)
    assert result.returncode == 0, result.stderr


def test_import_is_silent_with_warnings_as_errors():
    # oneDNN's greeting, which TensorFlow prints whatever its log level, is switched off.
    result = run_python("-W", "error", "-c", "import tf_dsgd", TF_ENABLE_ONEDNN_OPTS="0")
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


@pytest.mark.parametrize("backend", ["jax", "torch", "numpy"])
def test_another_backend_is_refused_in_one_line(backend):
    message = message_of_import_error(IMPORT, KERAS_BACKEND=backend)
    assert "tf_dsgd" in message
    assert backend in message
    assert "KERAS_BACKEND=tensorflow" in message


def test_missing_tensorflow_is_named_in_one_line():
    message = message_of_import_error(BLOCK_TENSORFLOW + IMPORT)
    assert "TensorFlow" in message
    assert 'pip install "tf_dsgd[cpu]"' in message
