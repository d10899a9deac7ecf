"""Ctrl-C within an import ends a launcher's script without a traceback.

A script's first seconds go into importing TensorFlow, before `tf_dsgd` can do anything. So the
launcher puts this folder in front of PYTHONPATH: Python imports `sitecustomize` before it runs a
script. Here the folder is taken out again, so that processes of the script's own, and a
`sitecustomize` that somebody else has put there, find all as it was.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys
import traceback
from types import TracebackType


def install() -> None:
    """What an uncaught error says from here on."""

    def hook(kind: type[BaseException], error: BaseException, where: TracebackType | None) -> None:
        if not (kind is KeyboardInterrupt and within_an_import(where)):
            sys.__excepthook__(kind, error, where)

    hook.of_tf_dsgd = True  # type: ignore[attr-defined]
    sys.excepthook = hook


def within_an_import(where: TracebackType | None) -> bool:
    """Whether a traceback leads from the script's own lines into those of another module.

    Python takes the frames of its own that are between them out of some tracebacks.
    """
    codes = [frame.f_code for frame, _ in traceback.walk_tb(where)]
    modules = [code.co_filename for code in codes if code.co_name == "<module>"]
    return any(not file.startswith("<") for file in modules[1:])


def leave(folder: str) -> None:
    """Takes the folder out of the paths on which Python looks for modules."""
    first, _, others = os.environ.get("PYTHONPATH", "").partition(os.pathsep)
    if first == folder:
        os.environ["PYTHONPATH"] = others
        if not others:
            del os.environ["PYTHONPATH"]
    if folder in sys.path:
        sys.path.remove(folder)


def run_the_next() -> None:
    """Runs the `sitecustomize` that Python would have found without this one."""
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize")
    if spec is None or spec.loader is None:
        return
    module = sys.modules["sitecustomize"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)


if __name__ == "sitecustomize":
    leave(os.path.dirname(__file__))
    if sys.excepthook is sys.__excepthook__:
        install()
    run_the_next()
