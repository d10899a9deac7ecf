"""Many small tensors sent as one.

Every tensor that crosses between two processes is a call of its own, which costs both sides 0.1 to
0.2 ms of processor time whatever its size (TensorFlow 2.21 over loopback). A model has many small
tensors: biases, counters, the sums of metrics, headers. So those travel joined, as bytes; large
ones travel singly, since joining copies them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import tensorflow as tf

# Copying this much takes less time than a call.
_SMALL_BYTES = 64 << 10


@dataclasses.dataclass(frozen=True)
class Bundle:
    """How a list of tensors is sent: which of them joined, of which types and shapes."""

    count: int
    joined: tuple[tuple[int, tf.TensorSpec], ...]

    @classmethod
    def of(cls, tensors: Sequence[tf.Tensor]) -> Bundle:
        """The way to send tensors of these types and static shapes."""
        specs = [tf.TensorSpec(t.shape, t.dtype) for t in tensors]
        small = tuple((i, spec) for i, spec in enumerate(specs) if _is_small(spec))
        return cls(len(specs), small if len(small) > 1 else ())

    def pack(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """What is sent: the joined ones, if any, then the others."""
        if not self.joined:
            return list(tensors)
        places = {i for i, _ in self.joined}
        joined = tf.concat([to_bytes(tensors[i]) for i, _ in self.joined], 0)
        return [joined, *(t for i, t in enumerate(tensors) if i not in places)]

    def unpack(self, sent: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """The tensors, from what `pack` gave."""
        if not self.joined:
            return list(sent)
        joined, *others = sent
        sizes = [_num_bytes(spec) for _, spec in self.joined]
        parts = tf.split(joined, sizes)
        found = {
            i: from_bytes(part, spec.dtype, spec.shape.as_list())
            for (i, spec), part in zip(self.joined, parts, strict=True)
        }
        rest = iter(others)
        return [found[i] if i in found else next(rest) for i in range(self.count)]


def is_plain(dtype: tf.DType) -> bool:
    """Whether tensors of this type are so many bytes an element, and no more."""
    return dtype.is_bool or dtype.is_floating or dtype.is_integer or dtype.is_complex


def to_bytes(tensor: tf.Tensor) -> tf.Tensor:
    """A tensor's bytes, a vector of uint8."""
    if tensor.dtype.is_bool:
        tensor = tf.cast(tensor, tf.uint8)
    return tf.reshape(tf.bitcast(tensor, tf.uint8), [-1])


def from_bytes(data: tf.Tensor, dtype: tf.DType, shape: Sequence[int]) -> tf.Tensor:
    """The tensor of which these are the bytes; one length of `shape` may be -1."""
    if dtype.is_bool:
        return tf.cast(tf.reshape(data, shape), tf.bool)
    size = dtype.size
    return tf.bitcast(tf.reshape(data, [*shape, size] if size > 1 else shape), dtype)


def _is_small(spec: tf.TensorSpec) -> bool:
    if not is_plain(spec.dtype) or not spec.shape.is_fully_defined():
        return False
    return _num_bytes(spec) <= _SMALL_BYTES


def _num_bytes(spec: tf.TensorSpec) -> int:
    return int(spec.shape.num_elements()) * spec.dtype.size
