"""Places and signs in a Rice code: Golomb's (1966) for gaps, its parameter a power of two.

A gap g between two places, 0 where they are neighbours, is

    q = g >> k zeros and a one,        the lower k bits of g,        the sign

Here all q come first and the bits of fixed length after them, so that each part is made, and read,
by a few operations on whole vectors. k is chosen from the density of the message and sent with it.
A message is a vector of bytes:

    fingerprint of the rest (8)   number of places (8)   k (1)   q's   fixed parts
"""

from __future__ import annotations

import math

import tensorflow as tf

from tf_dsgd.compression.bits import packed, unpacked
from tf_dsgd.compression.lossy import spread

_FINGERPRINT, _HEAD = 8, 17
_MOST_BITS = 40  # of the lower part: places are below 2**62 in any case


def encode(places: tf.Tensor, signs: tf.Tensor) -> tf.Tensor:
    """Bytes of ascending places, int64, and their signs, bool."""
    number = tf.size(places, tf.int64)
    gaps = places - tf.concat([tf.constant([-1], tf.int64), places[:-1]], 0)[: tf.size(places)] - 1
    k = _parameter(gaps, number)
    ends = tf.cumsum(tf.bitwise.right_shift(gaps, k) + 1) - 1
    length = tf.concat([tf.zeros([1], tf.int64), ends + 1], 0)[-1]
    ones = spread(ends, tf.ones_like(ends, tf.uint8), length, ascending=True)
    low = tf.bitwise.bitwise_and(gaps, tf.bitwise.left_shift(tf.ones([], tf.int64), k) - 1)
    fixed = tf.bitwise.left_shift(low, tf.ones([], tf.int64)) + tf.cast(signs, tf.int64)
    bits = tf.bitwise.right_shift(fixed[:, None], tf.range(k + 1)) & 1
    body = [packed(ones > 0), packed(tf.reshape(bits > 0, [-1]))]
    head = [tf.bitcast(number, tf.uint8), tf.cast(k, tf.uint8)[None]]
    rest = tf.concat([*head, *body], 0)
    return tf.concat([_fingerprint(rest), rest], 0)


def decode(message: tf.Tensor, size: tf.Tensor | int) -> tuple[tf.Tensor, tf.Tensor]:
    """(places, signs) of `encode`, all of them below `size`.

    Raises:
        tf.errors.InvalidArgumentError: if it is not as it was sent, or of a larger tensor; nothing
            is read out of bounds then.
    """
    length = tf.size(message)
    message = _only_if(length >= _HEAD, "it is too short", message)
    same = tf.reduce_all(_fingerprint(message[_FINGERPRINT:]) == message[:_FINGERPRINT])
    message = _only_if(same, "its fingerprint is another one", message)
    number = tf.bitcast(message[_FINGERPRINT : _FINGERPRINT + 8], tf.int64)
    k = tf.cast(message[_HEAD - 1], tf.int64)
    body = tf.cast(length - _HEAD, tf.int64)
    fixed = (number * (k + 1) + 7) // 8  # bytes of the fixed parts
    fits = (number >= 0) & (number <= tf.cast(size, tf.int64)) & (k <= _MOST_BITS) & (fixed <= body)
    message = _only_if(fits, "its length is wrong", message)
    begins = length - tf.cast(fixed, tf.int32)
    unary = message[_HEAD:begins]
    ends = tf.where(unpacked(unary, tf.size(unary) * 8))[:, 0]
    ends = _only_if(tf.size(ends, tf.int64) == number, "places are missing", ends)
    bits = tf.cast(unpacked(message[begins:], tf.size(ends) * tf.cast(k + 1, tf.int32)), tf.int64)
    bits = tf.reshape(bits, tf.stack([number, k + 1]))
    low = tf.reduce_sum(tf.bitwise.left_shift(bits, tf.range(k + 1)), 1)
    before = tf.concat([tf.constant([-1], tf.int64), ends[:-1]], 0)[: tf.size(ends)]
    gaps = tf.bitwise.left_shift(ends - before - 1, k) + tf.bitwise.right_shift(low, 1)
    places = tf.cumsum(gaps + 1) - 1
    inside = tf.reduce_all((places >= 0) & (places < tf.cast(size, tf.int64)))
    return _only_if(inside, "a place is outside of the tensor", places), (low & 1) > 0


def _parameter(gaps: tf.Tensor, number: tf.Tensor) -> tf.Tensor:
    """k: 2^k is about ln 2 of the mean gap, where a geometric distribution has its median."""
    mean = tf.math.divide_no_nan(
        tf.cast(tf.reduce_sum(gaps), tf.float64), tf.cast(number, tf.float64)
    )
    wanted = tf.math.log(tf.maximum(mean * math.log(2.0), 1.0)) / math.log(2.0)
    return tf.cast(tf.minimum(tf.round(wanted), _MOST_BITS), tf.int64)


def _fingerprint(data: tf.Tensor) -> tf.Tensor:
    return tf.raw_ops.Fingerprint(data=data[None], method="farmhash64")[0]


def _only_if(right: tf.Tensor, what: str, value: tf.Tensor) -> tf.Tensor:
    """`value`, which nobody gets where this is not right."""
    said = f"A compressed message is not as it was sent: {what}. Received, elements:"
    with tf.control_dependencies([tf.debugging.Assert(right, [said, tf.size(value)])]):
        return tf.identity(value)
