"""Says in one line what is missing, before anything else is imported."""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import inspect
import os
import signal
import sys
import threading
from collections.abc import Iterator
from typing import Any, NoReturn

PROGRAMS = ("tf_dsgd.launch", "tf_dsgd.serve", "tf_dsgd.report")
"""They need little of the package, and little or nothing of TensorFlow."""
SUBCOMMANDS = {name: f"tf_dsgd.{name}" for name in ("launch", "serve", "report", "selfcheck")}
"""Of `python -m tf_dsgd`."""


class MissingRequirementError(ImportError):
    """TensorFlow or Keras is missing or too old, or Keras runs on another backend."""


def _fail(message: str) -> NoReturn:
    raise MissingRequirementError(f"tf_dsgd: {message}") from None


def installed(name: str) -> bool:
    """Whether a package can be imported."""
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):  # an import hook refuses it, or sys.modules holds None
        return False


def check_installed() -> None:
    """Whether TensorFlow and Keras are there, without importing them."""
    if not installed("tensorflow"):
        _fail('TensorFlow is not installed. Run: pip install "tf_dsgd[cpu]" (or "tf_dsgd[gpu]").')
    if not installed("keras"):
        _fail("Keras 3 is not installed. Run: pip install 'keras>=3.15,<4'")


def check() -> None:
    """Whether Keras is one that tf_dsgd can work with."""
    check_installed()
    try:
        import keras
    except ImportError as error:
        _fail(
            f"Keras cannot load its backend ({error}; KERAS_BACKEND="
            f"{os.environ.get('KERAS_BACKEND', '')}). Set KERAS_BACKEND=tensorflow in the "
            "environment before keras is imported."
        )
    if keras.backend.backend() != "tensorflow":
        _fail(
            f"Keras runs on the {keras.backend.backend()!r} backend, which tf_dsgd cannot train. "
            "Set KERAS_BACKEND=tensorflow in the environment before keras is imported."
        )
    version = tuple(int(part) for part in keras.__version__.split(".")[:2])
    if version < (3, 15):
        _fail(f"Keras {keras.__version__} is too old. Run: pip install 'keras>=3.15,<4'")


def end_at_once_on_ctrl_c() -> None:
    """Until the program has its own handler, Ctrl-C ends it, without Python's traceback."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


@contextlib.contextmanager
def ended_by_ctrl_c() -> Iterator[None]:
    """Within, Ctrl-C ends a script that imports the package, without a traceback of TensorFlow's.

    Not where others may want to go on, or to clean up: in a session, or where the package is
    imported within a function, of whoever runs tests for instance.
    """
    default = (
        threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    )
    if not default or hasattr(sys, "ps1") or not _imported_by_a_script():
        yield
        return
    signal.signal(signal.SIGINT, _end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _imported_by_a_script() -> bool:
    """Whether all that runs are modules, one importing the next, and these two functions."""
    own = (__file__, contextlib.__file__)
    frame = inspect.currentframe()
    while frame is not None:
        code = frame.f_code
        ours = code.co_filename in own or code.co_filename.startswith("<frozen")
        if code.co_name != "<module>" and not ours:
            return False
        frame = frame.f_back
    return True


def _end(number: int, frame: Any) -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def spare_what_is_imported() -> None:
    """Has garbage collection leave out what TensorFlow and Keras consist of, for the process.

    As a process ends, Python goes through all of that several times: 2 s of a processor in which a
    script that was interrupted, or lost another task, looks as if it hung. It never finds anything
    there. What a script makes after the import is collected as ever.
    """
    gc.collect()
    gc.freeze()


def is_program() -> bool:
    """Whether Python imports the package on its way to a program that needs little of it.

    `python -m tf_dsgd.serve` imports `tf_dsgd` first, while `sys.argv[0]` is still "-m".
    """
    if os.path.basename(sys.argv[0] if sys.argv else "") == "tf-dsgd":
        asked = ["tf_dsgd", *sys.argv[1:]]
    elif sys.argv[:1] == ["-m"] and "-m" in sys.orig_argv:
        _, *asked = sys.orig_argv[sys.orig_argv.index("-m") :]
    else:
        return False
    if asked[:1] == ["tf_dsgd"]:
        return asked[1:2] not in ([], ["selfcheck"])  # also of a command that there is not
    return bool(asked) and asked[0] in PROGRAMS
