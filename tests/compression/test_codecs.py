"""Each codec beside its twin in NumPy, message after message, on memory that the test makes."""

import dataclasses

import numpy as np
import pytest
import tensorflow as tf

from tests.compression import twins
from tests.contract.by_hand import Place
from tf_dsgd import compression
from tf_dsgd.compression import threshold

pytestmark = pytest.mark.medium

CODECS = {
    "threshold": (compression.Threshold(0.75), twins.threshold(0.75)),
    "entropy": (compression.Threshold(0.75, entropy=True), twins.threshold(0.75)),
    "clipped": (compression.Threshold(0.75, clip=1.25), twins.threshold(0.75, clip=1.25)),
    "top_k": (compression.TopK(0.2), twins.top_k(0.2)),
    "momentum": (compression.TopK(0.2, momentum=0.5), twins.top_k(0.2, 0.5)),
    "one_bit": (compression.OneBit(), twins.one_bit()),
    "ef_sign": (compression.EFSign(), twins.ef_sign()),
    "power_sgd": (compression.PowerSGD(2), twins.power_sgd(2)),
}
HOLD_BACK = [name for name in CODECS if name != "momentum"]
# What is sent is the same number on both sides, whatever the order of additions.
EXACT = {"threshold", "entropy", "clipped", "top_k", "momentum"}
SHAPES = [(7, 5), (3, 2, 4), (9,), (), (0, 4), (1, 6)]
TABLE = (11, 4)


class Table(Place):
    """A place whose weights are tables."""

    def is_sparse(self, index):
        return True


def dyadic(random, shape, dtype="float32"):
    """Eighths, whose sums are exact."""
    return (random.integers(-16, 17, shape) / 8).astype(dtype)


def states(g):
    return twins.zeros(g, "residual", "momentum")


@pytest.mark.parametrize("name", CODECS)
def test_twin(name):
    """Five messages of weights of several shapes; two workers, which know nothing of each other."""
    codec, twin = CODECS[name]
    random = np.random.default_rng(1)
    weights = [np.zeros(shape, "float32") for shape in SHAPES]
    shard = Place(weights)
    workers = [(Place(weights), [states(w) for w in weights]) for _ in range(2)]
    for n in range(5):
        worker, kept = workers[n % 2 if n < 4 else 1]
        for i, shape in enumerate(SHAPES):
            g = dyadic(random, shape)
            decoded = codec.decode(shard, i, codec.encode(worker, i, tf.constant(g)))
            assert decoded.shape == shape and decoded.dtype == tf.float32
            wanted = twin(kept[i], g)
            tolerance = 0 if name in EXACT else 2e-5
            np.testing.assert_allclose(decoded, wanted, rtol=tolerance, atol=tolerance)
            if ("residual", i) in worker._cells:
                residual = worker.cell("residual", i)
                np.testing.assert_allclose(residual, kept[i]["residual"], atol=tolerance)


@pytest.mark.parametrize("name", CODECS)
def test_twin_of_a_table(name):
    """Rows that a message names, some of them twice, and none of the others."""
    codec, twin = CODECS[name]
    random = np.random.default_rng(2)
    worker, shard = Table([np.zeros(TABLE, "float32")]), Table([np.zeros(TABLE, "float32")])
    whole = states(np.zeros(TABLE, "float32"))
    for rows in ([4, 1, 4, 9], [1, 2, 3, 4, 5], [9, 10, 1]):
        g = dyadic(random, (len(rows), TABLE[1]))
        decoded = codec.decode(shard, 0, codec.encode(worker, 0, slices(rows, g)))
        once = list(dict.fromkeys(rows))
        merged = np.zeros((len(once), TABLE[1]), "float32")
        np.add.at(merged, [once.index(row) for row in rows], g)
        of_rows = {k: v if k == "right" else v[once] for k, v in whole.items()}
        wanted = twin(of_rows, merged)
        for k, v in of_rows.items():
            if k == "right":
                whole[k] = v
            else:
                whole[k][once] = v
        assert decoded.indices.numpy().tolist() == once, "the worker moved all these rows"
        np.testing.assert_allclose(decoded.values, wanted, atol=2e-5)
        np.testing.assert_allclose(worker.cell("residual", 0), whole["residual"], atol=2e-5)


def slices(rows, g):
    return tf.IndexedSlices(tf.constant(g), tf.constant(rows, tf.int64), tf.constant(TABLE))


