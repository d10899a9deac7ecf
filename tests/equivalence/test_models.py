"""One worker and periods of 1: every kind of model ends where plain Keras does."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_dsgd
from tests import helpers
from tests.equivalence import twin
from tests.equivalence.models import MODELS

pytestmark = pytest.mark.medium


@pytest.mark.few(7)
@pytest.mark.thin
@pytest.mark.parametrize("engine", twin.ENGINES)
@pytest.mark.parametrize("name", MODELS)
def test_model(name, engine):
    make, data = MODELS[name]
    strategy = tf_dsgd.DownpourStrategy(twin.ENGINES[engine]())
    model, _ = twin.assert_same_as_plain(make, strategy, *data())
    assert strategy.steps == int(model.optimizer.iterations) == twin.STEPS


def test_moving_statistics_moved():
    """The comparison above would also hold if neither model had updated its statistics."""
    make, data = MODELS["batch_norm"]
    strategy = tf_dsgd.DownpourStrategy(helpers.workers(1))
    with strategy.scope():
        model, _, _ = twin.fit(make, *data())
    layer = model.layers[1]
    assert abs(layer.moving_mean.numpy()).max() > 1e-3
    assert abs(layer.moving_variance.numpy() - 1.0).max() > 1e-3


def test_class_and_sample_weights_change_the_same_steps():
    x, y = twin.data()
    make = twin.mlp(lambda: keras.optimizers.SGD(0.1))
    weight = np.linspace(0.0, 2.0, len(x)).astype("float32")
    strategy = tf_dsgd.DownpourStrategy(helpers.workers(1))
    twin.assert_same_as_plain(make, strategy, x, y, sample_weight=weight)
    labels = (y > 0).astype("float32")
    strategy = tf_dsgd.DownpourStrategy(helpers.workers(1))
    twin.assert_same_as_plain(make, strategy, x, labels, class_weight={0: 0.25, 1: 3.0})


def test_validation_logs_equal_plain_ones():
    x, y = twin.data()
    make = twin.mlp(lambda: keras.optimizers.Adam(0.01))
    for arguments in ({"validation_data": (x[:20], y[:20])}, {"validation_split": 0.25}):
        strategy = tf_dsgd.DownpourStrategy(helpers.workers(1))
        twin.assert_same_as_plain(make, strategy, x, y, **arguments)


def test_an_embedding_row_that_is_never_read_stays():
    """A sparse gradient touches the rows it names, under momentum too; others keep their bits."""
    make, data = MODELS["embedding"]
    x, y = data()
    strategy = tf_dsgd.DownpourStrategy(helpers.workers(2), push_every=2, fetch_every=3)
    with strategy.scope():
        model, start, _ = twin.fit(make, np.minimum(x, 30), y)
    table = model.layers[0].embeddings.numpy()
    np.testing.assert_array_equal(table[31:], start[0][31:])
    read = np.unique(np.minimum(x, 30))
    assert (abs(table[read] - start[0][read]).max(1) > 0).all()


def test_two_workers_draw_different_noise():
    """A layer's random numbers must not repeat between workers, nor from step to step."""
    seen = []

    class Note(keras.layers.Layer):
        def call(self, inputs, training=False):
            if not training:
                return inputs
            outputs = tf.numpy_function(self.note, [inputs], inputs.dtype)
            outputs.set_shape(inputs.shape)
            return outputs

        def note(self, inputs):
            seen.append(inputs.copy())
            return inputs

    cluster = tf_dsgd.SimulatedCluster(3, compute_seconds=1.0, network_seconds=0.1, seed=0)
    strategy = tf_dsgd.DownpourStrategy(cluster)
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((50,)),
                keras.layers.GaussianNoise(1.0, seed=9),
                Note(),
                keras.layers.Dense(1),
            ]
        )
        model.compile("sgd", "mse")
    model.fit(np.zeros((48, 50), "f"), np.zeros((48, 1), "f"), batch_size=4, verbose=0)
    rows = np.stack([batch.ravel() for batch in seen])
    assert len(rows) == 12
    assert len(np.unique(rows, axis=0)) == 12
