"""How much memory a process took and how many copies of the parameters are alive in it."""

import gc
import math
import resource
import sys

import keras
import tensorflow as tf


def peak_bytes() -> int:
    """The largest resident set of this process so far."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def parameter_bytes(model: keras.Model) -> int:
    return sum(
        math.prod(variable.shape) * tf.as_dtype(variable.dtype).size
        for variable in model.trainable_variables
    )


def live_bytes() -> int:
    """Bytes of all TensorFlow variables and eager tensors that Python can still reach.

    Temporaries inside a running graph are not among them; the peak of the resident set has those.
    """
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
