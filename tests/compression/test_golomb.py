"""Places and signs in a Rice code: decode(encode) is the identity, and nothing else is decoded."""

import numpy as np
import pytest
import tensorflow as tf

from tf_dsgd.compression import bits, golomb

pytestmark = pytest.mark.medium


@tf.function(input_signature=[tf.TensorSpec([None], tf.int64), tf.TensorSpec([None], tf.bool)])
def encode(places, signs):
    return golomb.encode(places, signs)


@tf.function(input_signature=[tf.TensorSpec([None], tf.uint8), tf.TensorSpec([], tf.int64)])
def decode(message, size):
    return golomb.decode(message, size)


def assert_identity(places, signs, size):
    message = encode(places, signs)
    found = decode(message, size)
    np.testing.assert_array_equal(found[0], places)
    np.testing.assert_array_equal(found[1], signs)
    return message.numpy()


def test_bits_of_any_number():
    for number in range(20):
        some = np.random.default_rng(number).integers(0, 2, number).astype(bool)
        data = bits.packed(tf.constant(some))
        np.testing.assert_array_equal(data, np.packbits(some))
        np.testing.assert_array_equal(bits.unpacked(data, number), some)


@pytest.mark.parametrize(
    "places",
    [[], [0], [7], range(1000), [2**31], [0, 2**31, 2**31 + 1], [0, 1, 2, 3, 2**40]],
    ids=["empty", "first", "one", "all", "index 2^31", "some", "far"],
)
def test_edges(places):
    places = np.array(places, np.int64)
    size = max(2**31 + 2, *(places[-1:] + 1)) if len(places) else 0
    assert_identity(places, np.arange(len(places)) % 3 == 0, size)


@tf.function(input_signature=[tf.TensorSpec([], tf.int64)])
def differing(number):
    """(messages of random density that are not decoded as they were, the largest share too long).

    All in one call: ten thousand single ones take 14 s.
    """
    wrong, longest = tf.constant(0), tf.constant(0.0, tf.float64)
    for n in tf.range(number):
        u = tf.random.stateless_uniform([402], tf.stack([n, 7]))
        chosen = u[2 : 3 + tf.cast(399 * u[0], tf.int32)] < u[1]
        places = tf.where(chosen)[:, 0]
        signs = tf.gather(u[2:], places) * 7 % 1 > 0.5
        message = golomb.encode(places, signs)
        found = golomb.decode(message, tf.size(chosen))
        if len(found[0]) != len(places):
            wrong += len(places) + 1
        else:
            differ = (found[0] != places) | (found[1] != signs)
            wrong += tf.math.count_nonzero(differ, dtype=tf.int32)
        needed = tf.math.log(tf.size(chosen) / (tf.size(places) + 1)) / np.log(2.0)
        least = tf.cast(tf.size(places), tf.float64) * (4.0 + tf.maximum(needed, 0.0)) / 8 + 19
        longest = tf.maximum(longest, tf.cast(tf.size(message), tf.float64) / least)
    return wrong, longest


def test_random_messages():
    """Ten thousand, of all densities and lengths; none takes many bits more than it must."""
    wrong, longest = differing(10_000)
    assert int(wrong) == 0
    assert float(longest) <= 1


def test_close_to_the_entropy():
    """Of one place in 277, as in the paper: a geometric distribution's bits, within 4 %."""
    size = 1_000_000
    density = 52_500 / 14_600_000
    places = np.flatnonzero(np.random.default_rng(1).random(size) < density)
    message = assert_identity(places, places % 2 == 0, size)
    entropy = -np.log2(density) - (1 - density) / density * np.log2(1 - density) + 1  # a sign
    assert entropy <= 8 * len(message) / len(places) < 1.04 * entropy


def test_what_is_not_as_it_was_sent_is_refused():
    """Each bit flipped, each length cut, something behind: none is decoded."""
    places, signs = np.array([3, 10, 11, 90]), np.array([True, False, True, True])
    message = encode(places, signs).numpy()
    wrong = [message[:n] for n in range(len(message))] + [np.append(message, 0)]
    for place in range(8 * len(message)):
        flipped = message.copy()
        flipped[place // 8] ^= 1 << place % 8
        wrong.append(flipped)
    for each in wrong:
        with pytest.raises(tf.errors.InvalidArgumentError, match="not as it was sent"):
            decode(each.astype(np.uint8), 100)


def test_random_messages_that_are_not_as_they_were_sent():
    """Two hundred, of all densities: bits flipped, cut anywhere, bytes put between or behind."""
    random = np.random.default_rng(12)
    for n in range(200):
        places = np.flatnonzero(random.random(400) < random.random() ** 3)
        message = encode(places, random.random(len(places)) < 0.5).numpy()
        where = int(random.integers(len(message)))
        if n % 4 == 0:
            wrong = message.copy()
            wrong[where] ^= random.integers(1, 256)
        elif n % 4 == 1:
            wrong = message[:where]
        elif n % 4 == 2:
            wrong = np.insert(message, where, random.integers(0, 256))
        else:
            wrong = np.append(message, random.integers(0, 256, 1 + where).astype("uint8"))
        if np.array_equal(wrong, message):
            continue
        with pytest.raises(tf.errors.InvalidArgumentError, match="not as it was sent"):
            decode(wrong.astype(np.uint8), 400)


def test_random_bytes_with_the_right_fingerprint_are_never_read_out_of_bounds():
    """Decoded to places within the tensor, ascending; or refused by name."""
    random = np.random.default_rng(13)
    decoded = 0
    for n in range(300):
        size = int(random.integers(1, 200))
        body = random.integers(0, 256, int(random.integers(0, 12)))
        k = int(random.integers(0, 4 if n % 2 else 256))
        # As many places as the first part says, if that can be; or any number.
        unary = {c: body[: len(body) - (c * (k + 1) + 7) // 8] for c in range(8 * len(body))}
        fits = [c for c, ones in unary.items() if np.unpackbits(ones.astype(np.uint8)).sum() == c]
        count = fits[-1] if fits and n % 3 else int(random.integers(-(2**62), 2**62))
        rest = [*number(count), k, *body]
        try:
            places, signs = decode(sealed(rest), size)
        except tf.errors.InvalidArgumentError as error:
            assert "not as it was sent" in error.message
            continue
        decoded += 1
        places = places.numpy()
        assert len(places) == len(signs) == count
        assert np.all(np.diff(places) > 0) and np.all((places >= 0) & (places < size))
    assert decoded > 10


def sealed(rest):
    """With the fingerprint of what is there: wrong all the same."""
    rest = np.array(rest, np.uint8)
    print_of = tf.raw_ops.Fingerprint(data=rest[None], method="farmhash64")[0].numpy()
    return np.concatenate([print_of, rest])


def number(n):
    return list(np.array([n], np.int64).view(np.uint8))


@pytest.mark.parametrize(
    ("rest", "why"),
    [
        ([*number(5), 2, 255], "its length is wrong"),
        ([*number(-1), 2, 255], "its length is wrong"),
        ([*number(1), 99, *range(20)], "its length is wrong"),
        ([*number(2), 0, 0b10000000, 0], "places are missing"),
        ([*number(1), 6, 0b00000001, 0], "a place is outside"),
    ],
)
def test_a_message_that_was_never_sent(rest, why):
    with pytest.raises(tf.errors.InvalidArgumentError, match=why):
        decode(sealed(rest), 100)


def test_a_message_of_a_larger_tensor():
    message = encode(np.array([3, 50]), np.array([True, True]))
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"a place is outside|length is wrong"):
        decode(message, 50)
