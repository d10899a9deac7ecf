"""What codecs share: which tensors they compress, tables by rows, and error feedback."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tf_dsgd import algorithm, arithmetic
from tf_dsgd.arithmetic import Gradient


class Memory:
    """A worker's cells for one weight; of a table for the rows that a message names.

    They are of the type that a codec computes in: float32 for weights of 16 bits.
    """

    def __init__(self, worker: algorithm.Worker, index: int, rows: tf.Tensor | None):
        self.weight = worker.weights[index]
        self.dtype = tf.float32 if self.weight.dtype.size < 4 else self.weight.dtype
        self.index = index
        self.emitted: tf.Tensor | int | None = None
        """How many elements are in the message; None for all of them."""
        self._worker, self._rows = worker, rows

    def read(self, name: str) -> tf.Tensor:
        """The cell, or its rows."""
        cell = self._worker.cell(name, self.index, dtype=self.dtype)
        return cell.read_value() if self._rows is None else cell.sparse_read(self._rows)

    def write(self, name: str, value: tf.Tensor) -> None:
        """cell := value, or its rows."""
        rows = value if self._rows is None else tf.IndexedSlices(value, self._rows)
        arithmetic.write(self._worker.cell(name, self.index, dtype=self.dtype), rows)

    def whole(self, name: str, shape: Sequence[int], dtype: tf.DType) -> tf.Variable:
        """A cell of another shape and type, one for all rows."""
        return self._worker.cell(name, self.index, shape=shape, dtype=dtype)

    def as_sent(self, value: tf.Tensor) -> tf.Tensor:
        """In the weight's type; what is beyond its range is sent in part, and not as infinite."""
        return tf.saturate_cast(value, self.weight.dtype)

    def as_applied(self, value: tf.Tensor) -> tf.Tensor:
        """What the shard makes of it: rounded to the weight's type, where that has fewer bits."""
        return tf.cast(tf.cast(value, self.weight.dtype), self.dtype)


