"""One bit an element (Seide, Fu, Droppo, Li, Yu, 1-bit SGD, Interspeech 2014).

    p = g + e;   sent = the mean of a column's p >= 0 where p >= 0, else of its p < 0
    e = p - sent

(error feedback as in the paper, with its choice of the two values: the least square error.)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tf_dsgd.checks import called
from tf_dsgd.compression.bits import packed, unpacked
from tf_dsgd.compression.lossy import ErrorFeedback, Memory, product


@called()
@dataclasses.dataclass(frozen=True)
class OneBit(ErrorFeedback):
    """Sends the sign of each element, and two numbers for each column.

    Use it for up to 32 times fewer bytes, with every element in every message: nothing waits for
    long, and there is nothing to choose::

        p = g + e;   sent_ij = a_j where p_ij >= 0, else b_j;   e <- p - sent
        a_j, b_j = the means of column j's p_ij >= 0, and of its p_ij < 0

    with g a message's gradient (or update) of one weight, and e, the error, which each worker keeps
    for itself. A column is an entry of the weight's last axis; all of a vector is one column.

    - e stays on its worker over drains and epochs, and is in checkpoints. `strategy.residual()`
      tells how large it is.
    - A lost worker takes its error along; its mini-batches go to others.
    - A gradient that is not finite ends training with an error.
    - Of a table the rows that a message names are a matrix of their own.

    Deviations from the paper: a shard is between the workers, which get whole weights from it and
    no quantized ones; the paper's first mini-batches without compression are not here.

    Reference: Seide, Fu, Droppo, Li, Yu, 1-Bit Stochastic Gradient Descent and its Application to
    Data-Parallel Distributed Training of Speech DNNs, Interspeech 2014, section 3.

    Example:

    >>> strategy = tf_dsgd.DownpourStrategy(compression=tf_dsgd.compression.OneBit())
    """

    def chosen(self, memory: Memory, wanted: tf.Tensor) -> list[tf.Tensor]:
        columns = memory.weight.shape[-1] if memory.weight.shape.rank > 1 else 1
        matrix = tf.reshape(wanted, [_rows(tf.size(wanted), columns), columns])
        positive = matrix >= 0
        means = [_mean(matrix, positive), _mean(matrix, tf.logical_not(positive))]
        return [packed(tf.reshape(positive, [-1])), memory.as_sent(tf.stack(means))]

    def decompress(self, sent: Sequence[tf.Tensor], shape: Any, dtype: tf.DType) -> tf.Tensor:
        bits, means = sent
        size, columns = product(shape), means.shape[1]
        flat = unpacked(bits, size)
        positive = tf.reshape(flat, tf.stack([_rows(size, columns), columns]))
        return tf.reshape(tf.where(positive, means[0], means[1]), shape)


def _rows(size: tf.Tensor | int, columns: int) -> tf.Tensor | int:
    """Of a matrix of so many elements and columns; also where there are none."""
    return size // columns if columns else 0


def _mean(matrix: tf.Tensor, chosen: tf.Tensor) -> tf.Tensor:
    total = tf.reduce_sum(tf.where(chosen, matrix, tf.zeros_like(matrix)), 0)
    return tf.math.divide_no_nan(total, tf.reduce_sum(tf.cast(chosen, matrix.dtype), 0))
