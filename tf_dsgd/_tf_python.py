"""Python code that TensorFlow's graphs call: `tf.numpy_function`, `tf.py_function`."""

from __future__ import annotations

import inspect
from typing import Any

_OPERATIONS = ("PyFunc", "PyFuncStateless", "EagerPyFunc")
_CALLER = "tensorflow/python/ops/script_ops.py"
"""Where TensorFlow's C++ code enters Python (seen in 2.21)."""


def calls_python(graph: Any) -> bool:
    """Whether a function's graph, or one within it, calls Python code."""
    made = graph.as_graph_def()
    nodes = [*made.node, *(node for f in made.library.function for node in f.node_def)]
    return any(node.op in _OPERATIONS for node in nodes)


def called_by_a_graph() -> bool:
    """Whether what runs now is such code."""
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code.co_filename.replace("\\", "/").endswith(_CALLER):
            return True
        frame = frame.f_back
    return False
