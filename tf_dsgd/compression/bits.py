"""Bits in bytes: eight of them each, the first one the highest."""

from __future__ import annotations

import tensorflow as tf

# Eight bytes of 0 or 1, taken as one number and multiplied by this, have them in the highest byte:
# the one in bit 8 i comes to bit 63 - i, and no two meet.
_GATHER = sum(1 << (63 - 9 * i) for i in range(8)) - (1 << 64)


def packed(bits: tf.Tensor) -> tf.Tensor:
    """A vector of bools as bytes; the last byte is filled up with zeros."""
    number = tf.size(bits) if bits.shape[0] is None else bits.shape[0]
    ones = tf.cast(tf.pad(bits, [[0, -number % 8]]), tf.uint8)
    words = tf.bitcast(tf.reshape(ones, [-1, 8]), tf.int64)
    gathered = tf.bitwise.right_shift(words * tf.constant(_GATHER, tf.int64), 56)
    return tf.cast(tf.bitwise.bitwise_and(gathered, 255), tf.uint8)


def unpacked(data: tf.Tensor, number: tf.Tensor | int) -> tf.Tensor:
    """The first `number` bits of bytes."""
    places = tf.constant([128, 64, 32, 16, 8, 4, 2, 1], tf.uint8)
    bits = tf.bitwise.bitwise_and(data[:, None], places) > 0
    return tf.reshape(bits, [-1])[:number]
