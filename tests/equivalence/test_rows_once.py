"""Rows that are named once: known by their type, merged in one place, and written, not added to."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_dsgd
from tests.equivalence import test_tables
from tf_dsgd import arithmetic
from tf_dsgd._tf_rows import RowsOnce
from tf_dsgd.algorithms.downpour import AccrueGradient

pytestmark = pytest.mark.medium

MERGES, ADDS, WRITES = "UnsortedSegmentSum", "ResourceScatterAdd", "ResourceScatterUpdate"


def gradient(rows=(3, 1, 3, 0, 1, 3)):
    values = np.arange(2 * len(rows), dtype="float32").reshape(-1, 2)
    return tf.IndexedSlices(tf.constant(values), tf.constant(rows, tf.int64), tf.constant([5, 2]))


def dense(slices):
    whole = np.zeros((5, 2), "float32")
    np.add.at(whole, np.asarray(slices.indices), np.asarray(slices.values))
    return whole


@pytest.mark.fast
def test_rows_are_merged_unless_they_are_known_to_be():
    merged = arithmetic.merged_rows(gradient())
    assert isinstance(merged, RowsOnce)
    assert sorted(merged.indices.numpy()) == [0, 1, 3]
    np.testing.assert_array_equal(dense(merged), dense(gradient()))
    assert arithmetic.merged_rows(merged) is merged
    # What is made of them has the same rows.
    for made in (
        arithmetic.scaled(merged, 2.0),
        arithmetic.cast(merged, "bfloat16"),
        arithmetic.quotient(merged, tf.constant(2.0)),
    ):
        assert arithmetic.merged_rows(made) is made
    assert not isinstance(arithmetic.scaled(gradient(), 2.0), RowsOnce)


@pytest.mark.fast
def test_the_type_goes_along_between_functions_and_what_is_packed():
    merged = arithmetic.merged_rows(gradient())
    given = tf.function(lambda each: (each[0], [each[1]]), autograph=False)
    concrete = given.get_concrete_function((merged, gradient()))
    for first, (second,) in (given((merged, gradient())), concrete.structured_outputs):
        assert isinstance(first, RowsOnce)
        assert isinstance(second, tf.IndexedSlices) and not isinstance(second, RowsOnce)
    flat = tf.nest.flatten([merged], expand_composites=True)
    assert len(flat) == 3
    (packed,) = tf.nest.pack_sequence_as([merged], flat, expand_composites=True)
    assert isinstance(packed, RowsOnce)
    np.testing.assert_array_equal(dense(packed), dense(gradient()))


def trained(strategy, optimizer=lambda: keras.optimizers.Adagrad(0.1)):
    with strategy.scope():
        built = test_tables.model(optimizer())
    x, y = test_tables.ids(), test_tables.targets()
    built.fit(x, y, batch_size=4, shuffle=False, verbose=0)
    (program,) = strategy.batches.programs
    return built.get_weights(), program.program


def number(function, kind, dtype=None):
    """Of operations of a kind, and a type, in a function and what it calls."""
    definition = function.graph.as_graph_def()
    nodes = [*definition.node, *(n for f in definition.library.function for n in f.node_def)]
    wanted = None if dtype is None else dtype.as_datatype_enum
    return sum(n.op == kind and wanted in (None, n.attr["dtype"].type) for n in nodes)


@pytest.mark.parametrize(
    ("period", "options"),
    [(1, {}), (3, {"compression": tf_dsgd.compression.Cast("bfloat16")})],
    ids=["each", "cast"],
)
def test_a_worker_merges_rows_and_a_shard_does_not_again(period, options):
    strategy = tf_dsgd.DownpourStrategy(
        tf_dsgd.LocalCluster(1),
        push_every=period,
        fetch_every=period,
        placement=test_tables.SPLIT,
        **options,
    )
    _, program = trained(strategy)
    assert number(program.collection, MERGES) == 1
    assert number(program.receiving[0], MERGES) == 0


def test_messages_whose_rows_come_twice_are_merged_before_they_are_squared(monkeypatch):
    """As of a local rule of a user's, which sends a gradient as it is."""
    plain = tf_dsgd.DownpourStrategy(tf_dsgd.LocalCluster(1), placement=test_tables.SPLIT)
    expected, _ = trained(plain)

    def message(self, worker):
        merged = usual(self, worker)
        return [
            tf.IndexedSlices(
                tf.concat([g.values * 0.25, g.values * 0.75], 0),
                tf.concat([g.indices, g.indices], 0),
                g.dense_shape,
            )
            if isinstance(g, tf.IndexedSlices)
            else g
            for g in merged
        ]

    usual = AccrueGradient.message
    monkeypatch.setattr(AccrueGradient, "message", message)
    raw = tf_dsgd.DownpourStrategy(tf_dsgd.LocalCluster(1), placement=test_tables.SPLIT)
    got, program = trained(raw)
    assert number(program.receiving[0], MERGES) == 1
    for ours, theirs in zip(got, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


def test_rows_are_written_under_a_lock_and_added_to_without_one():
    """Of the table and of Adagrad's slots; a shard's counters are no floats."""
    found = {}
    for name, make in {
        "lock": tf_dsgd.DownpourStrategy,
        "none": tf_dsgd.HogwildStrategy,
        "rows": lambda *a, **k: tf_dsgd.HogwildStrategy(*a, lock="rows", **k),
    }.items():
        weights, program = trained(make(tf_dsgd.LocalCluster(1), placement=test_tables.SPLIT))
        of_kind = {kind: number(program.receiving[0], kind, tf.float32) for kind in (ADDS, WRITES)}
        found[name] = weights, of_kind
    assert found["lock"][1] == {ADDS: 0, WRITES: 2}
    assert found["none"][1] == found["rows"][1] == {ADDS: 2, WRITES: 0}
    for name in ("none", "rows"):
        for ours, theirs in zip(found[name][0], found["lock"][0], strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=1e-7)
