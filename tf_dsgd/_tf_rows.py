"""Rows of which it is known that each is named once. Private names of TF 2.21.

It is known by their type, which TensorFlow keeps where it packs and unpacks them: between
functions, and in what is sent.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf


class RowsOnce(tf.IndexedSlices):
    """Some rows of a tensor, each named once."""

    @property
    def _type_spec(self) -> tf.IndexedSlicesSpec:
        return _RowsOnceSpec(*super()._type_spec._serialize())


class _RowsOnceSpec(tf.IndexedSlicesSpec):
    value_type = property(lambda self: RowsOnce)

    def _from_components(self, tensor_list: Sequence[tf.Tensor]) -> RowsOnce:
        return RowsOnce(*tensor_list)