class Lossy(algorithm.Codec, abc.ABC):
    """A codec of floating-point tensors; others travel as they are.

    Of a table's gradient the rows travel: their numbers as they are, their values compressed as if
    they were a tensor of their own. All of them travel, also those of which nothing is sent: the
    worker has moved its copy of these rows, and must fetch them again.
    """

    overdue_above: float | None = None
    """What an element that is held back exceeds if it was due already; None where none is ever."""

    @abc.abstractmethod
    def compress(self, memory: Memory, value: tf.Tensor) -> list[tf.Tensor]:
        """What is sent of a message's tensor, which is of the type `memory.dtype`."""

    @abc.abstractmethod
    def decompress(self, sent: Sequence[tf.Tensor], shape: Any, dtype: tf.DType) -> tf.Tensor:
        """The tensor of this shape and type that the shard applies."""

    def encode(self, worker: algorithm.Worker, index: int, tensor: Gradient) -> list[Gradient]:
        if not tensor.dtype.is_floating:
            return [tensor]
        if not isinstance(tensor, tf.IndexedSlices):
            return self._compressed(worker, Memory(worker, index, None), tensor)
        tensor = arithmetic.merged_rows(tensor)
        memory = Memory(worker, index, tensor.indices)
        return [tensor.indices, *self._compressed(worker, memory, tensor.values)]

    def _compressed(
        self, worker: algorithm.Worker, memory: Memory, value: tf.Tensor
    ) -> list[tf.Tensor]:
        value, square = self._checked(memory, value)
        sent = self.compress(memory, value)
        emitted = number_of(value) if memory.emitted is None else memory.emitted
        worker.encoded(memory.index, emitted, square)
        return sent

    def _checked(self, memory: Memory, value: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """The value, as it is computed with, and its square.

        What is not finite would stay in a residual.
        """
        message = (
            f"What was to be sent of {name_of(memory.weight)}, of the shape {memory.weight.shape}, "
            f"is not finite, or its square is not, and {self!r} cannot send it. Lower the learning "
            "rate; clip gradients (clipnorm) with push_every above 1: workers clip then; or train "
            "without compression"
        )
        value = tf.cast(value, memory.dtype)
        # One pass over the elements, a fifth of what it costs to look at each.
        half = tf.debugging.check_numerics(tf.nn.l2_loss(value), message)
        with tf.control_dependencies([half]):
            return tf.identity(value), 2.0 * half

    def in_range(self, memory: Memory, value: tf.Tensor) -> tf.Tensor:
        """The value, if it is finite in the weight's type: of float16, up to 65504."""
        if memory.weight.dtype != tf.float16:
            return value
        message = (
            f"What was to be sent of {name_of(memory.weight)} is above 65504, the largest number "
            f"of float16, and {self!r} cannot send it. Lower the loss scale, clip gradients "
            "(clipnorm), or use bfloat16"
        )
        finite = tf.debugging.check_numerics(memory.as_applied(value), message)
        with tf.control_dependencies([finite]):
            return tf.identity(value)

    def decode(self, place: algorithm.Place, index: int, sent: Sequence[Gradient]) -> Gradient:
        weight = place.weights[index]
        if not weight.dtype.is_floating:
            return sent[0]
        if not place.is_sparse(index):
            value = self.decompress(sent, weight.shape, weight.dtype)
            return tf.ensure_shape(value, weight.shape)
        rows, *values = sent
        shape = tf.concat([tf.shape(rows), weight.shape[1:].as_list()], 0)
        value = self.decompress(values, shape, weight.dtype)
        value = tf.ensure_shape(value, [None, *weight.shape[1:]])
        return tf.IndexedSlices(value, rows, tf.constant(weight.shape.as_list()))


class ErrorFeedback(Lossy):
    """What was not sent is kept, and is a part of the next message.

        p = e + g;   sent = C(p);   e = p - decoded(sent)

    so that what was applied and what is kept are together all gradients. e begins at 0.
    """

    repeatable = False
    held_back = "residual"

    def compress(self, memory: Memory, value: tf.Tensor) -> list[tf.Tensor]:
        wanted = memory.read("residual") + value
        sent = self.chosen(memory, wanted)
        shape = wanted.shape if wanted.shape.is_fully_defined() else tf.shape(wanted)
        decoded = self.decompress(sent, shape, memory.weight.dtype)
        memory.write("residual", wanted - tf.cast(decoded, memory.dtype))
        return sent

    @abc.abstractmethod
    def chosen(self, memory: Memory, wanted: tf.Tensor) -> list[tf.Tensor]:
        """C(p): what is sent of `wanted`."""


def name_of(weight: tf.Variable) -> str:
    """As Keras names it, by its path."""
    return repr(weight.name.rpartition(":")[0])


def number_of(value: tf.Tensor) -> tf.Tensor | int:
    """How many elements; a Python integer where that is known."""
    static = value.shape.num_elements()
    return tf.size(value) if static is None else static


def spread(
    places: tf.Tensor, values: tf.Tensor, size: Any, *, ascending: bool = False
) -> tf.Tensor:
    """A vector that has these values at these places, and 0 elsewhere; an error beyond its ends.

    `tf.scatter_nd` takes ten times as long where half of the elements have a value.

    Args:
        places: integers, each once.
        values: as many.
        size: of the vector.
        ascending: whether the places must be in order; then an error if they are not.
    """
    return tf.raw_ops.SparseToDense(
        sparse_indices=places,
        output_shape=tf.cast([size], places.dtype),
        sparse_values=values,
        default_value=tf.zeros([], values.dtype),
        validate_indices=ascending,
    )


def product(shape: Any) -> tf.Tensor | int:
    """How many elements a tensor of this shape has."""
    if isinstance(shape, tf.TensorShape):
        return int(shape.num_elements())
    return tf.reduce_prod(shape)
