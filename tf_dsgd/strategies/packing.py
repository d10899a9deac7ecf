"""How mini-batches are sent to a worker in another process.

Batches of dense tensors are joined along the first axis, and all components and their lengths into
one vector of bytes: a round of twenty batches is one transfer, without the encoding that
TensorFlow needs for variants (seven times slower for 4 MB), and a small batch does not pay for
several (each costs both sides half a millisecond). Strings travel beside. All other batches,
ragged, sparse or of shapes that differ, travel as variants.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tf_dsgd import _tf
from tf_dsgd.engine.bundles import from_bytes, is_plain, to_bytes

# Where each component begins: TensorFlow then takes it out without copying it.
_ALIGNMENT = 64


class Packing:
    """Packs a vector of batches, `tf.variant` optionals, and takes them apart on a worker.

    Args:
        element_spec: type of a batch.
    """

    def __init__(self, element_spec: Any):
        self._element_spec = element_spec
        self._components = tf.nest.flatten(element_spec)
        self._dense = bool(self._components) and all(_joinable(c) for c in self._components)
        if self._dense:
            beside = [c for c in self._components if not is_plain(c.dtype)]
            self.specs = [
                tf.TensorSpec([None], tf.uint8),
                *(tf.TensorSpec([None, *c.shape[1:]], c.dtype) for c in beside),
            ]
        else:
            self.specs = [tf.TensorSpec([None], tf.variant)]
        self._join: _tf.BoundFunction | None = None

    def pack(self, batches: tf.Tensor) -> list[tf.Tensor]:
        """What is sent for a vector of batches; call it on the host."""
        if not self._dense:
            return [batches]
        self.prepare()
        return self._join(batches)  # type: ignore[misc]

    def prepare(self) -> None:
        """Traces what packs, once; call it on the host, in one thread."""
        if self._dense and self._join is None:
            concrete = tf.function(self._joined, autograph=False).get_concrete_function(
                tf.TensorSpec([None], tf.variant)
            )
            self._join = _tf.BoundFunction(concrete, concrete.captured_inputs)

    def _batch(self, variant: tf.Tensor) -> Any:
        optional = tf.nest.pack_sequence_as(
            tf.OptionalSpec(self._element_spec), [variant], expand_composites=True
        )
        return optional.get_value()

    def _joined(self, batches: tf.Tensor) -> list[tf.Tensor]:
        count = tf.size(batches)
        arrays = [
            tf.TensorArray(c.dtype, count, element_shape=c.shape, infer_shape=False)
            for c in self._components
        ]
        lengths = tf.TensorArray(tf.int64, count, element_shape=[len(self._components)])

        def body(k: tf.Tensor, arrays: Any, lengths: Any) -> Any:
            values = tf.nest.flatten(self._batch(batches[k]))
            arrays = [a.write(k, v) for a, v in zip(arrays, values, strict=True)]
            sizes = tf.stack([tf.shape(v, tf.int64)[0] for v in values])
            return k + 1, arrays, lengths.write(k, sizes)

        _, arrays, lengths = tf.while_loop(
            lambda k, *_: k < count, body, (tf.constant(0), arrays, lengths), parallel_iterations=1
        )
        joined = [a.concat() for a in arrays]
        head = tf.concat([tf.cast(count, tf.int64)[None], tf.reshape(lengths.stack(), [-1])], 0)
        parts = []
        for tensor in [head, *(t for t in joined if is_plain(t.dtype))]:
            data = to_bytes(tensor)
            size = tf.size(data, tf.int64)
            parts += [data, tf.zeros([_up(size) - size], tf.uint8)]
        return [tf.concat(parts, 0), *(t for t in joined if not is_plain(t.dtype))]

    def unpack(self, packed: Sequence[tf.Tensor]) -> tuple[tf.Tensor, Callable[[tf.Tensor], Any]]:
        """(number of batches, batch by number), traced for a worker."""
        if not self._dense:
            return tf.size(packed[0]), lambda k: self._batch(packed[0][k])
        data, *beside = packed
        count = from_bytes(data[:8], tf.int64, [1])[0]
        size = 8 * (1 + count * len(self._components))
        lengths = tf.reshape(from_bytes(data[8:size], tf.int64, [-1]), [count, -1])
        ends = tf.cumsum(lengths)
        begin = _up(size)
        strings, joined = iter(beside), []
        for c, spec in enumerate(self._components):
            if not is_plain(spec.dtype):
                joined.append(next(strings))
                continue
            row = math.prod(spec.shape[1:]) * spec.dtype.size
            size = row * ends[-1, c]
            joined.append(from_bytes(data[begin : begin + size], spec.dtype, [-1, *spec.shape[1:]]))
            begin += _up(size)

        def batch(k: tf.Tensor) -> Any:
            values = []
            for c, (spec, tensor) in enumerate(zip(self._components, joined, strict=True)):
                value = tensor[ends[k, c] - lengths[k, c] : ends[k, c]]
                value.set_shape(spec.shape)
                values.append(value)
            return tf.nest.pack_sequence_as(self._element_spec, values)

        return tf.cast(count, tf.int32), batch


def _up(size: tf.Tensor) -> tf.Tensor:
    return (size + _ALIGNMENT - 1) // _ALIGNMENT * _ALIGNMENT


def _joinable(spec: Any) -> bool:
    """Whether tensors of this type can be joined along the first axis whatever they are."""
    return (
        isinstance(spec, tf.TensorSpec)
        and spec.dtype not in (tf.variant, tf.resource)
        and spec.shape.rank is not None
        and spec.shape.rank > 0
        and spec.shape[1:].is_fully_defined()
        and spec.shape[1:].num_elements() > 0
    )
