"""Models made one after another in one strategy's scope, as by a search for rates, are freed."""

import gc
import weakref

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_dsgd
from tests import helpers
from tests.conformance import registry

if helpers.ON_CLUSTER:
    pytest.skip("Objects of other processes are not seen here.", allow_module_level=True)

ROWS = {"table/.*": tf_dsgd.Rows()}
WIDTH = 137
"""Of a layer, as of no other test's."""


def dense(optimizer):
    layers = [keras.layers.Dense(WIDTH, "tanh"), keras.layers.BatchNormalization()]
    model = keras.Sequential([keras.Input((3,)), *layers, keras.layers.Dense(1)])
    model.compile(optimizer, "mse", metrics=["mae"])
    return model, np.linspace(-1, 1, 96, dtype="float32").reshape(32, 3)


def without_statistics(optimizer):
    model = keras.Sequential(
        [keras.Input((3,)), keras.layers.Dense(WIDTH, "tanh"), keras.layers.Dense(1)]
    )
    model.compile(optimizer, "mse")
    return model, np.linspace(-1, 1, 96, dtype="float32").reshape(32, 3)


def with_table(optimizer):
    ids = keras.Input((3,), dtype="int32")
    rows = keras.layers.Embedding(40, WIDTH, name="table")(ids)
    model = keras.Model(ids, keras.layers.Dense(1)(keras.layers.Flatten()(rows)))
    model.compile(optimizer, "mse")
    return model, np.arange(96, dtype="int32").reshape(32, 3) % 40


def downpour(cluster, **options):
    return tf_dsgd.DownpourStrategy(cluster, push_every=2, fetch_every=2, **options)


def simulated(_):
    return downpour(tf_dsgd.SimulatedCluster(2, compute_seconds=1.0))


CASES = {
    "downpour": (downpour, dense, "adam"),
    "on_workers": (lambda c: downpour(c, local_rule="optimizer"), dense, "adam"),
    "averaging": (tf_dsgd.PeriodicAveragingStrategy, dense, "adam"),
    "elastic": (tf_dsgd.ElasticAveragingStrategy, dense, "sgd"),
    "hogwild": (tf_dsgd.HogwildStrategy, with_table, "sgd"),
    "rows": (lambda c: downpour(c, placement=ROWS), with_table, "adagrad"),
    "residual": (
        lambda c: downpour(c, compression=tf_dsgd.compression.TopK(0.1)),
        dense,
        "sgd",
    ),
    "peers": (
        lambda c: tf_dsgd.CompressedAsyncStrategy(
            c, compression=tf_dsgd.compression.Threshold(0.002)
        ),
        dense,
        "sgd",
    ),
    "sandblaster": (tf_dsgd.SandblasterStrategy, without_statistics, "rmsprop"),
    "delay": (
        tf_dsgd.DownpourStrategy,
        dense,
        lambda: tf_dsgd.optimizers.DelayCompensatedSGD(0.01, lam=0.1),
    ),
    "schedule": (
        downpour,
        dense,
        lambda: keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.01, 4, 0.5)),
    ),
    "simulated": (simulated, dense, "adam"),
}
FAST = ("downpour", "rows", "schedule")


def variables_of_width() -> int:
    """TensorFlow's, of any strategy, that have something to do with the layer."""
    found = [v for v in gc.get_objects() if isinstance(v, tf.Variable)]
    return sum(v.shape.rank is not None and WIDTH in v.shape.as_list() for v in found)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in FAST else pytest.mark.slow) for n in CASES]
)
def test_models_of_one_strategy_are_freed(name):
    make, build, optimizer = CASES[name]
    strategy = make(tf_dsgd.LocalCluster(2, devices_per_worker=registry.DEVICES))
    counts, held, alive = [], [], []
    for _ in range(4):
        with strategy.scope():
            given = optimizer() if callable(optimizer) else keras.optimizers.get(optimizer)
            model, x = build(given)
        y = np.ones((len(x), 1), "float32")
        losses = model.fit(x, y, batch_size=4, epochs=2, verbose=0).history["loss"]
        assert np.isfinite(losses).all() and np.isfinite(model.predict(x, verbose=0)).all()
        alive.append(weakref.ref(model))
        del model, given
        keras.backend.clear_session()
        gc.collect()
        strategy.shards()
        counts.append(variables_of_width())
        held.append(([s.variables for s in strategy.shards()], len(strategy.engine.store.replicas)))
    assert counts[3] == counts[2] == counts[1] and held[3] == held[2] == held[1], (counts, held)
    # The last one that it trained a strategy keeps.
    assert [each() for each in alive[:-1]] == [None] * 3
