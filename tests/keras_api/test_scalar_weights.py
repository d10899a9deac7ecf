"""A weight that is a scalar, and what an optimizer keeps of it."""

import functools
import shutil

import keras
import numpy as np
import pytest

import tf_dsgd

pytestmark = pytest.mark.medium


class Scaled(keras.layers.Layer):
    def build(self, shape):
        self.scale = self.add_weight(shape=(), initializer="ones")

    def call(self, inputs):
        return self.scale * inputs


def _trained(num_shards, epochs, strategy, optimizer, callbacks=()):
    keras.utils.set_random_seed(1)
    cluster = tf_dsgd.SimulatedCluster(
        2, num_shards=num_shards, compute_seconds=1.0, network_seconds=0.1
    )
    with strategy(cluster).scope():
        layers = [keras.layers.Dense(3), Scaled(), keras.layers.Dense(1), Scaled()]
        model = keras.Sequential([keras.Input((4,)), *layers])
        model.compile(optimizer(0.05), "mse")
    x = np.random.default_rng(1).standard_normal((48, 4)).astype("float32")
    options = {"batch_size": 8, "epochs": epochs, "shuffle": False, "verbose": 0}
    model.fit(x, x[:, :1] * 2, callbacks=list(callbacks), **options)
    return model


softsync = functools.partial(tf_dsgd.SoftsyncStrategy, gradients_per_update=2)


@pytest.mark.parametrize(
    ("strategy", "optimizer"),
    [
        (tf_dsgd.DownpourStrategy, keras.optimizers.Adagrad),
        (
            functools.partial(tf_dsgd.SoftsyncStrategy, gradients_per_update=2),
            keras.optimizers.Adam,
        ),
    ],
)
def test_its_slots_go_on_with_another_number_of_shards(tmp_path, strategy, optimizer):
    whole = _trained(1, 6, strategy, optimizer)
    # The second checkpoint: the first is made before other shards could have copies.
    backup = tf_dsgd.callbacks.BackupAndRestore
    begun = backup(tmp_path / "two", delete_checkpoint=False)
    _trained(2, 3, strategy, optimizer, [begun])
    for shards in (1, 3):
        folder = tmp_path / str(shards)
        shutil.copytree(tmp_path / "two", folder)
        model = _trained(shards, 6, strategy, optimizer, [backup(folder)])
        for variable, expected in zip(
            [*model.weights, *model.optimizer.variables],
            [*whole.weights, *whole.optimizer.variables],
            strict=True,
        ):
            if variable.shape == ():
                np.testing.assert_allclose(variable.numpy(), expected.numpy(), rtol=1e-5)
