"""A replica over several devices is the replica on one, and plain Keras; its witness is Keras."""

import contextlib

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_dsgd
from tests import helpers
from tests.equivalence import twin
from tests.equivalence.on_devices import models


def local(devices, **options):
    if helpers.ON_CLUSTER:
        return tf_dsgd.TFCluster(tasks_per_worker=devices, **options)
    return tf_dsgd.LocalCluster(1, devices_per_worker=devices, **options)


def downpour(parts, devices=2, microbatches=1, **options):
    laid = tf_dsgd.ModelParallel(parts, microbatches=microbatches)
    return tf_dsgd.DownpourStrategy(local(devices), model_parallel=laid, **options)


SLOW = {
    "skip backwards",
    "branch backwards",
    "loop",
    "operators",
    "auto",
    "update",
    "compressed",
    "averaging",
    "elastic",
}
"""Models and strategies of the second tier."""
slow = pytest.mark.slow


def tiered(names):
    return [pytest.param(n, marks=[pytest.mark.slow] if n in SLOW else []) for n in names]


@pytest.mark.parametrize("name", tiered(models.SPLITS))
def test_a_split_is_plain_keras(name):
    make, data, parts = models.SPLITS[name]
    twin.assert_same_as_plain(make, downpour(parts), *data())


@pytest.mark.parametrize("rule", ["sgd", pytest.param("optimizer", marks=slow)])
def test_weights_and_what_goes_with_them_are_where_their_layers_are(rule):
    strategy = downpour({"a": 0, "b|sum": 2, "c": 1}, devices=3, local_rule=rule)
    with strategy.scope():
        model = models.skip()
    model.fit(*models.vectors(), batch_size=8, verbose=0)
    found = {v.path: v.value.copies.template.device[-5:] for v in model.weights}
    parts = {"a": "CPU:0", "b": "CPU:2", "c": "CPU:1"}
    assert found == {path: parts[path.split("/")[-2]] for path in found}
    if rule == "sgd":
        besides = [v.device for v in strategy.engine.store.variables() if "accrued" in v.name]
    else:
        slots = [v for v in model.optimizer.variables if v.path.endswith("momentum")]
        besides = [v.value.copies.template.device for v in slots]
    assert sorted(device[-5:] for device in besides) == sorted(found.values())


@pytest.mark.parametrize("cluster", ["local", pytest.param("simulated", marks=slow)])
def test_one_device_gives_the_same_bits(cluster):
    def weights(value):
        keras.utils.set_random_seed(3)
        on = local(1) if cluster == "local" else tf_dsgd.SimulatedCluster(2, compute_seconds=[1, 3])
        strategy = tf_dsgd.DownpourStrategy(on, push_every=2, fetch_every=3, model_parallel=value)
        with strategy.scope():
            model = models.normal()
        model.fit(*models.vectors(), batch_size=8, verbose=0, shuffle=False)
        return twin.state(model.weights)

    for one, other in zip(weights(None), weights(tf_dsgd.ModelParallel({".*": 0})), strict=True):
        np.testing.assert_array_equal(one, other)


STRATEGIES = {
    "sgd": (tf_dsgd.DownpourStrategy, {"push_every": 2, "fetch_every": 3}),
    "update": (
        tf_dsgd.DownpourStrategy,
        {"push_every": 2, "fetch_every": 2, "local_rule": "optimizer"},
    ),
    "compressed": (
        tf_dsgd.DownpourStrategy,
        {"compression": tf_dsgd.compression.Threshold(0.01)},
    ),
    "softsync": (tf_dsgd.SoftsyncStrategy, {"gradients_per_update": 2}),
    "averaging": (tf_dsgd.PeriodicAveragingStrategy, {"average_every": 2}),
    "elastic": (tf_dsgd.ElasticAveragingStrategy, {"average_every": 2}),
}


