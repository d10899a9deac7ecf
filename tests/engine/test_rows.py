"""Which rows of a table a worker fetches."""

import keras
import numpy as np

import tf_dsgd
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
