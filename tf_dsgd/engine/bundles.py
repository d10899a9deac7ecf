"""Many small tensors sent as one.

Every tensor that crosses between two processes is a call of its own, which costs both sides 0.1 to
0.2 ms of processor time whatever its size (TensorFlow 2.21 over loopback). A model has many small
tensors: biases, counters, the sums of metrics, headers; and a gradient of a table has but the rows
that were named. So those travel joined, as bytes; large ones travel singly, since joining copies
them.

Where a worker is several processes, each joins what it has of its own.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

# Copying this much takes less time than a call.
_SMALL_BYTES = 64 << 10


On = Callable[[int, Callable[[], Any]], Any]
"""(a part of the worker, what to trace there) -> what that gives."""


def anywhere(part: int, trace: Callable[[], Any]) -> Any:
    """An `On` that leaves it to TensorFlow."""
    del part
    return trace()


@dataclasses.dataclass(frozen=True)
class Joined:
    """Tensors that are sent as one: their places in the list, types and shapes.

    Of rows it is not known before how many there are: their bytes' numbers come first.
    """

    part: int
    """Of the worker, where they are joined, or taken apart."""
    specs: tuple[tuple[int, tf.TensorSpec], ...]

    @property
    def num_bytes(self) -> int | None:
        """Of what is sent; None where there are rows."""
        specs = [spec for _, spec in self.specs]
        known = all(spec.shape.is_fully_defined() for spec in specs)
        return sum(map(_num_bytes, specs)) if known else None

    def pack(self, tensors: Sequence[tf.Tensor]) -> tf.Tensor:
        """The one that is sent."""
        data = [to_bytes(tensors[i]) for i, _ in self.specs]
        rows = [
            tf.size(each, tf.int64)
            for each, (_, spec) in zip(data, self.specs, strict=True)
            if not spec.shape.is_fully_defined()
        ]
        head = [to_bytes(tf.stack(rows))] if rows else []
        return tf.concat([*head, *data], 0)

    def unpack(self, sent: tf.Tensor) -> dict[int, tf.Tensor]:
        """The tensors by their places."""
        number = sum(not spec.shape.is_fully_defined() for _, spec in self.specs)
        known = [
            _num_bytes(spec) if spec.shape.is_fully_defined() else None for _, spec in self.specs
        ]
        if number:
            head = number * tf.int64.size
            rows = iter(tf.unstack(from_bytes(sent[:head], tf.int64, [number])))
            sizes = tf.stack([next(rows) if size is None else size for size in known])
            pieces = tf.split(sent[head:], sizes, num=len(known))
        else:
            pieces = tf.split(sent, known)
        return {
            i: from_bytes(piece, spec.dtype, [-1 if d is None else d for d in spec.shape])
            for (i, spec), piece in zip(self.specs, pieces, strict=True)
        }


@dataclasses.dataclass(frozen=True)
class Bundle:
    """How a list of tensors is sent: which of them joined, of which types and shapes."""

    count: int
    joined: tuple[Joined, ...]
    single: tuple[tf.TensorSpec, ...] = ()

    @classmethod
    def of(
        cls,
        tensors: Sequence[tf.Tensor],
        parts: Sequence[int] | None = None,
        rows: Sequence[bool] | None = None,
    ) -> Bundle:
        """The way to send tensors of these types and static shapes.

        Args:
            tensors: of each bundle.
            parts: of the worker, which have them; by default all are on one.
            rows: which are some rows of something, and few enough to be copied; by default none.
        """
        specs = [tf.TensorSpec(t.shape, t.dtype) for t in tensors]
        none = [0] * len(specs)
        found: dict[int, list[tuple[int, tf.TensorSpec]]] = {}
        for i, (spec, part, is_rows) in enumerate(
            zip(specs, parts or none, rows or none, strict=True)
        ):
            if is_small(spec) or (is_rows and _are_rows(spec)):
                found.setdefault(part, []).append((i, spec))
        several = [(part, tuple(each)) for part, each in found.items() if len(each) > 1]
        places = {i for _, each in several for i, _ in each}
        single = tuple(spec for i, spec in enumerate(specs) if i not in places)
        return cls(len(specs), tuple(Joined(*each) for each in several), single)

    @property
    def sent(self) -> list[tf.TensorSpec]:
        """Types and shapes of what is sent."""
        joined = [tf.TensorSpec([each.num_bytes], tf.uint8) for each in self.joined]
        return [*joined, *self.single]

    def pack(self, tensors: Sequence[tf.Tensor], on: On = anywhere) -> list[tf.Tensor]:
        """What is sent: the joined ones, if any, then the others."""
        places = {i for joined in self.joined for i, _ in joined.specs}
        packed = [on(j.part, functools.partial(j.pack, tensors)) for j in self.joined]
        return [*packed, *(t for i, t in enumerate(tensors) if i not in places)]

    def unpack(self, sent: Sequence[tf.Tensor], on: On = anywhere) -> list[tf.Tensor]:
        """The tensors, from what `pack` gave."""
        rest = iter(sent)
        found: dict[int, tf.Tensor] = {}
        for joined in self.joined:
            found |= on(joined.part, functools.partial(joined.unpack, next(rest)))
        return [found[i] if i in found else next(rest) for i in range(self.count)]


def is_small(spec: Any) -> bool:
    """Whether a tensor, or a variable, is so small that to join it costs less than a call."""
    if not is_plain(spec.dtype) or not spec.shape.is_fully_defined():
        return False
    return _num_bytes(spec) <= _SMALL_BYTES


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


def _are_rows(spec: tf.TensorSpec) -> bool:
    if not is_plain(spec.dtype) or not spec.shape.rank:
        return False
    return spec.shape[0] is None and spec.shape[1:].is_fully_defined()


def _num_bytes(spec: Any) -> int:
    return int(spec.shape.num_elements()) * spec.dtype.size
