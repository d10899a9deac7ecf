"""Where random numbers come from. Private names of TF 2.21 and Keras 3.15.1."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

# The generator that `keras.random` uses where a call has no seed is among Keras's global
# attributes. No public call gives it without making it.
from keras.src.backend.common import global_state as _global_state
from keras.src.random.seed_generator import GLOBAL_SEED_GENERATOR as _NAME

# `tf.random.Generator` names its state so, and never otherwise ("Make sure we don't change this
# name since Keras was using this name to filter out the state variable").
_STATE = "StateVar"


def state_without_seed() -> Any:
    """The variable from which `keras.random` draws without a seed; None where it has not yet."""
    generator = _global_state.get_global_attribute(_NAME)
    return None if generator is None else generator.state.value


def begin_generator_anew() -> None:
    """The next call of `keras.random` without a seed makes a generator of its own."""
    _global_state.set_global_attribute(_NAME, None)


def is_state_of_generator(variable: tf.Variable) -> bool:
    """Whether it is the state of a `tf.random.Generator`."""
    name = variable.name.rpartition(":")[0].rpartition("/")[2]
    return name == _STATE and variable.dtype == tf.int64 and variable.shape.rank == 1
