"""How much memory a process took and how many copies of the parameters are alive in it.

TensorFlow is imported where it is needed: each contender has another environment.
"""

from __future__ import annotations

import gc
import math
import resource
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import keras


def peak_bytes() -> int:
    """The largest resident set of this process so far."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def peak_of(pid: int) -> int:
    """The largest resident set of any process so far, as Linux tells it; 0 of one that is gone."""
    try:
        status = (Path("/proc") / str(pid) / "status").read_text()
    except OSError:
        return 0
    lines = [line.split() for line in status.splitlines() if line.startswith("VmHWM:")]
    return 1024 * int(lines[0][1]) if lines else 0


def parameter_bytes(model: keras.Model) -> int:
    import tensorflow as tf

    return sum(
        math.prod(variable.shape) * tf.as_dtype(variable.dtype).size
        for variable in model.trainable_variables
    )


def live_bytes() -> int:
    """Bytes of all TensorFlow variables and eager tensors that Python can still reach.

    Temporaries inside a running graph are not among them; the peak of the resident set has those.
    """
    import tensorflow as tf

    total = 0
    for candidate in gc.get_objects():
        # A strategy's variable shares the memory of plain variables, so only those are counted.
        if type(candidate).__name__ == "ResourceVariable":
            shape = candidate.read_value().shape if None in candidate.shape else candidate.shape
        elif type(candidate).__name__ == "EagerTensor":
            shape = candidate.shape
        else:
            continue
        if candidate.dtype not in (tf.resource, tf.variant, tf.string):
            total += math.prod(shape) * candidate.dtype.size
    return total
