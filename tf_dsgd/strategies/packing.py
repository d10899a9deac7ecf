"""How mini-batches are sent to a worker in another process.

Batches of dense tensors are joined along the first axis, one tensor per component, with their
lengths beside: a round of twenty batches is one transfer per component, without the encoding that
TensorFlow needs for variants (seven times slower for 4 MB). All other batches, ragged, sparse or
of shapes that differ, travel as variants.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tf_dsgd import _tf


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
            self.specs = [
                *(tf.TensorSpec([None, *c.shape[1:]], c.dtype) for c in self._components),
                tf.TensorSpec([len(self._components), None], tf.int64),
            ]
        else:
            self.specs = [tf.TensorSpec([None], tf.variant)]
        self._join: _tf.BoundFunction | None = None

    def pack(self, batches: tf.Tensor) -> list[tf.Tensor]:
        """What is sent for a vector of batches; call it on the host."""
        if not self._dense:
            return [batches]
        if self._join is None:
            concrete = tf.function(self._joined, autograph=False).get_concrete_function(
                tf.TensorSpec([None], tf.variant)
            )
            self._join = _tf.BoundFunction(concrete, concrete.captured_inputs)
        return self._join(batches)

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
        return [*joined, tf.transpose(lengths.stack())]

    def unpack(self, packed: Sequence[tf.Tensor]) -> tuple[tf.Tensor, Callable[[tf.Tensor], Any]]:
        """(number of batches, batch by number), traced for a worker."""
        if not self._dense:
            return tf.size(packed[0]), lambda k: self._batch(packed[0][k])
        *joined, lengths = packed
        ends = tf.cumsum(lengths, axis=1)

        def batch(k: tf.Tensor) -> Any:
            values = []
            for c, (spec, tensor) in enumerate(zip(self._components, joined, strict=True)):
                value = tensor[ends[c, k] - lengths[c, k] : ends[c, k]]
                value.set_shape(spec.shape)
                values.append(value)
            return tf.nest.pack_sequence_as(self._element_spec, values)

        return tf.shape(lengths)[1], batch


def _joinable(spec: Any) -> bool:
    """Whether tensors of this type can be joined along the first axis whatever they are."""
    return (
        isinstance(spec, tf.TensorSpec)
        and spec.dtype not in (tf.variant, tf.resource)
        and spec.shape.rank is not None
        and spec.shape.rank > 0
        and spec.shape[1:].is_fully_defined()
    )
