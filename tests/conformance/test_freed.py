"""A strategy and its model that nobody has any more are freed, and leave no thread."""

import gc
import os
import threading
import weakref

import keras
import numpy as np
import pytest

import tf_dsgd
from tests import helpers
from tests.conformance import registry

if helpers.ON_CLUSTER:
    pytest.skip("What a process leaves is seen on its own threads.", allow_module_level=True)

ROWS = {"table/.*": tf_dsgd.Rows()}


def on_threads():
    return tf_dsgd.LocalCluster(2, devices_per_worker=registry.DEVICES)


def with_table(strategy, optimizer):
    """A model of which a table is most."""
    with strategy.scope():
        ids = keras.Input((3,), dtype="int32")
        rows = keras.layers.Embedding(40, 2, name="table")(ids)
        model = keras.Model(ids, keras.layers.Dense(1)(keras.layers.Flatten()(rows)))
        model.compile(optimizer(), "mse")
    return model, np.arange(96, dtype="int32").reshape(32, 3) % 40


def dense(strategy, optimizer, *more, **options):
    with strategy.scope():
        layers = [keras.layers.Dense(4, "tanh"), *(layer() for layer in more)]
        model = keras.Sequential([keras.Input((3,)), *layers, keras.layers.Dense(1)])
        model.compile(optimizer(), "mse", metrics=["mae"], **options)
    return model, np.linspace(-1, 1, 96, dtype="float32").reshape(32, 3)


def of_the_registry(name):
    def made():
        strategy = (registry.CONFIGURATIONS | registry.WITH_CODECS)[name](on_threads())
        if name in registry.WITH_TABLE:
            return (strategy, *with_table(strategy, lambda: registry.optimizer(name)))
        with strategy.scope():
            # Layers are named as those on parts are in the registry.
            model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1, name="dense")])
            model.compile(registry.optimizer(name), "mse")
        return strategy, model, np.ones((32, 3), "float32")

    return made


def of(make, build, optimizer=lambda: keras.optimizers.SGD(0.05), *more, **options):
    def made():
        strategy = make(on_threads())
        return (strategy, *build(strategy, optimizer, *more, **options))

    return made


def adam():
    return keras.optimizers.Adam(0.01)


def simulated(_):
    return tf_dsgd.DownpourStrategy(tf_dsgd.SimulatedCluster(3, compute_seconds=1.0))


OTHERS = {
    "hogwild": of(tf_dsgd.HogwildStrategy, with_table),
    "hogwild_rows": of(lambda c: tf_dsgd.HogwildStrategy(c, lock="rows"), with_table),
    "sandblaster": of(tf_dsgd.SandblasterStrategy, dense, lambda: "rmsprop"),
    "rows": of(lambda c: tf_dsgd.DownpourStrategy(c, placement=ROWS), with_table),
    "half_sync": of(lambda c: tf_dsgd.PeriodicAveragingStrategy(c, placement=ROWS), with_table),
    "batch_norm": of(tf_dsgd.DownpourStrategy, dense, adam, keras.layers.BatchNormalization),
    "compiled": of(tf_dsgd.DownpourStrategy, dense, jit_compile=True),
    "simulated": of(simulated, dense),
}
MAKERS = (
    {}
    if registry.IN_PARTS
    else {
        **OTHERS,
        **{n: of_the_registry(n) for n in registry.CONFIGURATIONS},
        **{n: of_the_registry(n) for n in registry.WITH_CODECS},
    }
)
FAST = {"downpour", "averaging", "rows", "hogwild", "sandblaster", "peers"}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in FAST else pytest.mark.slow) for n in MAKERS]
)
def test_freed(name, tmp_path):
    before, of_system = set(threading.enumerate()), len(os.listdir("/proc/self/task"))
    strategy, model, x = MAKERS[name]()
    callbacks = [tf_dsgd.callbacks.BackupAndRestore(tmp_path)]
    y = np.ones((len(x), 1), "float32")
    model.fit(x, y, batch_size=4, epochs=2, verbose=0, validation_data=(x, y), callbacks=callbacks)
    model.predict(x, verbose=0)
    alive = [weakref.ref(model), weakref.ref(strategy), weakref.ref(strategy.engine)]
    del model, strategy, callbacks
    keras.backend.clear_session()
    gc.collect()
    assert [reference() for reference in alive] == [None] * 3
    left = set(threading.enumerate()) - before
    for thread in left:  # one that frees a dataset ends by itself
        thread.join(30)
    assert not any(thread.is_alive() for thread in left)
    # TensorFlow's own pools may have begun; locks of rows have a thread each.
    assert len(os.listdir("/proc/self/task")) < of_system + 60
