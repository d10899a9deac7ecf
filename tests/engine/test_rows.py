"""Which rows of a table a worker fetches."""

import contextlib

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_dsgd
from tests import helpers
from tf_dsgd.engine.rows import _WHOLE_TABLE


def test_only_a_table_that_was_assigned_is_fetched_whole():
    """Not one at the reset of metrics, which every epoch begins with, nor when a rate is set."""
    strategy = tf_dsgd.DownpourStrategy(tf_dsgd.SimulatedCluster(2, seed=0))
    with strategy.scope():
        users, items = (keras.Input((1,), dtype="int32", name=name) for name in ("u", "i"))
        tables = [keras.layers.Embedding(500, 2, name=name) for name in ("users", "items")]
        rows = [table(x)[:, 0] for table, x in zip(tables, (users, items), strict=True)]
        model = keras.Model([users, items], keras.layers.Dot(1)(rows))
        model.compile(keras.optimizers.SGD(0.1), "mse")
    ids = np.random.default_rng(0).integers(0, 500, (2, 40, 1))
    data = list(ids), np.ones((40, 1))
    model.fit(*data, batch_size=4, verbose=0)
    (program,) = strategy.batches.programs
    weights = [variable.name for variable in program.program.step.weights]
    logs = {weights[i]: log for i, log in program.program.row_logs.items()}
    users, items = (
        next(log for path, log in logs.items() if name in path) for name in ("users", "items")
    )

    def whole(log):
        return (log._place.numpy() == _WHOLE_TABLE).tolist()

    assert whole(users) == whole(items) == [False, False]
    model.reset_metrics()
    model.optimizer.learning_rate = 0.05
    model.optimizer.iterations.assign(3)
    assert whole(users) == whole(items) == [False, False]
    tables[0].set_weights([np.ones((500, 2))])
    assert whole(users) == [True, True]
    assert whole(items) == [False, False]
    model.fit(*data, batch_size=4, verbose=0)
    assert whole(users) == [False, False]


def test_what_is_remembered_of_a_fetch_for_another_is_the_whole_table():
    """Worker 0 computes a message of worker 1's: its copy is the table, and that is 1's, too."""
    strategy = tf_dsgd.DownpourStrategy(tf_dsgd.SimulatedCluster(2, seed=0))
    with strategy.scope():
        layers = [keras.layers.Embedding(50, 2), keras.layers.Flatten(), keras.layers.Dense(1)]
        model = keras.Sequential([keras.Input((1,), dtype="int32"), *layers])
        model.compile(tf_dsgd.optimizers.DelayCompensatedSGD(0.1), "mse")
    model.fit(np.zeros((8, 1)), np.ones((8, 1)), batch_size=4, verbose=0)
    (program,) = (each.program for each in strategy.batches.programs)
    ((index, log),) = program.row_logs.items()
    table = program.step.weights[index]

    def change(row):
        table.primary.scatter_add(tf.IndexedSlices(tf.ones([1, 2]), tf.constant([row])))
        log.note(tf.constant([row]))

    def remembered():
        return [table.snapshots.of(tf.constant(m, tf.int64), None).numpy() for m in (0, 1)]

    for fetch in program.fetch:
        fetch()
    change(3)
    program.fetch[0]()
    before = table.primary.numpy()
    change(5)
    program.fetch_as[0](tf.constant(1, tf.int64))
    for found, expected in zip(remembered(), (before, table.primary.numpy()), strict=True):
        np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(table.on_workers().copies[0].numpy(), table.primary.numpy())
    change(7)
    for fetch in program.fetch:
        fetch()
    for found in remembered():
        np.testing.assert_array_equal(found, table.primary.numpy())


FIRST, SECOND = np.array([[0, 1]]), np.array([[2, 3]])
ONE = np.ones((1, 1), "float32")


def by_train_on_batch(model, table):
    for _ in range(3):
        model.train_on_batch(SECOND, ONE)


def by_another_element_spec(model, table):
    model.fit(SECOND, ONE, sample_weight=np.ones(1, "float32"), verbose=0)


def by_another_model(model, table):
    other = keras.Sequential([keras.Input((2,), dtype="int32"), table, keras.layers.Dense(1)])
    other.compile(keras.optimizers.SGD(0.1), "mse")
    other.fit(SECOND, np.ones((1, 2, 1), "float32"), verbose=0)


def by_a_function(model, table):
    @tf.function
    def halve():
        table.embeddings.assign(0.5 * table.embeddings)

    for _ in range(2):
        halve()
        model.fit(FIRST, ONE, verbose=0)
    halve()


@pytest.mark.parametrize(
    "written", [by_train_on_batch, by_another_element_spec, by_another_model, by_a_function]
)
def test_a_worker_sees_rows_that_its_step_has_not_updated(written):
    """Those that functions of the caller's, and other programs, have; as plain Keras does."""

    def weights(scope):
        with scope:
            keras.utils.set_random_seed(0)
            table = keras.layers.Embedding(1000, 4)
            layers = [table, keras.layers.Flatten(), keras.layers.Dense(1)]
            model = keras.Sequential([keras.Input((2,), dtype="int32"), *layers])
            model.compile(keras.optimizers.SGD(0.1), "mse")
            model.fit(FIRST, ONE, verbose=0)
            written(model, table)
            model.fit(SECOND, ONE, verbose=0)
        return model.get_weights()

    # A copy has nothing of its own pushes before the next fetch.
    strategy = tf_dsgd.DownpourStrategy(tf_dsgd.LocalCluster(1), local_rule="none")
    helpers.assert_close(weights(strategy.scope()), weights(contextlib.nullcontext()))
