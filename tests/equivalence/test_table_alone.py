"""A table split by rows, by itself: what it begins with, lookups, and what else is refused."""

import types

import keras
import numpy as np
import pytest
import tensorflow as tf

from tf_dsgd.strategies.rows import lookups, tables
from tf_dsgd.strategies.rows.blocks import Blocks
from tf_dsgd.strategies.variable import Kind

ROWS, WIDTH = 31, 2


def ids():
    """Three of an example, some of them twice."""
    found = np.random.default_rng(1).integers(0, ROWS, (48, 3))
    found[::3, 1] = found[::3, 0]
    return found.astype("int32")


def split(parts, rows=ROWS, initializer="uniform", width=WIDTH):
    """A table on so many shards, all of them here, that no strategy trains."""
    lookups.answer()
    strategy = types.SimpleNamespace(shard_devices=["/CPU:0"] * parts, settle=lambda: None)
    initializer = keras.initializers.get(initializer)
    if getattr(initializer, "seed", None) is not None:
        initializer.seed = 5
    blocks = Blocks(initializer, (rows, width), "float32", "table")
    variable = keras.Variable(0.0, name="table")
    return tables.SplitTable(strategy, (rows, width), "float32", variable, Kind.WEIGHT, blocks)


@pytest.mark.few(1)
@pytest.mark.parametrize("initializer", ["uniform", "glorot_normal", "ones"])
def test_rows_begin_alike_however_many_shards_there_are(initializer, monkeypatch):
    from tf_dsgd.strategies.rows import blocks

    monkeypatch.setattr(blocks, "_MOST_ROWS", 7)
    got = [split(parts, initializer=initializer).primary.numpy() for parts in (1, 3, 40)]
    for other in got[1:]:
        np.testing.assert_array_equal(other, got[0])
    if initializer != "ones":
        assert len(np.unique(got[0])) == got[0].size  # no block repeats another


def test_glorots_fans_are_those_of_the_whole_table(monkeypatch):
    """Glorot and Bengio, 2010, eq. 16: a variance of 2 / (fan_in + fan_out)."""
    from tf_dsgd.strategies.rows import blocks

    monkeypatch.setattr(blocks, "_MOST_ROWS", 100)
    values = split(3, rows=5000, width=40, initializer="glorot_uniform").primary.numpy()
    np.testing.assert_allclose(values.var(), 2 / (5000 + 40), rtol=0.03)
    np.testing.assert_allclose(np.abs(values).max(), np.sqrt(6 / (5000 + 40)), rtol=0.01)


def test_what_is_drawn_as_a_whole_is_refused():
    with pytest.raises(ValueError, match=r"draw each entry by itself.*Received:.*Orthogonal"):
        split(2, initializer="orthogonal")
    with pytest.raises(ValueError, match=r"layer.set_weights.*Constant of shape \(31, 2\)"):
        split(2, initializer=keras.initializers.Constant(np.ones((ROWS, WIDTH))))


def test_tables_that_share_a_generator_begin_unlike():
    shared = keras.random.SeedGenerator(1)
    first, second = (
        Blocks(keras.initializers.RandomUniform(seed=shared), (ROWS, WIDTH), "float32", "table")
        for _ in range(2)
    )
    assert np.all(first.draw(tf.constant(0)).numpy() != second.draw(tf.constant(0)).numpy())


@pytest.mark.parametrize("parts", [1, 2, 5])
def test_lookups_and_their_gradients_are_those_of_a_tensor(parts):
    table = split(parts)
    whole = tf.constant(table.primary.numpy())
    for numbers in (ids()[:4], [0, ROWS - 1, 0], 7, np.zeros((0, 3), "int64")):
        with tf.GradientTape() as tape:
            found = tf.gather(table, numbers)
            loss = tf.reduce_sum(found**2 * 3.0)
        np.testing.assert_array_equal(found, whole.numpy()[np.asarray(numbers, "int64")])
        gradient = tape.gradient(loss, types.SimpleNamespace(handle=table.handle).handle)
        want = np.zeros(whole.shape)
        np.add.at(want, np.asarray(numbers, "int64"), 6.0 * found.numpy())
        assert isinstance(gradient, tf.IndexedSlices)
        np.testing.assert_allclose(tf.convert_to_tensor(gradient), want, rtol=1e-6)
        of_parts = table.split(gradient)
        assert len(of_parts) == parts
        for s, part in enumerate(of_parts):
            np.testing.assert_allclose(tf.convert_to_tensor(part), want[s::parts], rtol=1e-6)


def test_ragged_ids_and_a_list_of_one_table():
    table = split(2)
    whole = table.primary.numpy()
    ragged = tf.ragged.constant([[1, 2], [3], []])
    for found in (
        tf.nn.embedding_lookup(table, ragged),
        tf.nn.embedding_lookup([table], ragged),
    ):
        np.testing.assert_array_equal(found.flat_values, whole[1:4])
        assert found.row_lengths().numpy().tolist() == [2, 1, 0]


@pytest.mark.parametrize("number", [ROWS, -1, 2**31 - 1])
def test_ids_that_no_row_has_are_refused_by_name(number):
    with pytest.raises(
        tf.errors.InvalidArgumentError,
        match=rf"(?s)The table table has rows 0 to 30\. .*Received the ids.*{number}",
    ):
        tf.gather(split(2), [*range(10), number])


@pytest.mark.parametrize(
    "use",
    [
        lambda t: tf.matmul(tf.ones((1, ROWS)), t),
        lambda t: t[3],
        lambda t: tf.reduce_sum(t),
        lambda t: tf.gather(t, [0], axis=1),
        lambda t: t.assign_add(np.ones((ROWS, WIDTH))),
    ],
)
def test_any_other_use_is_refused_by_name(use):
    with pytest.raises((TypeError, ValueError), match="The table 'table' is split by rows"):
        use(split(2))


def test_assigning_and_reading_all_of_it(monkeypatch):
    from tf_dsgd.strategies.rows import blocks

    monkeypatch.setattr(blocks, "_MOST_ROWS", 4)
    table = split(3)
    values = np.arange(ROWS * WIDTH, dtype="float32").reshape(ROWS, WIDTH)
    table.primary.assign(values)
    np.testing.assert_array_equal(table.primary.numpy(), values)
    np.testing.assert_array_equal(table.parts[1].primary.numpy(), values[1::3])
