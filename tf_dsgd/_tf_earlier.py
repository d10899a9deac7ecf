"""Variables and tables that were made before this process connected to a cluster stay usable.

TensorFlow makes this process's devices anew as it connects. A variable made before stays: whoever
has its handle reads it, and adds to it. But AssignVariableOp asks the device for the variable's
name, which the new one does not know, and makes another variable there, that nobody reads: what is
assigned is lost without a word. Seen in TensorFlow 2.21, in plain scripts, too. An assignment to
all of a slice looks at the handle. Tables for lookups, which Keras's layers for text have, are
known to the device by name alone: they are made again, by the same name, with what was in them.

As in `_tf`, each private name says why it is needed.
"""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf
from absl import logging

# Graphs that were traced before have the operation in them. TF 2.21.
from tensorflow.python.framework.func_graph import FuncGraph as _FuncGraph

# What all tables for lookups are. TF 2.21.
from tensorflow.python.ops.lookup_ops import LookupInterface as _Table

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

_connections = 0


def connections() -> int:
    """How often this process has connected: what was traced before is of other devices."""
    return _connections


def keep_assignable(connect: Callable[[], None]) -> None:
    """Connects, and has what was made before take assignments as ever.

    Keras's models are traced anew where they are used next. Other functions that were traced
    before, and assign, are told of in a warning. A strategy of this package that was made before
    has too many of them, and refuses to go on (`engine.base`).
    """
    global _connections
    gc.unfreeze()  # what is frozen is not found; see `_requirements`
    variables = [v for v in _living(_Variable) if not type(v).__module__.startswith("tf_dsgd.")]
    for model in _living(keras.Model) if variables else ():
        for kind in ("train", "test", "predict"):
            _trace_anew(model, kind)
    gc.collect()  # graphs are in cycles
    losing = {_root(graph).name for graph in _living(_FuncGraph) if _assigns(graph)} - _KERAS
    for variable in variables:
        _wrap(weakref.ref(variable))
    del variables
    tables = [(table, _contents(table)) for table in _living(_Table) if _is_known_by_name(table)]
    writers = [w for w in _living(tf.summary.SummaryWriter) if _is_open(w)]
    for writer in writers:
        writer.flush()
    gc.freeze()
    _connections += 1
    try:
        connect()
        for table, contents in tables:
            if contents is not None:
                _make_again(table, *contents)
    finally:  # also if it fails: TensorFlow may have made the devices by then
        if losing:
            logging.warning(
                "tf_dsgd: functions that were traced before the strategy was made assign to "
                "variables, and TensorFlow loses what they assign from now on: %s. Make the "
                "strategy first, or make these functions anew by tf.function.",
                ", ".join(sorted(losing)),
            )
        if writers:
            logging.warning(
                "tf_dsgd: writers of tf.summary that were made before the strategy: %d. TensorFlow "
                "loses what these write from now on. Make the strategy first, or make them anew.",
                len(writers),
            )


def _trace_anew(model: keras.Model, kind: str) -> None:
    """Has a model make a function that it has when it is called next, in a running `fit`, too."""
    if getattr(model, f"{kind}_function", None) is None:
        return
    itself = weakref.ref(model)

    def again(iterator: Any) -> Any:
        model = itself()
        getattr(model, f"make_{kind}_function")(force=True)
        return getattr(model, f"{kind}_function")(iterator)

    with contextlib.suppress(AttributeError):  # a model of its own kind that has it read only
        setattr(model, f"{kind}_function", again)


def _wrap(itself: Callable[[], Any]) -> None:
    """Has a variable assigned by slices. By a weak reference, as it is to be freed as ever."""
    variable = itself()
    variable.assign = lambda *args, **options: _assign(itself(), *args, **options)
    # What a checkpoint calls, with this name. TF 2.21.
    variable._restore_from_tensors = lambda tensors: _restore(itself(), tensors)


def _is_known_by_name(table: Any) -> bool:
    """Whether a table is one of the device's, by a name; not one of a graph, or around another."""
    named = not getattr(table, "_is_anonymous", True)  # of all classes with a resource. TF 2.21
    return named and hasattr(table.resource_handle, "numpy")


def _is_open(writer: Any) -> bool:
    return not getattr(writer, "_closed", True)  # of those that write to a file. TF 2.21


def _contents(table: Any) -> tuple[tf.Tensor, tf.Tensor] | None:
    """A table's keys and values; None where it could not be used any more."""
    try:
        return tf.raw_ops.LookupTableExportV2(
            table_handle=table.resource_handle, Tkeys=table.key_dtype, Tvalues=table.value_dtype
        )
    except tf.errors.OpError:
        return None


def _make_again(table: Any, keys: tf.Tensor, values: tf.Tensor) -> None:
    """All that has the table's handle finds it by its name: datasets and functions, too."""
    table._create_resource()  # what a subclass of TrackableResource is to have. TF 2.21
    tf.raw_ops.LookupTableImportV2(table_handle=table.resource_handle, keys=keys, values=values)


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
    if not variable.shape.is_fully_defined():  # a slice would be filled, by repeating
        message = f"{variable.name} was made before the strategy: its shape cannot change any more"
        checked = tf.debugging.assert_equal(
            tf.shape(value), tf.shape(variable.read_value()), message=message
        )
        with tf.control_dependencies([] if checked is None else [checked]):
            value = tf.identity(value)
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
