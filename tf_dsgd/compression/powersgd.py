"""Two thin matrices (Vogels, Karimireddy, Jaggi, PowerSGD, NeurIPS 2019, algorithms 1 and 2).

M = G + E;   P = M Q;   P^ = orthonormalised P;   Q = M^T P^;   sent = P^, Q;   E = M - P^ Q^T
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tf_dsgd.checks import called, positive_int
from tf_dsgd.compression.lossy import ErrorFeedback, Memory

_FIRST = (2, 7)  # the seed of the first Q, the same on all workers


@called(examples={"rank": "4"})
@dataclasses.dataclass(frozen=True)
class PowerSGD(ErrorFeedback):
    """Sends a matrix of low rank in place of each gradient, found by a step of power iteration.

    Use it for models of large matrices: n m numbers become r (n + m). It sends what the rows and
    columns of a gradient have in common, and keeps the rest for later messages::

        M = G + E;   P = M Q;   P^ = orthonormalised P;   Q <- M^T P^
        sent = P^ Q^T;   E <- M - P^ Q^T

    with r = `rank`, G a message's gradient (or update) of one weight, as a matrix whose columns are
    the weight's last axis, and E and Q, which each worker keeps for itself: Q from one message to
    the next, so that the iteration goes on.

    - A weight of which a side of the matrix is at most r (a bias) travels as it is.
    - E and Q stay on their worker over drains and epochs, and are in checkpoints.
      `strategy.residual()` tells how large E is.
    - A lost worker takes them along; its mini-batches go to others.
    - A gradient that is not finite ends training with an error.
    - Of a table the rows that a message names are the matrix; Q is one for all rows.

    Args:
        rank: r; at least 1. The paper takes 1 to 4.

    Raises:
        ValueError: for a wrong argument, naming it.

    Deviations from the paper: nothing is averaged between P and Q, since no worker waits for
    others: each sends the best matrix of its own that it finds. A kernel of a convolution is a
    matrix of its output channels and all else.

    Reference: Vogels, Karimireddy, Jaggi, PowerSGD: Practical Low-Rank Gradient Compression for
    Distributed Optimization, NeurIPS 2019, algorithms 1 and 2.

    Example:

    >>> strategy = tf_dsgd.DownpourStrategy(compression=tf_dsgd.compression.PowerSGD(2))
    """

    rank: int

    def __post_init__(self) -> None:
        positive_int("rank of PowerSGD", self.rank)

    @property
    def keeps(self) -> tuple[str, ...]:
        """E and Q."""
        return ("residual", "right")

    def compress(self, memory: Memory, value: tf.Tensor) -> list[tf.Tensor]:
        if not self._is_compressed(memory.weight.shape):
            return [tf.cast(self.in_range(memory, value), memory.weight.dtype)]
        return super().compress(memory, value)

    def _is_compressed(self, shape: tf.TensorShape) -> bool:
        if shape.rank < 2:
            return False
        columns = shape[-1]
        return min(shape.num_elements() // max(columns, 1), columns) > self.rank

    def chosen(self, memory: Memory, wanted: tf.Tensor) -> list[tf.Tensor]:
        columns = wanted.shape[-1]
        matrix = tf.reshape(wanted, [-1, columns])
        right = memory.whole("right", [columns, self.rank], memory.dtype)
        first = tf.random.stateless_normal([columns, self.rank], _FIRST, dtype=memory.dtype)
        before = tf.where(tf.reduce_any(right != 0), right, first)
        left = tf.linalg.qr(tf.matmul(matrix, before)).q
        # Rounded as it travels before Q is made for it: what is sent belongs together.
        left = memory.as_applied(left)
        found = tf.matmul(matrix, left, transpose_a=True)
        # Of a table a message may name fewer rows than the rank.
        found = tf.pad(found, [[0, 0], [0, self.rank - tf.shape(found)[1]]])
        found = tf.ensure_shape(found, [columns, self.rank])
        right.assign(found, read_value=False)
        return [memory.as_sent(part) for part in (left, found)]

    def decompress(self, sent: Sequence[tf.Tensor], shape: Any, dtype: tf.DType) -> tf.Tensor:
        if len(sent) == 1:
            return sent[0]
        wide = tf.float32 if dtype.size < 4 else dtype
        left, right = (tf.cast(part, wide) for part in sent)
        low = tf.matmul(left, right[:, : tf.shape(left)[1]], transpose_b=True)
        return tf.reshape(tf.saturate_cast(low, dtype), shape)
