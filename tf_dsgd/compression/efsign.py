"""Signs and one scale (Karimireddy et al., Error Feedback Fixes SignSGD, ICML 2019, algorithm 1).

p = g + e;   sent = mean(|p|) sign(p);   e = p - sent
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tf_dsgd.checks import called
from tf_dsgd.compression.bits import packed, unpacked
from tf_dsgd.compression.lossy import ErrorFeedback, Memory, number_of, product


@called()
@dataclasses.dataclass(frozen=True)
class EFSign(ErrorFeedback):
    """Sends the sign of each element, and one scale for each weight.

    Use it as `OneBit`, where columns are short, or the scale should not differ between them: 32
    times fewer bytes than float32, and nothing to choose::

        p = g + e;   sent = (|p|_1 / d) sign(p);   e <- p - sent

    with g a message's gradient (or update) of one weight of d elements, and e, the error, which
    each worker keeps for itself. sign(0) is 1.

    - e stays on its worker over drains and epochs, and is in checkpoints. `strategy.residual()`
      tells how large it is.
    - A lost worker takes its error along; its mini-batches go to others.
    - A gradient that is not finite ends training with an error.
    - Of a table the rows that a message names are compressed together.

    Deviations from the paper: the learning rate is the shard's, so that p is in units of the
    gradient (with `local_rule="optimizer"`, of the update, as in the paper); each weight has a
    scale of its own.

    Reference: Karimireddy, Rebjock, Stich, Jaggi, Error Feedback Fixes SignSGD and other Gradient
    Compression Schemes, ICML 2019, algorithm 1.

    Example:

    >>> strategy = tf_dsgd.DownpourStrategy(compression=tf_dsgd.compression.EFSign())
    """

    def chosen(self, memory: Memory, wanted: tf.Tensor) -> list[tf.Tensor]:
        flat = tf.reshape(wanted, [-1])
        size = tf.cast(number_of(flat), memory.dtype)
        scale = tf.math.divide_no_nan(tf.reduce_sum(tf.abs(flat)), size)
        return [packed(flat >= 0), memory.as_sent(scale)]

    def decompress(self, sent: Sequence[tf.Tensor], shape: Any, dtype: tf.DType) -> tf.Tensor:
        bits, scale = sent
        return tf.reshape(tf.where(unpacked(bits, product(shape)), scale, -scale), shape)
