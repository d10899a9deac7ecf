"""What a replica that is cut into parts needs of TensorFlow and Keras, and is not public.

Each name says why it is needed, as in `_tf`. Seen to work in TensorFlow 2.21.0, Keras 3.15.1.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

# What an operation's attribute is made of.
from tensorflow.core.framework import attr_value_pb2 as _attr_value

# By this a tape is told which function gives the gradient of an operation. There is no public way
# to know, while a gradient is traced, of which operation it is.
from tensorflow.python import pywrap_tfe as _pywrap_tfe

# That function, which is put back.
from tensorflow.python.eager import backprop as _backprop

# Whether what is traced is the condition of a loop.
from tensorflow.python.ops import control_flow_util_v2 as _control_flow

Around = Callable[[Sequence[Any], Sequence[Any], Sequence[Any]], contextlib.AbstractContextManager]
"""(inputs, outputs, gradients of outputs) -> in what the gradient of an operation is traced."""


class _Hook(threading.local):
    around: Around | None = None


_hook = _Hook()
_hooked = 0
_lock = threading.Lock()


def _gradient(
    name: str, attrs: Any, number: int, inputs: Any, outputs: Any, gradients: Any, *rest: Any
) -> Any:
    """As TensorFlow's own, within what this thread asked for."""
    given = name, attrs, number, inputs, outputs, gradients
    if _hook.around is None:
        return _backprop._gradient_function(*given, *rest)
    with _hook.around(inputs or (), outputs or (), gradients or ()):
        return _backprop._gradient_function(*given, *rest)


@contextlib.contextmanager
def gradients_traced_in(around: Around) -> Iterator[None]:
    """Within, tapes of this thread trace the gradient of each operation in `around`.

    TensorFlow has one such function for all threads. Others get what they would have got, and when
    nobody is within any more it is TensorFlow's own again.
    """
    global _hooked
    before, _hook.around = _hook.around, around
    with _lock:
        _hooked += 1
        _pywrap_tfe.TFE_Py_RegisterGradientFunction(_gradient)
    try:
        yield
    finally:
        _hook.around = before
        with _lock:
            _hooked -= 1
            if not _hooked:
                _pywrap_tfe.TFE_Py_RegisterGradientFunction(_backprop._gradient_function)


def place_by(graph: Any, place: Callable[[tf.Operation], None]) -> None:
    """Has `place` called for each operation made in a function's graph from now on.

    Functions and loops traced within inherit it. `tf.compat.v1.device` does so, too, and ends with
    its block; the copies of what the function returns are made after that. The function's graph
    itself ends it.
    """

    def device(operation: tf.Operation) -> str:
        place(operation)
        return str(operation.device)

    graph._add_device_to_stack(device)


def called_function(operation: tf.Operation) -> str:
    """The name of the function that an operation calls; "" if it calls none."""
    if operation.type not in ("PartitionedCall", "StatefulPartitionedCall"):
        return ""
    return str(operation.get_attr("f").name)


def is_condition_of_a_loop(graph: Any) -> bool:
    """Whether a function's graph is what `tf.while_loop` asks before each turn."""
    return isinstance(graph, _control_flow.WhileCondFuncGraph)


def is_control_flow(operation: tf.Operation) -> bool:
    """Whether an operation runs functions of its own, once or in turns."""
    return operation.type in ("While", "StatelessWhile", "If", "StatelessIf")


def run_as_one(operation: tf.Operation) -> None:
    """Has a loop run as an operation of one device.

    Else TensorFlow makes many of it, which know of no device, and whose state would travel at each
    turn.
    """
    operation._set_attr("_lower_using_switch_merge", _attr_value.AttrValue(b=False))


def put_beside(operation: tf.Operation, anchor: tf.Operation, *, holds: bool) -> None:
    """Has TensorFlow place an operation that was just made where another one is.

    `tf.Graph.colocate_with` does so for all that is made within it; this is for one of them. With
    `holds` the other is kept in the graph as long as this one is.
    """
    group = _attr_value.AttrValue.ListValue(s=[b"loc:@" + anchor.name.encode()])
    operation._set_attr("_class", _attr_value.AttrValue(list=group))
    if holds:
        operation._add_control_input(anchor)


def layers_within(layer: keras.layers.Layer) -> list[keras.layers.Layer]:
    """The layers that a layer or a model holds itself, and not those within them.

    `Model.layers` is public, and a layer that holds others (`Bidirectional`, one of the user's) has
    no such list.
    """
    return list(layer._flatten_layers(include_self=False, recursive=False))


def all_layers_within(layer: keras.layers.Layer) -> list[keras.layers.Layer]:
    """As `layers_within`, with those within them."""
    return list(layer._flatten_layers(include_self=False))


def variables_of(layer: keras.layers.Layer) -> list[keras.Variable]:
    """The variables of a layer itself, its seed generators' among them."""
    own = [*layer._trainable_variables, *layer._non_trainable_variables]
    return own + [generator.state for generator in layer._seed_generators]


def compiled_losses(model: keras.Model) -> list[keras.losses.Loss]:
    """Those that `compile` was given, once Keras has built them, as it does before it traces."""
    compiled = getattr(model, "_compile_loss", None)
    flat = [] if compiled is None else compiled._flat_losses or []
    return [each.loss for each in flat if each.loss is not None]


def masked_alike(tensor: tf.Tensor, other: tf.Tensor) -> tf.Tensor:
    """`tensor` with the mask that Keras keeps of `other`."""
    mask = getattr(other, "_keras_mask", None)
    if mask is not None:
        tensor._keras_mask = mask
    return tensor


def outer_tensor(tensor: tf.Tensor) -> tf.Tensor:
    """What a placeholder of a function's graph stands for outside; the tensor, if it is none."""
    while not isinstance(tensor, tf.__internal__.EagerTensor):
        graph = tensor.graph
        found = [outer for outer, inner in getattr(graph, "captures", ()) if inner is tensor]
        if not found:
            return tensor
        tensor = found[0]
    return tensor