ROUNDED = {
    "one_bit": twins.one_bit(twins.to_bfloat16),
    "ef_sign": twins.ef_sign(twins.to_bfloat16),
    "power_sgd": twins.power_sgd(2, twins.to_bfloat16),
}


@pytest.mark.parametrize("kind", ["float64", "bfloat16"])
@pytest.mark.parametrize("name", CODECS)
def test_twin_of_another_type(name, kind):
    """Three messages of a matrix, and three of rows. Eighths up to 16 have the bits of bfloat16."""
    codec, twin = CODECS[name]
    twin = ROUNDED.get(name, twin) if kind == "bfloat16" else twin
    inside = "float64" if kind == "float64" else "float32"
    # A sum of another order is another number in the last bit, which rounding makes a larger one.
    tolerance = 0 if name in EXACT else 1e-10 if kind == "float64" else 2e-2
    if name == "power_sgd" and kind == "bfloat16":
        # P and Q are rounded to 1/256 of themselves, and Q's elements are up to 8: which way they
        # are differs between processors (seen: 0.032).
        tolerance = 8e-2
    random = np.random.default_rng(8)
    dtype = tf.as_dtype(kind)
    for place, rows in ((Place, None), (Table, [4, 1, 9, 2])):
        shape = (7, 5) if rows is None else (4, 4)
        whole = tf.zeros(shape if rows is None else TABLE, dtype)
        worker, shard, state = place([whole]), place([whole]), states(np.zeros(shape, inside))
        for _ in range(3):
            g = dyadic(random, shape, inside)
            given = tf.cast(g, dtype)
            if rows is not None:
                given = tf.IndexedSlices(given, tf.constant(rows, tf.int64), tf.constant(TABLE))
            decoded = codec.decode(shard, 0, codec.encode(worker, 0, given))
            assert decoded.dtype == dtype
            found = decoded if rows is None else decoded.values
            wanted = twin(state, g)
            np.testing.assert_allclose(
                tf.cast(found, tf.float64), wanted, rtol=tolerance, atol=tolerance
            )


