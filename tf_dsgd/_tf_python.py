"""Python code that TensorFlow's graphs call: `tf.numpy_function`, `tf.py_function`."""

from __future__ import annotations

import inspect
from typing import Any

_OPERATIONS = ("PyFunc", "PyFuncStateless", "EagerPyFunc")
_CALLER = "tensorflow/python/ops/script_ops.py"
"""Where TensorFlow's C++ code enters Python, with the name of what it calls (seen in 2.21)."""


def python_code(graph: Any) -> frozenset[str]:
    """Names of what a function's graph, with those within it, calls of Python code."""
    made = graph.as_graph_def()
    nodes = [*made.node, *(node for f in made.library.function for node in f.node_def)]
    return frozenset(n.attr["token"].s.decode() for n in nodes if n.op in _OPERATIONS)


def called_by_a_graph() -> frozenset[str]:
    """Names of such code that is being run here."""
    found, frame = set(), inspect.currentframe()
    while frame is not None:
        if frame.f_code.co_filename.replace("\\", "/").endswith(_CALLER):
            token = frame.f_locals.get("token")
            found |= {token.decode() if isinstance(token, bytes) else str(token)}
        frame = frame.f_back
    return frozenset(found)
