"""Without a strategy nothing is delayed."""

import keras
import numpy as np
import pytest

from tests import helpers
from tests.equivalence import twin
from tests.optimizers.pairs import OPTIONS, OURS, PAIRS, assert_same_weights, pair


class Table(keras.layers.Layer):
    """The mean of rows of a table, whose gradient is sparse, or dense by a one-hot product."""

    def __init__(self, sparse):
        super().__init__()
        self.sparse = sparse
        start = keras.initializers.RandomUniform(-0.05, 0.05, seed=3)
        self.table = self.add_weight(shape=(20, 3), initializer=start, name="table")

    def call(self, ids):
        if self.sparse:
            return keras.ops.mean(keras.ops.take(self.table, ids, axis=0), 1)
        return keras.ops.mean(keras.ops.matmul(keras.ops.one_hot(ids, 20), self.table), 1)

    def compute_output_shape(self, shape):
        return (shape[0], 3)


@pytest.mark.few(4)
@pytest.mark.thin
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("name", PAIRS)
def test_in_plain_keras_it_is_what_it_is_made_from(name, option):
    make_ours, make_theirs = pair(name, option)
    assert_same_weights(
        twin.fit(make_ours, *twin.data())[0], twin.fit(make_theirs, *twin.data())[0]
    )


@pytest.mark.parametrize("name", OURS)
def test_sparse_gradients_do_what_dense_ones_do(name):
    """In plain Keras; ids that repeat in a batch count as their sum, as they do in a dense one."""
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 20, (48, 4)), rng.standard_normal((48, 1)).astype("float32")
    weights = []
    for sparse in (True, False):
        keras.utils.set_random_seed(1)
        model = keras.Sequential(
            [keras.Input((4,), dtype="int32"), Table(sparse), keras.layers.Dense(1)]
        )
        model.compile(OURS[name](), "mse")
        # Every row in every batch, so that means of a row's messages are means of all messages.
        every = np.tile(np.arange(20), (1, 1)).repeat(8, 0)
        for k in range(6):
            batch = np.concatenate([x[8 * k : 8 * k + 8], every], 1)
            model.train_on_batch(batch, y[8 * k : 8 * k + 8])
        weights.append(model.get_weights())
    helpers.assert_close(*weights, 1e-5)
