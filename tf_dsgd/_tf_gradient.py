"""A gradient that TensorFlow finds by a name, and not by a closure. Private names of TF 2.21.

`tf.custom_gradient` in a graph keeps what it was given in a registry of the whole process, and so
the graph, what that has captured, and the strategy: a process that made many models grew. Here the
gradient is registered once, and the operation's own inputs tell it what it needs.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

# Has the tape that computes a gradient call a function of ours, whatever made the outputs:
# `tf.custom_gradient` does it so, too.
from tensorflow.python.eager import record as _record

_NAME = "TfDsgdRowsOfTable"


def rows_of_table(found: tf.Tensor, handle: tf.Tensor, ids: tf.Tensor, shape: tf.Tensor) -> Any:
    """`found`, whose gradient is that of the rows `ids` of the table that `handle` stands for.

    Args:
        found: rows, `[*any, *row]`.
        handle: by which tapes know the table.
        ids: which rows, flat.
        shape: of the table, of the type of `ids`.
    """
    if tf.executing_eagerly():  # there it keeps nothing
        with_gradient = tf.custom_gradient(
            lambda _: (tf.identity(found), lambda upstream: _gradient(upstream, ids, shape))
        )
        return with_gradient(handle)
    inputs = [found, handle, ids, shape]
    graph = tf.compat.v1.get_default_graph()
    with _record.stop_recording(), graph.gradient_override_map({"IdentityN": _NAME}):
        output = tf.identity_n(inputs)[0]  # for gradients that are made of the graph
    _record.record_operation(
        _NAME, [output], [handle], lambda upstream: [_gradient(upstream, ids, shape)]
    )
    return output


def _gradient(upstream: Any, ids: tf.Tensor, shape: tf.Tensor) -> tf.IndexedSlices:
    values = tf.reshape(upstream, tf.concat([tf.shape(ids, shape.dtype), shape[1:]], 0))
    return tf.IndexedSlices(values, ids, shape)


@tf.RegisterGradient(_NAME)
def _of_operation(operation: tf.Operation, upstream: Any, *_: Any) -> list[Any]:
    ids, shape = operation.inputs[2:]
    return [None, _gradient(upstream, ids, shape), None, None]
