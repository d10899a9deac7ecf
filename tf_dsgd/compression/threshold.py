"""Only what has grown to a threshold (Strom, Scalable distributed DNN training, Interspeech 2015).

    r <- r + g;   send (i, sign r_i) where |r_i| > tau;   r_i <- r_i - tau sign r_i  there

(algorithm 1 of the paper, lines 7 to 14; the shard in place of the paper's peers applies tau sign).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tf_dsgd.checks import called, real, truth
from tf_dsgd.compression import golomb
from tf_dsgd.compression.lossy import Lossy, Memory, name_of, product, spread

_MOST_PLACES = 1 << 31

# A large weight is compared in pieces of which the processor's cache holds what is made of them:
# of 14.6 M elements in 16 ms instead of 24 to 32. No more pieces than that, however large it is.
_PIECE, _MOST_PIECES = 1 << 19, 64


@called(examples={"tau": "0.002"})
@dataclasses.dataclass(frozen=True)
class Threshold(Lossy):
    """Sends tau and a sign for each element whose residual has grown above tau, and nothing else.

    Use it where bytes are what a run costs: of a large model a message has some thousandths of the
    elements, at 32 bits each, or, entropy coded, some 10::

        r <- r + g;   sent_i = tau sign(r_i) where |r_i| > tau, else 0;   r <- r - sent

    with tau = `tau`, g a message's gradient (or update) of one weight, and r the residual, which
    each worker keeps for itself. What was applied and what workers keep are together the sum of all
    gradients. Choose tau by the size of a message's gradients: where they stay larger than tau, r
    grows without end, and the model lags behind. That is an element of tau at most a message.

    - A residual stays on its worker over drains and epochs, and is in checkpoints.
      `strategy.residual()` tells how large it is.
    - A lost worker takes its residual along; its mini-batches go to others.
    - A gradient that is not finite ends training with an error.
    - Of a table the rows that a message names are looked at, and no others.

    Args:
        tau: the threshold, in units of a message's tensor: a sum of `push_every` gradients, or with
            `local_rule="optimizer"` of changes of a weight; above 0 and finite.
        entropy: whether places travel as gaps in a Rice code, which is about a third of the bytes,
            instead of as 32 bits each. Such messages carry a fingerprint.
        clip: residuals are cut to at most this after sending, as DL4J does; at least tau. What is
            cut off is lost, and counted in the cell `"clipped"`. None for no limit.

    Raises:
        ValueError: for a wrong argument, naming it.

    Deviations from the paper: a shard, with the compiled optimizer, is between the workers; each
    element's place has 31 bits and its sign one, as in the paper, and the Rice code is
    Golomb's with a power of two.

    Reference: Strom, Scalable Distributed DNN Training Using Commodity GPU Cloud Computing,
    Interspeech 2015, algorithm 1.

    Example:

    >>> codec = tf_dsgd.compression.Threshold(0.002, entropy=True)
    >>> strategy = tf_dsgd.DownpourStrategy(push_every=4, fetch_every=4, compression=codec)
    """

    tau: float
    _: dataclasses.KW_ONLY
    entropy: bool = False
    clip: float | None = None

    repeatable = False
    held_back = "residual"

    def __post_init__(self) -> None:
        if not 0 < real(self.tau) < float("inf"):
            raise ValueError(
                "tau of Threshold must be a number above 0 and finite: what an element's residual "
                f"must exceed to be sent. Received: {self.tau!r}."
            )
        truth("entropy of Threshold", self.entropy)
        if self.clip is not None and not self.tau <= real(self.clip) < float("inf"):
            raise ValueError(
                f"clip of Threshold must be a finite number of at least tau, {self.tau!r}, or "
                f"None for residuals without a limit. Received: {self.clip!r}."
            )

    @property
    def keeps(self) -> tuple[str, ...]:
        """The residual, and how much of it was cut off."""
        return ("residual",) if self.clip is None else ("residual", "clipped")

    @property
    def overdue_above(self) -> float:  # type: ignore[override]
        """tau: a message takes no more of an element, however much of it waits."""
        return float(self.tau)

    def compress(self, memory: Memory, value: tf.Tensor) -> list[tf.Tensor]:
        grown = tf.reshape(memory.read("residual") + value, [-1])
        self._check_type(memory.weight)
        tau = memory.as_applied(tf.constant(float(self.tau), memory.dtype))
        places = _above(grown, tau)
        memory.emitted = tf.size(places, tf.int64)
        positive = tf.gather(grown, places) > 0
        sent = spread(places, tf.where(positive, tau, -tau), tf.size(grown), ascending=True)
        residual = tf.reshape(grown - sent, tf.shape(value))
        memory.write("residual", self._clipped(memory, residual))
        if self.entropy:
            return [golomb.encode(places, positive)]
        _check_size(memory.weight)
        return [tf.cast(places * 2 + tf.cast(positive, tf.int64), tf.uint32)]

    def _check_type(self, weight: tf.Variable) -> None:
        """That tau is a number there: as 0 it would send nothing of anything, as infinity never."""
        dtype = weight.dtype
        # bfloat16 has the exponents of float32.
        alike = np.float32 if dtype == tf.bfloat16 else dtype.as_numpy_dtype
        least, most = float(np.finfo(alike).tiny), float(dtype.max)
        if not least <= self.tau <= most:
            raise ValueError(
                f"tau of Threshold must be from {least:.3g} to {most:.3g} for weights of "
                f"{dtype.name}, as {name_of(weight)}. Received: {self.tau!r}."
            )

    def _clipped(self, memory: Memory, residual: tf.Tensor) -> tf.Tensor:
        if self.clip is None:
            return residual
        limit = tf.constant(float(self.clip), residual.dtype)
        cut = tf.clip_by_value(residual, -limit, limit)
        lost = tf.reduce_sum(tf.cast(tf.abs(residual - cut), tf.float64))
        memory.whole("clipped", [], tf.float64).assign_add(lost, read_value=False)
        return cut

    def decompress(self, sent: Sequence[tf.Tensor], shape: Any, dtype: tf.DType) -> tf.Tensor:
        size = product(shape)
        if self.entropy:
            places, positive = golomb.decode(sent[0], size)
        else:
            code = tf.cast(sent[0], tf.int64)
            places, positive = tf.bitwise.right_shift(code, 1), (code & 1) > 0
        tau = tf.constant(float(self.tau), dtype)
        values = tf.where(positive, tau, -tau)
        return tf.reshape(spread(places, values, size, ascending=True), shape)


def _above(value: tf.Tensor, tau: tf.Tensor) -> tf.Tensor:
    """The places of a vector's elements that are above tau, ascending."""
    size = value.shape.num_elements() or 0
    piece = max(_PIECE, -(-size // _MOST_PIECES))
    if size <= piece:
        return tf.where(tf.abs(value) > tau)[:, 0]
    begins = range(0, size, piece)
    found = [tf.where(tf.abs(value[i : i + piece]) > tau)[:, 0] + i for i in begins]
    return tf.concat(found, 0)


def _check_size(weight: tf.Variable) -> None:
    if (weight.shape.num_elements() or 0) > _MOST_PLACES:
        raise ValueError(
            f"Threshold sends places of at most {_MOST_PLACES} elements in 31 bits. Use "
            f"entropy=True for more. Received: {name_of(weight)} of the shape {weight.shape}."
        )
