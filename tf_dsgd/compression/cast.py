"""Fewer bits a number: tensors travel in another floating-point type."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from tf_dsgd import algorithm, arithmetic
from tf_dsgd.arithmetic import Gradient
from tf_dsgd.checks import called, one_of


@called(examples={"dtype": '"bfloat16"'})
@dataclasses.dataclass(frozen=True)
class Cast(algorithm.Codec):
    """Messages, and what is fetched, travel rounded to 16 bits.

    Use it first: it halves the bytes of float32 in both directions, and costs next to nothing.
    `wire_dtype="bfloat16"` is another spelling of `compression=Cast("bfloat16")`. Both ends compute
    in the weights' own type, and nothing is kept of what rounding takes away: a lost worker takes
    nothing along.

    Args:
        dtype: `"bfloat16"`, of float32's range and 8 bits of precision, or `"float16"`, of 11 bits,
            in which what is above 65504 is infinite.

    Raises:
        ValueError: for another type, naming it.

    Example:

    >>> tf_dsgd.DownpourStrategy(compression=tf_dsgd.compression.Cast("bfloat16")).num_shards
    1
    """

    dtype: str

    def __post_init__(self) -> None:
        one_of("dtype of Cast", self.dtype, ("bfloat16", "float16"))

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
