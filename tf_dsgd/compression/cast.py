"""Fewer bits a number: tensors travel in another floating-point type."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from tf_dsgd import algorithm, arithmetic
from tf_dsgd.arithmetic import Gradient


@dataclasses.dataclass(frozen=True)
class Cast(algorithm.Codec):
    """Floating-point messages, and what is fetched, travel as `dtype`, rounded.

    Both ends compute in the weights' own type. Nothing is kept of what rounding takes away.
    """

    dtype: str

    def encode(self, worker: algorithm.Worker, index: int, tensor: Gradient) -> list[Gradient]:
        return [arithmetic.cast(tensor, self.dtype) if tensor.dtype.is_floating else tensor]

    def decode(self, place: algorithm.Place, index: int, sent: Sequence[Gradient]) -> Gradient:
        return arithmetic.cast(sent[0], place.weights[index].dtype)

    def encode_fetched(self, shard: algorithm.Shard, index: int, value: Gradient) -> list[Gradient]:
        return [arithmetic.cast(value, self.dtype) if value.dtype.is_floating else value]

    def decode_fetched(
        self, worker: algorithm.Worker, index: int, sent: Sequence[Gradient]
    ) -> Gradient:
        return arithmetic.cast(sent[0], worker.weights[index].dtype)
