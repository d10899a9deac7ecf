"""What travels between a worker and a shard, and with which part of the worker it has to do."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tf_dsgd.engine.bundles import Bundle, On, anywhere
from tf_dsgd.engine.state import Store


@dataclasses.dataclass(frozen=True)
class Parcel:
    """What is in those between a worker and a shard, and how it is joined."""

    content: Any
    bundle: Bundle

    def unpack(self, parcel: Sequence[tf.Tensor], on: On = anywhere) -> Any:
        flat = self.bundle.unpack(parcel, on)
        return tf.nest.pack_sequence_as(self.content, flat, expand_composites=True)


def are_rows(content: Any) -> list[bool]:
    """Which of all tensors in it are rows of a sparse gradient, or their numbers."""
    found: list[bool] = []
    for each in tf.nest.flatten(content):
        rows = (each.values, each.indices) if isinstance(each, tf.IndexedSlices) else ()
        tensors = tf.nest.flatten(each, expand_composites=True)
        found += [any(tensor is row for row in rows) for tensor in tensors]
    return found


def parts_of(store: Store, variables: Sequence[Any], tensors: Sequence[Any]) -> list[int]:
    """On which parts of a worker the variables are whose tensors these are, of each of them."""
    several = store.num_parts > 1
    return [
        variable.on_workers().part if several else 0
        for variable, tensor in zip(variables, tensors, strict=True)
        for _ in tf.nest.flatten(tensor, expand_composites=True)
    ]
