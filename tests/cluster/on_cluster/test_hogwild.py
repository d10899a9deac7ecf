"""Hogwild! on processes: what messages add to rows and weights of ps tasks, without a lock."""

import keras
import numpy as np
import pytest

import tf_dsgd
from tests import helpers

WIDTH, BATCH = 4, 8


class Shifted(keras.layers.Layer):
    """Adds a weight, of which each mini-batch's gradient is -1 as well."""

    def build(self, shape):
        self.shift = self.add_weight(shape=shape[-1:], initializer="zeros", name="shift")

    def call(self, x):
        return x + self.shift


def model(strategy, rows):
    with strategy.scope():
        ids = keras.Input((2,), dtype="int32")
        table = keras.layers.Embedding(rows, WIDTH, "zeros", name="table")
        built = keras.Model(ids, Shifted()(keras.ops.sum(table(ids), axis=1)))
        # Constant gradients: a descent of rate 1 adds 1 / 8 to each row that an example names.
        built.compile(keras.optimizers.SGD(1.0), lambda _, y: -keras.ops.sum(y, axis=-1))
    return built


def test_messages_on_rows_of_their_own_lose_nothing():
    strategy = tf_dsgd.HogwildStrategy()
    rows = 2 * 40 * BATCH
    built = model(strategy, rows)
    ids = np.random.default_rng(0).permutation(rows).reshape(-1, 2).astype("int32")
    built.fit(ids, ids, batch_size=BATCH, epochs=2, verbose=0)
    table, shift = built.get_weights()
    np.testing.assert_array_equal(table, np.full((rows, WIDTH), 2 / BATCH))
    np.testing.assert_array_equal(shift, np.full(WIDTH, 80.0))  # under its variable's own lock
    ledger = helpers.assert_ledger_balances(strategy)
    assert strategy.steps == strategy.updates == int(built.optimizer.iterations) == 80
    assert ledger.refused == 0
    parts = built.layers[1].embeddings.value.parts
    assert ["ps" in part.primary.device for part in parts] == [True, True]


def test_locks_are_of_threads_and_optimizers_only_add():
    for lock in ("rows", "round-robin"):
        with pytest.raises(ValueError, match=f"lock='{lock}' is for threads"):
            tf_dsgd.HogwildStrategy(lock=lock)
    strategy = tf_dsgd.HogwildStrategy()
    built = model(strategy, 32)
    with strategy.scope():
        built.compile(keras.optimizers.Adam(0.1), "mse")
    with pytest.raises(ValueError, match="Adam reads its slots"):
        built.fit(np.zeros((8, 2), "int32"), np.zeros((8, WIDTH)), verbose=0)