@pytest.mark.parametrize("kind", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize("rows", [None, [3, 0, 7]])
def test_qsgd_beside_its_twin(kind, rows):
    """With the numbers that it draws: of its seed, of how many messages, and of what is in one."""
    codec, dtype = compression.QSGD(5, seed=3), tf.as_dtype(kind)
    inside = "float64" if kind == "float64" else "float32"
    shape = (6, 4) if rows is None else (3, 4)
    place = Place if rows is None else Table
    whole = tf.zeros(shape if rows is None else TABLE, dtype)
    worker, shard = place([whole]), place([whole])
    random = np.random.default_rng(9)
    for number in range(1, 4):
        g = dyadic(random, shape, inside)
        given = tf.cast(g, dtype)
        if rows is not None:
            given = tf.IndexedSlices(given, tf.constant(rows, tf.int64), tf.constant(TABLE))
        decoded = codec.decode(shard, 0, codec.encode(worker, 0, given))
        data = g.tobytes() + np.array([number, 3], "int64").tobytes()
        data = np.frombuffer(data, "uint8")[None]
        seed = tf.raw_ops.Fingerprint(data=data, method="farmhash64")[0].numpy().view("int32")
        uniform = tf.random.stateless_uniform(shape, seed).numpy()
        found = tf.cast(decoded if rows is None else decoded.values, tf.float64)
        wanted = twins.qsgd(5, uniform)({}, g)
        tolerance = {"float32": 1e-6, "float64": 1e-12, "bfloat16": 4e-3}[kind]
        np.testing.assert_allclose(found, wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("kind", ["bfloat16", "float16"])
def test_cast_beside_numpy(kind):
    """Both ways, of tensors, rows, scalars, nothing; what is not a number stays that."""
    codec, numpy_type = compression.Cast(kind), tf.as_dtype(kind).as_numpy_dtype
    random = np.random.default_rng(10)
    values = [random.standard_normal(shape).astype("float32") for shape in ((7, 5), (), (0, 4))]
    values.append(np.array([np.nan, np.inf, -np.inf, 1e-30], "float32"))
    for value in values:
        place, wanted = Place([value]), value.astype(numpy_type).astype("float32")
        for encode, decode in (
            (codec.encode, codec.decode),
            (codec.encode_fetched, codec.decode_fetched),
        ):
            (sent,) = encode(place, 0, tf.constant(value))
            assert sent.dtype == kind
            np.testing.assert_array_equal(decode(place, 0, [sent]), wanted)
    g = random.standard_normal((3, 4)).astype("float32")
    place = Table([np.zeros(TABLE, "float32")])
    decoded = codec.decode(place, 0, codec.encode(place, 0, slices([1, 5, 2], g)))
    assert decoded.indices.numpy().tolist() == [1, 5, 2]
    np.testing.assert_array_equal(decoded.values, g.astype(numpy_type).astype("float32"))


def test_qsgd_is_right_in_the_mean_over_seeds():
    """One message each of 300 seeds: five standard errors of at most half a level."""
    g = np.random.default_rng(11).standard_normal((6, 5)).astype("float32")
    shard = Place([g])
    found = [
        codec.decode(shard, 0, codec.encode(Place([g]), 0, tf.constant(g))).numpy()
        for codec in (compression.QSGD(3, seed) for seed in range(300))
    ]
    assert np.abs(np.mean(found, 0) - g).max() < 5 * np.linalg.norm(g) / 3 / 2 / np.sqrt(300)


@pytest.mark.parametrize("shape", [(), (1,), (0,), (0, 4), (3, 0)])
@pytest.mark.parametrize("name", [*CODECS, "qsgd"])
def test_scalars_and_nothing(name, shape):
    """One element by each codec; and none, of which no mean is taken."""
    codec = compression.QSGD(4) if name == "qsgd" else CODECS[name][0]
    worker, shard = Place([np.zeros(shape, "float32")]), Place([np.zeros(shape, "float32")])
    g = np.full(shape, 1.5, "float32")
    decoded = codec.decode(shard, 0, codec.encode(worker, 0, tf.constant(g))).numpy()
    assert decoded.shape == shape
    # Half of 1.5 is tau; QSGD has a level for a whole norm; the others send what they have.
    wanted = g / 2 if name in ("threshold", "entropy", "clipped") else g
    np.testing.assert_array_equal(decoded, wanted)


@pytest.mark.parametrize("name", HOLD_BACK)
def test_one_row_and_none(name):
    """A matrix of fewer rows than the rank; and one of no rows, of which a mean is no number."""
    codec, _ = CODECS[name]
    worker, shard = Table([np.zeros(TABLE, "float32")]), Table([np.zeros(TABLE, "float32")])
    g = np.array([[1.5, -0.5, 2.0, 0.25]], "float32")
    decoded = codec.decode(shard, 0, codec.encode(worker, 0, slices([10], g)))
    kept = worker.cell("residual", 0).numpy()
    clipped = name == "clipped"  # of 2.0 - 0.75 nothing is cut off
    assert not clipped or np.abs(kept).max() == 1.25
    np.testing.assert_allclose(decoded.values + kept[10], g, atol=1e-6)
    assert not kept[:10].any()
    empty = codec.encode(worker, 0, slices([], np.zeros((0, 4), "float32")))
    assert codec.decode(shard, 0, empty).values.shape == (0, 4)
    np.testing.assert_array_equal(worker.cell("residual", 0), kept)


@pytest.mark.parametrize("kind", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize("name", HOLD_BACK)
def test_what_was_sent_and_what_is_kept_are_all_gradients(name, kind):
    """Exactly, where additions are; of a clipped residual what was cut off is counted."""
    codec, _ = CODECS[name]
    dtype = tf.as_dtype(kind)
    random = np.random.default_rng(3)
    weights = [tf.zeros([8, 6], dtype)]
    worker, shard = Place(weights), Place(weights)
    applied, total = np.zeros((8, 6)), np.zeros((8, 6))
    for _ in range(5):
        g = tf.cast(dyadic(random, (8, 6)), dtype)
        total += tf.cast(g, tf.float64).numpy()
        decoded = codec.decode(shard, 0, codec.encode(worker, 0, g))
        assert decoded.dtype == dtype
        applied += tf.cast(decoded, tf.float64).numpy()
    found = applied + tf.cast(worker._cells["residual", 0], tf.float64).numpy()
    if name == "clipped":
        lost = float(worker._cells["clipped", 0])
        assert lost > 0
        assert np.abs(found - total).sum() <= lost  # what was cut off, some of it of both signs
        return
    np.testing.assert_allclose(found, total, atol=0 if name in EXACT else 2e-5)
    assert np.abs(applied).max() > 0


def test_all_of_it_is_no_compression():
    """The whole tensor by each codec that can send it; and one element by each with a scale."""
    random = np.random.default_rng(4)
    whole = [compression.TopK(1.0), compression.TopK(1.0, momentum=0.9), compression.PowerSGD(5)]
    for codecs, shape in ((whole, (7, 5)), ([compression.EFSign(), compression.OneBit()], (1,))):
        for codec in codecs:
            worker, shard = Place([np.zeros(shape, "float32")]), Place([np.zeros(shape, "float32")])
            for _ in range(3):
                g = dyadic(random, shape)
                decoded = codec.decode(shard, 0, codec.encode(worker, 0, tf.constant(g)))
                np.testing.assert_array_equal(decoded, g, err_msg=repr(codec))


def test_a_matrix_of_the_rank_is_sent_whole():
    """Rank 2 in one message, whatever Q was: M Q spans all that M has."""
    random = np.random.default_rng(5)
    worker, shard = Place([np.zeros((9, 7), "float32")]), Place([np.zeros((9, 7), "float32")])
    g = (random.standard_normal((9, 2)) @ random.standard_normal((2, 7))).astype("float32")
    codec = compression.PowerSGD(2)
    sent = codec.encode(worker, 0, tf.constant(g))
    assert [tuple(part.shape) for part in sent] == [(9, 2), (7, 2)]
    np.testing.assert_allclose(codec.decode(shard, 0, sent), g, atol=1e-5)


def test_iteration_goes_on_from_message_to_message():
    """Of one gradient that comes again Q becomes the largest singular vectors of what is left."""
    random = np.random.default_rng(6)
    g = random.standard_normal((20, 12)).astype("float32")
    worker, shard = Place([np.zeros((20, 12), "float32")]), Place([np.zeros((20, 12), "float32")])
    codec = compression.PowerSGD(1)
    total = np.zeros_like(g)
    for _ in range(30):
        total += codec.decode(shard, 0, codec.encode(worker, 0, tf.constant(g))).numpy()
    # The error is bounded, so the mean of what was applied comes to the gradient as 1 / n.
    assert np.linalg.norm(total / 30 - g) < 0.35 * np.linalg.norm(g)


def test_one_bit_sends_the_means_of_a_column():
    """By hand: of 1, 2, 3 and -4, -6 in one column, zeros in the other."""
    g = np.array([[1, 0], [2, 0], [3, 0], [-4, 0], [-6, 0]], "float32")
    worker, shard = Place([g]), Place([g])
    sent = compression.OneBit().encode(worker, 0, tf.constant(g))
    assert sent[0].numpy().tolist() == [0b11111101, 0b01000000]
    np.testing.assert_array_equal(sent[1], [[2, 0], [-5, 0]])
    decoded = compression.OneBit().decode(shard, 0, sent)
    np.testing.assert_array_equal(decoded[:, 0], [2, 2, 2, -5, -5])


@pytest.mark.parametrize("levels", [1, 200])
def test_qsgd_is_right_in_the_mean(levels):
    """Each message within a level of the gradient; the mean of many comes to it."""
    g = np.random.default_rng(7).standard_normal((6, 5)).astype("float32")
    level = np.linalg.norm(g) / levels
    codec = compression.QSGD(levels, seed=3)
    worker, shard = Place([g]), Place([g])
    number = 300
    found = np.zeros((number, 6, 5))
    for n in range(number):
        sent = codec.encode(worker, 0, tf.constant(g))
        assert sent[0].dtype == (tf.int8 if levels < 128 else tf.int16)
        found[n] = codec.decode(shard, 0, sent)
    assert np.abs(found - g).max() <= level * (1 + 1e-5)
    np.testing.assert_allclose(found / level, np.round(found / level), atol=1e-3)
    # A mean of n numbers, each of a standard deviation of at most half a level: five of its own.
    assert np.abs(found.mean(0) - g).max() < 5 * level / 2 / np.sqrt(number)


def test_qsgd_draws_by_seed_message_and_content():
    g = np.random.default_rng(7).standard_normal((6, 5)).astype("float32")

    def messages(codec, *gradients):
        worker, shard, given = Place([g]), Place([g]), [tf.constant(x) for x in gradients]
        return [codec.decode(shard, 0, codec.encode(worker, 0, x)).numpy() for x in given]

    once = messages(compression.QSGD(2, seed=3), g, g)
    np.testing.assert_array_equal(once, messages(compression.QSGD(2, seed=3), g, g))
    assert np.any(once[0] != once[1]), "the second message draws other numbers"
    other = messages(compression.QSGD(2, seed=4), g, g)
    assert np.any(once[0] != other[0]) and np.any(once[1] != other[1])
    # Twice the gradient has the same shares: what differs is drawn, as between two workers.
    assert np.any(2 * once[0] != messages(compression.QSGD(2, seed=3), 2 * g)[0])


@pytest.mark.parametrize("value", [np.nan, -np.inf, 1e20])
@pytest.mark.parametrize("name", [*CODECS, "qsgd"])
def test_what_is_not_finite_is_refused_and_not_kept(name, value):
    """Nor what is so large that a norm is not."""
    codec = compression.QSGD(4) if name == "qsgd" else CODECS[name][0]
    worker = Place([np.zeros((6, 4), "float32")])
    g = np.ones((6, 4), "float32")
    g[2, 1] = value
    with pytest.raises(
        tf.errors.InvalidArgumentError,
        match=r"'Variable', of the shape \(6, 4\), is not finite.*cannot send it",
    ):
        codec.encode(worker, 0, tf.constant(g))
    assert all(np.isfinite(np.asarray(cell)).all() for cell in worker._cells.values())


@pytest.mark.parametrize("shape", [(6, 4), (6,)])
@pytest.mark.parametrize("name", [*CODECS, "qsgd"])
def test_nothing_becomes_infinite_in_float16(name, shape):
    """Beyond 65504 a part is sent and the rest kept, or it is refused by name, and none is kept."""
    codec = compression.QSGD(4) if name == "qsgd" else CODECS[name][0]
    worker, shard = Place([np.zeros(shape, "float16")]), Place([np.zeros(shape, "float16")])
    total = np.zeros(shape)
    applied = np.zeros(shape)
    for _ in range(3):
        g = np.full(shape, 6e4, "float16")
        try:
            sent = codec.encode(worker, 0, tf.constant(g))
        except tf.errors.InvalidArgumentError as error:
            assert name == "qsgd" or (name == "power_sgd" and len(shape) == 1)  # which keep nothing
            assert "above 65504, the largest number of float16" in error.message
            break
        decoded = codec.decode(shard, 0, sent).numpy()
        assert np.isfinite(decoded).all()
        total, applied = total + g.astype(float), applied + decoded.astype(float)
    assert all(np.isfinite(np.asarray(cell)).all() for cell in worker._cells.values())
    if name in ("top_k", "threshold", "entropy") and len(shape) == 2:
        (kept,) = (np.asarray(c) for c in worker._cells.values() if np.shape(c) == shape)
        np.testing.assert_allclose(applied + kept, total, rtol=1e-6)


@pytest.mark.parametrize("shape", [(6, 4), (6,)])
@pytest.mark.parametrize("name", ["one_bit", "ef_sign"])
def test_a_mean_beyond_float16_is_sent_in_part(name, shape):
    """Of what was kept, and of a message: half of 6e4 and 6e4."""
    codec = CODECS[name][0]
    worker, shard = Place([np.zeros(shape, "float16")]), Place([np.zeros(shape, "float16")])
    first, signs = np.zeros(shape), np.ones(shape)
    first[:3], signs[3:] = 6e4, -1
    applied = []
    for g in (first, 6e4 * signs, np.zeros(shape)):
        sent = codec.encode(worker, 0, tf.constant(g.astype("float16")))
        applied.append(codec.decode(shard, 0, sent).numpy().astype(float))
    np.testing.assert_array_equal(applied[0], 3e4)
    np.testing.assert_array_equal(applied[1], 65504 * signs)
    np.testing.assert_array_equal(applied[2], (9e4 - 65504) * signs)
    np.testing.assert_array_equal(sum(applied), first + 6e4 * signs)


def test_the_share_of_the_largest_is_a_decimal_number():
    """0.07 times 100 is a little more than 7 in binary."""
    for fraction, size, number in ((0.07, 100, 7), (0.14, 50, 7), (0.55, 100, 55), (1e-9, 10, 1)):
        worker = Place([np.zeros(size, "float32")])
        codec = compression.TopK(fraction)
        places, _ = codec.encode(worker, 0, tf.range(1.0, size + 1.0))
        assert len(places) == number


def test_momentum_is_not_rounded():
    worker = Place([np.zeros(1, "float64")])
    codec = compression.TopK(1.0, momentum=0.9)
    shard = Place([np.zeros(1, "float64")])
    for expected in (1.0, 1.0):  # what is sent has no momentum left
        sent = codec.encode(worker, 0, tf.ones(1, tf.float64))
        assert codec.decode(shard, 0, sent).numpy() == [expected]
    worker = Place([np.zeros(2, "float64")])
    half = compression.TopK(0.5, momentum=0.9)
    for _ in range(2):
        _, values = half.encode(worker, 0, tf.constant([2.0, 1.0], tf.float64))
    np.testing.assert_array_equal(values, [2.9])  # of the second: 1, and 0.9 + 1


@pytest.mark.parametrize("name", [*CODECS, "qsgd"])
def test_integers_travel_as_they_are(name):
    codec = compression.QSGD(4) if name == "qsgd" else CODECS[name][0]
    place = Place([np.zeros(3, "int32")])
    sent = codec.encode(place, 0, tf.constant([1, 2, 3]))
    np.testing.assert_array_equal(codec.decode(place, 0, sent), [1, 2, 3])


@pytest.mark.parametrize("name", [*CODECS, "qsgd"])
def test_a_codec_is_a_value(name):
    """Equal if its fields are; what it keeps is named; nothing can be set."""
    codec = compression.QSGD(4) if name == "qsgd" else CODECS[name][0]
    assert dataclasses.replace(codec) == codec and hash(codec) == hash(dataclasses.replace(codec))
    worker = Place([np.zeros((6, 4), "float32")])
    codec.encode(worker, 0, tf.ones([6, 4]))
    assert {cell for cell, _ in worker._cells} == set(codec.keeps)
    assert codec.held_back in (*codec.keeps, None)
    assert not codec.repeatable


@pytest.mark.parametrize("tau", [1e-60, 1e39])
def test_a_threshold_that_is_no_number_of_the_weight_is_refused(tau):
    """Of float32; in float64 it is one."""
    codec = compression.Threshold(tau)
    with pytest.raises(
        ValueError, match=r"from 1.18e-38 to 3.4e\+38 for weights of float32, as 'Var"
    ):
        codec.encode(Place([np.zeros(3, "float32")]), 0, tf.ones([3]))
    (sent,) = codec.encode(Place([np.zeros(3)]), 0, tf.ones([3], tf.float64))
    assert len(sent) == (3 if tau < 1 else 0)


def bytes_of(sent):
    return sum(part.dtype.size * int(tf.size(part)) for part in sent)


def test_bytes():
    """By hand, for a kernel of 200 x 100, of which 1 in 100 is large; dense it is 80,000 bytes."""
    g = np.full((200, 100), 0.01, "float32")
    g.ravel()[::100] = -1.0
    expected = {
        compression.Cast("bfloat16"): 40_000,
        compression.Threshold(0.5): 200 * 4,
        # Gaps of 99: q = 1 with k = 6 or 0 with 7, the rest, a sign, of 200; and a head of 17.
        compression.Threshold(0.5, entropy=True): 17 + 2 * 25 + 7 * 25,
        compression.TopK(0.01): 200 * 8,
        compression.OneBit(): 20_000 // 8 + 2 * 100 * 4,
        compression.EFSign(): 20_000 // 8 + 4,
        compression.QSGD(7): 20_000 + 4,
        compression.PowerSGD(2): (200 + 100) * 2 * 4,
    }
    for codec, wanted in expected.items():
        assert bytes_of(codec.encode(Place([g]), 0, tf.constant(g))) == wanted, codec


@pytest.mark.parametrize("size", [1, 15, 16, 17, 95, 96, 97])
def test_a_large_weight_is_compared_in_pieces(size, monkeypatch):
    """Of 16 elements each; the places are ascending, and those of the whole."""
    monkeypatch.setattr(threshold, "_PIECE", 16)
    monkeypatch.setattr(threshold, "_MOST_PIECES", 4)
    g = np.random.default_rng(size).normal(size=size).astype("float32")
    sent = compression.Threshold(0.5).encode(Place([np.zeros_like(g)]), 0, tf.constant(g))
    wanted = np.flatnonzero(np.abs(g) > 0.5)
    np.testing.assert_array_equal(sent[0].numpy() >> 1, wanted)
    np.testing.assert_array_equal(sent[0].numpy() & 1, g[wanted] > 0)
