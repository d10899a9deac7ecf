"""The largest elements (Lin et al., Deep Gradient Compression, ICLR 2018).

    u <- m u + g;   v <- v + u;   send v where |v| is among the k largest;   u, v <- 0 there

(sections 3.2 and 3.3 of the paper, without sampling the threshold; with m = 0: v <- v + g.)
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tf_dsgd.checks import called, real
from tf_dsgd.compression.lossy import Lossy, Memory, number_of, product, spread

_ROUNDED = 1.0 - 2.0**-50
"""So that 0.07 of 100 elements are 7, although the product of the two is a little more."""


@called(examples={"fraction": "0.01"})
@dataclasses.dataclass(frozen=True)
class TopK(Lossy):
    """Sends the largest elements of what has gathered, and keeps the rest for later messages.

    Use it where the number of bytes must be known beforehand: whatever gradients are like, a
    message has the share `fraction` of its elements, at 64 bits each::

        u <- m u + g;   v <- v + u;   sent = v where |v| is among the k largest;   u, v <- 0 there

    with k = `fraction` times the number of elements, rounded up, m = `momentum`, g a message's
    gradient (or update) of one weight, and u and v each worker's own. With m = 0 what was applied
    and all v are together the sum of all gradients. A fraction of 1 is no compression.

    - With `momentum` compile an optimizer without: momentum is here, on what was not sent, too.
    - v and u stay on their worker over drains and epochs, and are in checkpoints.
      `strategy.residual()` tells how large v is.
    - A lost worker takes them along; its mini-batches go to others.
    - A gradient that is not finite ends training with an error.
    - Of a table k is a share of the rows that a message names, and of no others.
    - Finding the largest costs more than comparing with a threshold.

    Args:
        fraction: the share of elements that is sent; above 0 and at most 1.
        momentum: m, of DGC's momentum correction; at least 0 and below 1.

    Raises:
        ValueError: for a wrong argument, naming it.

    Deviations from the paper: the k largest are found exactly, of each weight; the fraction does
    not change by itself in a warm-up; clipping is the compiled optimizer's.

    Reference: Lin, Han, Mao, Wang, Dally, Deep Gradient Compression, ICLR 2018, section 3.

    Example:

    >>> codec = tf_dsgd.compression.TopK(0.01, momentum=0.9)
    >>> strategy = tf_dsgd.DownpourStrategy(push_every=4, fetch_every=4, compression=codec)
    """

    fraction: float
    _: dataclasses.KW_ONLY
    momentum: float = 0.0

    repeatable = False
    held_back = "residual"

    def __post_init__(self) -> None:
        if not 0 < real(self.fraction) <= 1:
            raise ValueError(
                "fraction of TopK must be a number above 0 and at most 1, the share of elements "
                f"that is sent. Received: {self.fraction!r}."
            )
        if not 0 <= real(self.momentum) < 1:
            raise ValueError(
                "momentum of TopK must be a number of at least 0 and below 1. "
                f"Received: {self.momentum!r}."
            )

    @property
    def keeps(self) -> tuple[str, ...]:
        """v, and u where there is momentum."""
        return ("residual", "momentum") if self.momentum else ("residual",)

    def compress(self, memory: Memory, value: tf.Tensor) -> list[tf.Tensor]:
        if self.momentum:
            value = memory.read("momentum") * tf.constant(self.momentum, memory.dtype) + value
        shape = tf.shape(value)
        gathered = tf.reshape(memory.read("residual") + value, [-1])
        memory.emitted = self._count(gathered)
        places = tf.math.top_k(tf.abs(gathered), memory.emitted, sorted=False).indices
        values = memory.as_sent(tf.gather(gathered, places))
        rest = gathered - spread(places, tf.cast(values, memory.dtype), tf.size(gathered))
        memory.write("residual", tf.reshape(rest, shape))
        if self.momentum:
            zeros = tf.zeros_like(values, memory.dtype)
            slowed = tf.tensor_scatter_nd_update(tf.reshape(value, [-1]), places[:, None], zeros)
            memory.write("momentum", tf.reshape(slowed, shape))
        return [places, values]

    def _count(self, value: tf.Tensor) -> tf.Tensor | int:
        number, fraction = number_of(value), float(self.fraction) * _ROUNDED
        if isinstance(number, int):
            return math.ceil(fraction * number)
        return tf.cast(tf.math.ceil(tf.cast(number, tf.float64) * fraction), tf.int32)

    def decompress(self, sent: Sequence[tf.Tensor], shape: Any, dtype: tf.DType) -> tf.Tensor:
        places, values = sent
        return tf.reshape(spread(places, values, product(shape)), shape)
