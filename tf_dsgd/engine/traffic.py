"""What a worker's messages are made of: counted on the worker, as they are encoded.

A worker's counts are one vector, to which each message adds a row:

    messages    1
    bytes       of all tensors that the codec gave
    dense       bytes of what the codec was given
    elements    numbers that the codec was given
    emitted     of these, the ones that are in the message
    squares     the square of the 2-norm of what the codec was given; 0 where it does not say
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from tf_dsgd.arithmetic import Gradient

MESSAGES, BYTES, DENSE, ELEMENTS, EMITTED, SQUARES = range(6)
COLUMNS = 6


@dataclasses.dataclass(frozen=True)
class Encoded:
    """What a codec says of one tensor that it encoded."""

    emitted: Any
    square: tf.Tensor


def row(
    given: Sequence[Gradient], sent: Sequence[Sequence[Gradient]], said: Mapping[int, Encoded]
) -> tf.Tensor:
    """What one message adds.

    Args:
        given: the message's tensors, by weight.
        sent: what the codec made of each.
        said: by weight, what the codec says.
    """
    elements = [_elements(tensor) for tensor in given]
    emitted = [said[i].emitted if i in said else n for i, n in enumerate(elements)]
    squares = [tf.cast(each.square, tf.float64) for each in said.values()]
    total = [
        1.0,
        bytes_of(sent),
        bytes_of(given),
        _sum(elements),
        _sum(emitted),
        tf.add_n(squares) if squares else 0.0,
    ]
    return tf.stack([tf.cast(value, tf.float64) for value in total])


def bytes_of(tensors: Any) -> Any:
    """Bytes of all tensors in a structure; a Python number if all shapes are known."""
    flat = tf.nest.flatten(tensors, expand_composites=True)
    return _sum([_size(part) * part.dtype.size for part in flat])


def _elements(tensor: Gradient) -> Any:
    return _size(tensor.values if isinstance(tensor, tf.IndexedSlices) else tensor)


def _size(tensor: tf.Tensor) -> Any:
    known = tensor.shape.num_elements()
    return tf.size(tensor, tf.int64) if known is None else known


def _sum(numbers: Sequence[Any]) -> Any:
    """What is known while it is traced is one constant."""
    known = sum(int(n) for n in numbers if not isinstance(n, tf.Tensor))
    others = [tf.cast(n, tf.int64) for n in numbers if isinstance(n, tf.Tensor)]
    return tf.add_n([*others, tf.constant(known, tf.int64)]) if others else known
