"""Variables that were made before this process connected to a cluster: they can still be assigned.

TensorFlow makes this process's devices anew as it connects. A variable made before stays: whoever
has its handle reads it, and adds to it. But AssignVariableOp asks the device for the variable's
name, which the new one does not know, and makes another variable there, that nobody reads: what is
assigned is lost without a word. Seen in TensorFlow 2.21, in plain scripts, too. An assignment to
all of a slice looks at the handle.

As in `_tf`, each private name says why it is needed.
"""

from __future__ import annotations

import functools
import gc
import types
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf
from absl import logging

# Graphs that were traced before have the operation in them. TF 2.21.
from tensorflow.python.framework.func_graph import FuncGraph as _FuncGraph

# What all variables are, and the key under which a checkpoint has a variable's value. TF 2.21.
from tensorflow.python.ops.resource_variable_ops import BaseResourceVariable as _Variable
from tensorflow.python.trackable.base import VARIABLE_VALUE_KEY as _VALUE

_LOSING = "AssignVariableOp"
# What the functions are called that Keras traces, and some of which live on. Keras 3.15.1.
_KERAS = {
    f"{steps}_step_on_{what}"
    for steps in ("one", "multi")
    for what in ("data", "data_distributed", "iterator")
}


def keep_assignable(connect: Callable[[], None]) -> None:
    """Connects, and has what was made before take assignments as ever.

    Keras's models are traced anew where they are used next. Other functions that were traced
    before, and assign, are told of in a warning.
    """
    gc.unfreeze()  # what is frozen is not found; see `transport.ending`
    variables = _living(_Variable)
    for model in _living(keras.Model) if variables else ():
        for traced in ("train_function", "test_function", "predict_function"):
            setattr(model, traced, None)  # Keras makes it where it is None
    gc.collect()  # graphs are in cycles
    losing = sorted(
        {_root(graph).name for graph in _living(_FuncGraph) if _assigns(graph)} - _KERAS
    )
    gc.freeze()
    connect()
    for variable in variables:
        variable.assign = types.MethodType(_assign, variable)
        # What a checkpoint calls, with this name. TF 2.21.
        variable._restore_from_tensors = functools.partial(_restore, variable)
    if losing:
        logging.warning(
            "tf_dsgd: functions that were traced before the strategy was made assign to variables, "
            "and TensorFlow loses what they assign from now on: %s. Make the strategy first, or "
            "make these functions anew by tf.function.",
            ", ".join(sorted(losing)),
        )


def _living(kind: type) -> list[Any]:
    """All objects of a class; `isinstance` would ask some that say they are of another."""
    return [each for each in gc.get_objects() if issubclass(type(each), kind)]


def _root(graph: Any) -> Any:
    """The function's graph in which this one is, as a branch or a call."""
    while issubclass(type(graph.outer_graph), _FuncGraph):
        graph = graph.outer_graph
    return graph


def _assigns(graph: Any) -> bool:
    """Whether a function's graph assigns to a variable from outside of it."""
    return any(
        consumer.type == _LOSING
        for outside, inside in graph.captures
        if outside.dtype == tf.resource
        for consumer in inside.consumers()
    )


def _assign(
    variable: Any,
    value: Any,
    use_locking: bool | None = None,
    name: str | None = None,
    read_value: bool = True,
) -> Any:
    """As `tf.Variable.assign`."""
    del use_locking
    value = tf.convert_to_tensor(value, variable.dtype)
    if not variable.shape.is_compatible_with(value.shape):
        raise ValueError(
            f"{variable.name} has shape {variable.shape}, and is assigned a value of shape "
            f"{value.shape}."
        )
    assigned = tf.raw_ops.ResourceStridedSliceAssign(
        ref=variable.handle,
        begin=[0],
        end=[0],
        strides=[1],
        value=value,
        ellipsis_mask=1,
        name=name,
    )
    return variable._lazy_read(assigned) if read_value else assigned


def _restore(variable: Any, tensors: Any) -> Any:
    """Takes a variable's value out of a checkpoint."""
    with tf.device(variable.device):
        return _assign(variable, tf.identity(tensors[_VALUE]))
