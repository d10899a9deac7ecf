"""What was NaN or infinite, and is set to a number again, is one: workers keep nothing of it."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_dsgd
from tests import helpers

pytestmark = pytest.mark.medium

if helpers.ON_CLUSTER:
    pytest.skip("Simulated workers are tried here.", allow_module_level=True)

CLUSTERS = {
    "local": lambda: tf_dsgd.LocalCluster(2),
    # Its workers may be lost: their metrics are merged as on a cluster.
    "simulated": lambda: tf_dsgd.SimulatedCluster(2, late_after_seconds=1e6),
}
BAD = pytest.mark.parametrize("bad", [np.nan, np.inf])


@pytest.fixture(params=CLUSTERS)
def cluster(request):
    return CLUSTERS[request.param]()


def linear(loss, **options):
    layer = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
    model = keras.Sequential([keras.Input((1,)), layer])
    model.compile(keras.optimizers.SGD(0.1), loss, **options)
    return model


@BAD
def test_metrics_begin_anew(cluster, bad):
    strategy = tf_dsgd.DownpourStrategy(cluster)
    with strategy.scope():
        target = keras.metrics.MeanMetricWrapper(lambda y, p: y[:, 0], "target")
        model = linear(lambda y, p: p[:, 0] ** 2, metrics=[target])
    x = np.ones((8, 1), "float32")
    first = model.fit(x, bad * x, batch_size=2, verbose=0).history["target"]
    assert not np.isfinite(first).any()
    for _ in range(2):
        assert model.fit(x, x, batch_size=2, verbose=0).history["target"] == [1.0]


@BAD
@pytest.mark.parametrize("rule", ["none", "sgd", "optimizer"])
def test_weights_that_are_set_train_on(cluster, bad, rule):
    strategy = tf_dsgd.DownpourStrategy(cluster, local_rule=rule)
    with strategy.scope():
        model = linear("mse")
    good, x = model.get_weights(), np.ones((8, 1), "float32")
    model.fit(bad * x, x, batch_size=2, verbose=0)
    assert not np.isfinite(model.get_weights()[0]).any()
    model.set_weights(good)
    with strategy.scope():
        model.compile(keras.optimizers.SGD(0.01), "mse")
    model.fit(x, x, batch_size=2, verbose=0)
    assert np.isfinite(model.get_weights()[0]).all()


def test_a_batch_method_shortens_a_step_to_where_the_loss_is_a_number(cluster):
    """The first step goes to 0.8, where the loss is infinite."""

    def loss(y, p):
        del y
        return tf.where(p > 0.5, float("inf"), (p - 0.4) ** 2)[:, 0]

    strategy = tf_dsgd.SandblasterStrategy(cluster, method="gd", line_search="armijo")
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((1,)),
                keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros"),
            ]
        )
        model.compile(loss=loss)
    x = np.ones((8, 1), "float32")
    losses = model.fit(x, x, batch_size=4, epochs=4, verbose=0).history["loss"]
    assert np.isfinite(losses).all()
    assert losses[-1] < losses[0] <= 0.16 + 1e-6


def test_rows_that_a_refused_message_changed_are_fetched_again(cluster):
    """An error ends `fit` where a worker has changed rows of its copy and not sent them."""
    strategy = tf_dsgd.DownpourStrategy(cluster, push_every=4, fetch_every=4)
    layers = [
        keras.Input((1,), dtype="int32"),
        keras.layers.Embedding(10, 1, embeddings_initializer="zeros"),
        keras.layers.Flatten(),
    ]
    with strategy.scope():
        model = keras.Sequential(layers)
        model.compile(keras.optimizers.SGD(0.1), "mse")

    def fit(ids):
        x, y = np.array(ids)[:, None], np.ones((len(ids), 1), "float32")
        model.fit(x, y, batch_size=1, shuffle=False, verbose=0)

    fit([5])
    with pytest.raises(tf.errors.InvalidArgumentError, match="99"):
        fit([0, 1, 99, 2])
    fit([5])
    program = strategy.engine.program
    (weight,) = program.step.weights
    for m in range(2):
        program.fetch[m]()
        np.testing.assert_array_equal(weight.on_workers().of(m).numpy(), weight.primary.numpy())