@pytest.mark.parametrize("name", tiered(STRATEGIES))
def test_stale_workers_are_those_that_have_one_device(name):
    """Two simulated workers, whose delays make messages stale, alike in both runs."""
    strategy, options = STRATEGIES[name]
    microbatches = 3 if name in ("softsync", "update", "averaging") else 1

    def weights(devices, value):
        keras.utils.set_random_seed(3)
        delays = {"compute_seconds": [1.0, 1.7], "network_seconds": 0.1}
        cluster = tf_dsgd.SimulatedCluster(2, devices_per_worker=devices, **delays)
        made = strategy(cluster, model_parallel=value, **options)
        with made.scope():
            model = models.skip()
        model.fit(*models.vectors(), batch_size=8, epochs=2, verbose=0, shuffle=False)
        return twin.state(model.weights)

    laid = tf_dsgd.ModelParallel({"a": 0, "b|sum|c": 1}, microbatches=microbatches)
    for one, other in zip(weights(1, None), weights(2, laid), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("parts", "devices", "idle"),
    [
        ({"a": 0, "b|sum|c": 2}, 3, "no layer for part 1, of 3"),
        # The first pattern has all.
        pytest.param({".*": 0, "c": 1}, 2, "no layer for part 1, of 2", marks=slow),
        pytest.param({"a": 0, ".*": 1}, 2, None, marks=slow),
    ],
)
def test_a_part_without_layers_is_told_of_once(parts, devices, idle, capsys):
    with downpour(parts, devices).scope():
        model = models.skip()
    x, y = models.vectors()
    for size in (8, 7):  # traced for each
        model.fit(x[:size], y[:size], batch_size=8, verbose=0)
    said = capsys.readouterr().err
    assert said.count("has no layer for part") == (idle is not None) and (idle or "") in said


def test_auto_needs_a_layer_for_each_part():
    with downpour("auto", devices=3).scope():
        model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(2), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    with pytest.raises(ValueError, match=r"of at least 3 layers. Received: .* with 2 layers"):
        model.fit(*models.vectors(), batch_size=8, verbose=0)


def test_threads_with_two_devices_each_train_every_example_once():
    strategy = tf_dsgd.DownpourStrategy(
        tf_dsgd.LocalCluster(2, devices_per_worker=2),
        model_parallel=tf_dsgd.ModelParallel({"a": 0, ".*": 1}, microbatches=2),
    )
    assert strategy.engine.store.part_devices == [
        ["/device:CPU:0", "/device:CPU:1"],
        ["/device:CPU:2", "/device:CPU:3"],
    ]
    with strategy.scope():
        model = models.skip()
    x, y = models.vectors()
    history = model.fit(x, y, batch_size=8, epochs=8, verbose=0)
    assert history.history["loss"][-1] < 0.7 * history.history["loss"][0]
    ledger = strategy.ledger()
    assert (strategy.steps, ledger.sent, ledger.applied) == (8 * 6, 8 * 6, 8 * 6)


@pytest.mark.parametrize(
    ("options", "microbatches"),
    [
        ({"global_clipnorm": 0.1}, 3),
        pytest.param({}, 2, marks=slow),
        pytest.param({"clipnorm": 0.05}, 3, marks=slow),
        pytest.param({"clipvalue": 0.01}, 2, marks=slow),
    ],
    ids=str,
)
def test_microbatches_have_the_gradient_of_the_mini_batch(options, microbatches):
    """Of 8 examples in 3 pieces of 2, 3 and 3, and of the last 6 of 46; clipped after the sum."""

    def make():
        x = keras.Input((5,))
        hidden = keras.layers.Dense(6, "tanh", kernel_regularizer="l2", name="a")(x)
        model = keras.Model(x, keras.layers.Dense(1, name="c")(hidden))
        optimizer = keras.optimizers.SGD(0.1, momentum=0.5, **options)
        return models.compiled(model, optimizer, metrics=["mae"], weighted_metrics=["mse"])

    x, y = (array[:46] for array in models.vectors())
    weights = np.linspace(0.5, 2.0, 46)
    strategy = downpour({"a": 0, "c": 1}, microbatches=microbatches)
    twin.assert_same_as_plain(make, strategy, x, y, sample_weight=weights)


def test_microbatches_of_rows_and_of_several_tensors():
    for name in ("embedding", "several"):
        make, data, parts = models.SPLITS[name]
        twin.assert_same_as_plain(make, downpour(parts, microbatches=3), *data())


