"""`steps_per_execution`, mixed precision, and models compiled in other ways."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_dsgd
from tests import helpers

pytestmark = pytest.mark.medium

ENGINES = helpers.engines(
    local=lambda: tf_dsgd.LocalCluster(2),
    simulated=lambda: tf_dsgd.SimulatedCluster(
        2, compute_seconds=[1.0, 1.5], network_seconds=0.1, seed=0
    ),
)


@pytest.fixture(params=ENGINES)
def cluster(request):
    return ENGINES[request.param]()


@pytest.mark.few(1)
@pytest.mark.thin
@pytest.mark.parametrize("periods", [1, 4])
def test_steps_per_execution(cluster, periods):
    """32 batches by eights, then 30 batches, which eight does not divide: each example once."""
    strategy = tf_dsgd.DownpourStrategy(cluster, push_every=periods, fetch_every=periods)
    with strategy.scope():
        model = helpers.recording_model(
            keras.optimizers.SGD(0.02), metrics=helpers.id_metrics(), steps_per_execution=8
        )
    ends = []
    note = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: ends.append(batch))
    ids = model.get_layer("ids").ids
    for examples, steps in ((256, 32), (240, 30)):
        x, y = helpers.regression(examples)
        before = strategy.steps
        history = model.fit(x, y, batch_size=8, epochs=2, verbose=0, callbacks=[note]).history
        assert strategy.steps - before == 2 * steps
        np.testing.assert_array_equal(ids.take(), np.repeat(np.arange(examples), 2))
        assert history["id_squares"] == [(np.arange(examples) ** 2).sum()] * 2
        assert history["loss"][1] < history["loss"][0]
        assert len(ends) == 8
        ends.clear()
        got = model.evaluate(x, y, batch_size=8, verbose=0, return_dict=True)
        assert int(got["id_count"]) == examples
        assert len(model.predict(x, batch_size=8, verbose=0)) == examples
    helpers.assert_ledger_balances(strategy)


def test_one_mini_batch_is_waited_for_and_the_others_of_a_step_are_handed_out_then(monkeypatch):
    """At each epoch, so that its first logs are of it; and no step of Keras's runs for nothing."""
    strategy = tf_dsgd.DownpourStrategy(tf_dsgd.LocalCluster(1), push_every=8, fetch_every=8)
    with strategy.scope():
        model = helpers.recording_model(keras.optimizers.SGD(0.02), steps_per_execution=8)
    handed_out = []
    awaits = strategy.engine.await_begun

    def noted(program):
        handed_out.append(strategy.batches.handed_out)
        awaits(program)

    monkeypatch.setattr(strategy.engine, "await_begun", noted)
    x, y = helpers.regression(160)
    model.fit(x, y, batch_size=8, epochs=3, verbose=0)
    assert handed_out[-6:] == [21, 29, 37, 41, 49, 57]
    np.testing.assert_array_equal(model.get_layer("ids").ids.take(), np.repeat(np.arange(160), 3))


@pytest.mark.filterwarnings("ignore:Your input ran out of data:UserWarning")
def test_steps_per_execution_on_data_of_unknown_length(cluster):
    strategy = tf_dsgd.DownpourStrategy(cluster)
    with strategy.scope():
        model = helpers.recording_model(keras.optimizers.SGD(0.02), steps_per_execution=8)
    x, y = helpers.regression(170)
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).filter(lambda a, b: True).batch(8)
    model.fit(dataset, epochs=2, shuffle=False, verbose=0)
    ids = model.get_layer("ids").ids
    np.testing.assert_array_equal(ids.take(), np.repeat(np.arange(170), 2))
    assert strategy.steps == 44


@pytest.mark.thin
@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_mixed_precision(cluster, policy):
    """Weights stay float32, the loss falls, every update that is counted was applied."""
    keras.config.set_dtype_policy(policy)
    strategy = tf_dsgd.DownpourStrategy(cluster, push_every=2, fetch_every=2)
    x, y = helpers.regression(256, ids=False)
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((4,)),
                keras.layers.Dense(8, "relu"),
                keras.layers.Dense(1, dtype="float32"),
            ]
        )
        model.compile(keras.optimizers.Adam(0.02), "mse")
    losses = model.fit(x, y, batch_size=8, epochs=6, verbose=0).history["loss"]
    assert losses[-1] < 0.3 * losses[0]
    assert {w.dtype for w in model.weights} == {"float32"}
    helpers.assert_ledger_balances(strategy)


@pytest.mark.parametrize("word", ["run_eagerly", "jit_compile"])
def test_options_work_or_are_refused_by_name(cluster, word):
    strategy = tf_dsgd.DownpourStrategy(cluster)
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1, use_bias=False)])
        model.set_weights([np.zeros((3, 1))])
    x, y = helpers.ones(16)
    with helpers.works_or_explains(word):
        with strategy.scope():
            model.compile(keras.optimizers.SGD(1.0), helpers.mean_output, **{word: True})
        model.fit(x, y, batch_size=2, verbose=0)
        assert strategy.steps == 8
        np.testing.assert_array_equal(model.get_weights()[0], np.full((3, 1), -8.0, "f"))


def test_train_on_batch_works_or_is_refused_by_name(cluster):
    strategy = tf_dsgd.DownpourStrategy(cluster)
    with strategy.scope():
        model = helpers.constant_gradient_model(keras.optimizers.SGD(1.0))
    x, y = helpers.ones(4)
    with helpers.works_or_explains("train_on_batch", "fit"):
        for _ in range(3):
            model.train_on_batch(x, y)
        np.testing.assert_array_equal(model.get_weights()[0], np.full((3, 1), -3.0, "f"))
    before = model.get_weights()[0]
    with helpers.works_or_explains("test_on_batch"):
        assert float(np.ravel(model.test_on_batch(x, y))[0]) == before.sum()
    with helpers.works_or_explains("predict_on_batch"):
        np.testing.assert_array_equal(model.predict_on_batch(x), x @ before)
    # Whatever was refused, training goes on.
    model.fit(x, y, batch_size=2, verbose=0)
    np.testing.assert_array_equal(model.get_weights()[0], before - 2.0)


def test_compiled_again_with_another_optimizer(cluster):
    """A model may be compiled anew under its scope, and its next fit uses the new optimizer."""
    strategy = tf_dsgd.DownpourStrategy(cluster)
    with strategy.scope():
        model = helpers.constant_gradient_model(keras.optimizers.SGD(1.0))
    x, y = helpers.ones(16)
    model.fit(x, y, batch_size=2, verbose=0)
    with strategy.scope():
        model.compile(keras.optimizers.SGD(0.5), helpers.mean_output)
    model.fit(x, y, batch_size=2, verbose=0)
    np.testing.assert_array_equal(model.get_weights()[0], np.full((3, 1), -12.0, "f"))
    assert int(model.optimizer.iterations) == 8
    assert strategy.steps == 16


@pytest.mark.few(1)
def test_a_layer_frozen_between_fits(cluster):
    strategy = tf_dsgd.DownpourStrategy(cluster)
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.05), "mse")
    x, y = helpers.regression(64, ids=False)
    model.fit(x, y, batch_size=8, verbose=0)
    frozen = model.layers[0].get_weights()
    moving = model.layers[1].get_weights()
    model.layers[0].trainable = False
    with strategy.scope():
        model.compile(keras.optimizers.SGD(0.05), "mse")
    model.fit(x, y, batch_size=8, verbose=0)
    helpers.assert_close(model.layers[0].get_weights(), frozen, 0)
    assert abs(model.layers[1].get_weights()[0] - moving[0]).max() > 0
