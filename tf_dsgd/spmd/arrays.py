"""The arrays of variables that equal processes exchange."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tf_dsgd.spmd.exchange import How, Spec


def spec(variable: Any, how: str) -> Spec:
    """What becomes of a variable's values; integers have no mean."""
    dtype = np.dtype(tf.as_dtype(variable.dtype).as_numpy_dtype)
    kind: How = "sum" if how == "sum" else "first"
    if how == "mean" and dtype.kind not in "biu":
        kind = "mean"
    # NumPy's own name; bfloat16 is not one that NumPy can look up.
    return Spec(tuple(variable.shape), dtype, kind)


def values(variables: Iterable[Any]) -> list[np.ndarray]:
    """The variables' values, to be read at once: on a CPU they are the variables' own memory."""
    return [np.asarray(tf.convert_to_tensor(variable.value)) for variable in variables]


def assign(variables: Sequence[Any], arrays: Sequence[np.ndarray]) -> None:
    """Sets the variables."""
    for variable, array in zip(variables, arrays, strict=True):
        variable.assign(array)
