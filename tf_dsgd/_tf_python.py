"""Python functions that operations call (`tf.py_function`, ...). Private names of TF 2.21.

Each has a token, which its operation and the call of it have in common.
"""

from __future__ import annotations

import inspect
from typing import Any

from tensorflow.python.ops import script_ops as _script_ops

_CALL = _script_ops.FuncRegistry.__call__.__code__
_TYPES = ("PyFunc", "PyFuncStateless", "EagerPyFunc")


def being_called() -> set[str]:
    """The tokens of those that this thread is in; it may be one of TensorFlow's own."""
    found = set()
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code is _CALL:
            found.add(_text(frame.f_locals["token"]))
        frame = frame.f_back
    return found


def within(graph: Any) -> set[str]:
    """The tokens of those that a function's operations call, loops and branches included."""
    definition = graph.as_graph_def()
    nodes = [*definition.node, *(n for f in definition.library.function for n in f.node_def)]
    return {_text(node.attr["token"].s) for node in nodes if node.op in _TYPES}


def _text(token: str | bytes) -> str:
    return token if isinstance(token, str) else token.decode()