def test_a_piece_of_as_many_examples_as_there_are_outputs():
    """`keras.ops.add` of (n, n) and (n, 1) takes the latter for a bias where n is known."""

    def make():
        x = keras.Input((5,))
        hidden = keras.layers.Dense(6, "tanh", name="a")(x)
        outputs = keras.layers.Dense(3, name="b")(hidden) + keras.layers.Dense(1, name="c")(hidden)
        return models.compiled(keras.Model(x, outputs), keras.optimizers.SGD(0.1))

    x, _ = models.vectors()
    strategy = downpour({"a": 0, "b": 1, "c": 1}, microbatches=3)  # of 8: 2, 3, 3
    twin.assert_same_as_plain(make, strategy, x, x[:, :3])


class OwnStep(keras.Model):
    """Scales no loss; its losses are metrics of the last piece."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = keras.ops.mean(keras.ops.square(self(x, training=True) - y))
        weights = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        self._loss_tracker.update_state(loss, sample_weight=tf.shape(x)[0])
        return self.get_metrics_result()


@slow
def test_microbatches_of_a_step_of_ones_own():
    def make():
        x = keras.Input((5,))
        hidden = keras.layers.Dense(6, "tanh", name="a")(x)
        return models.compiled(OwnStep(x, keras.layers.Dense(1, name="c")(hidden)))

    strategy = downpour({"a": 0, "c": 1}, microbatches=3)
    twin.assert_same_as_plain(make, strategy, *models.vectors())


@slow
def test_a_state_goes_on_with_another_split():
    """Weights and the strategy's state, saved under one split, are those of another."""

    def made(value, devices):
        keras.utils.set_random_seed(3)
        strategy = tf_dsgd.DownpourStrategy(
            local(devices), local_rule="optimizer", fetch_every=2, model_parallel=value
        )
        with strategy.scope():
            model = models.skip()
        return strategy, model

    def fit(model):
        model.fit(*models.vectors(), batch_size=8, verbose=0, shuffle=False)

    _, whole = made(None, 1)
    fit(whole)
    fit(whole)
    one, first = made(tf_dsgd.ModelParallel({"a": 0, ".*": 1}), 2)
    fit(first)
    other, second = made(tf_dsgd.ModelParallel({"c": 0, ".*": 2}), 3)
    with other.scope():
        second.optimizer.build(second.trainable_variables)
    second.set_weights(first.get_weights())
    for to, value in zip(second.optimizer.variables, first.optimizer.variables, strict=True):
        to.assign(value)
    other.restore(one.state())
    fit(second)
    for a, b in zip(twin.state(whole.weights), twin.state(second.weights), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("way", ["backup", pytest.param("weights", marks=slow)])
def test_training_goes_on_under_another_split(way, tmp_path):
    """From a checkpoint, or a file of weights: what is saved knows nothing of parts."""
    x, y = models.vectors()

    def made(strategy=None):
        keras.utils.set_random_seed(3)
        with contextlib.nullcontext() if strategy is None else strategy.scope():
            model = models.skip()
            if way == "weights":  # a file of weights has no slots
                model.compile("sgd", "mse")
        return model

    def fit(model, epochs, *callbacks):
        settings = {"batch_size": 8, "shuffle": False, "verbose": 0}
        model.fit(x, y, epochs=epochs, callbacks=list(callbacks), **settings)

    first = made(downpour({"a": 0, ".*": 1}))
    second = made(downpour({"c": 0, ".*": 2}, 3))
    if way == "weights":
        fit(first, 1)
        first.save_weights(tmp_path / "first.weights.h5")
        second.load_weights(tmp_path / "first.weights.h5")
        fit(second, 1)
    else:
        ends = helpers.break_off(1, 2)
        with pytest.raises(helpers.Broken):
            fit(first, 2, tf_dsgd.callbacks.BackupAndRestore(tmp_path / "backup"), ends)
        fit(second, 2, tf_dsgd.callbacks.BackupAndRestore(tmp_path / "backup"))
    plain = made()
    fit(plain, 2)
    helpers.assert_close(twin.state(second.weights), twin.state(plain.weights), 1e-6)
