"""What a checkpoint of `SandblasterStrategy` holds, and when one can be made."""

import keras
import numpy as np
import pytest

import tf_dsgd
from tests import helpers

pytestmark = pytest.mark.medium


def _resumable(num_shards=1):
    """A strategy, its model of four weights, and arguments for `fit`."""
    cluster = tf_dsgd.SimulatedCluster(
        2, num_shards=num_shards, compute_seconds=1.0, network_seconds=0.1
    )
    strategy = tf_dsgd.SandblasterStrategy(cluster, history=3)
    keras.utils.set_random_seed(1)
    with strategy.scope():
        layers = [keras.layers.Dense(3, "tanh"), keras.layers.Dense(1)]
        model = keras.Sequential([keras.Input((4,)), *layers])
        model.compile(loss="mse")
    random = np.random.default_rng(1)
    model.set_weights([random.standard_normal(w.shape) for w in model.get_weights()])
    x, y = helpers.regression(30, ids=False)
    return strategy, model, {"x": x, "y": np.tanh(y), "batch_size": 8, "verbose": 0}


def _resumed(epochs, folder, num_shards=1):
    strategy, model, options = _resumable(num_shards)
    backup = tf_dsgd.callbacks.BackupAndRestore
    callbacks = [backup(folder, delete_checkpoint=False)] if folder else []
    history = model.fit(**options, epochs=epochs, shuffle=False, callbacks=callbacks)
    return model.get_weights(), strategy.last_iteration(), history.epoch


def test_resumed_runs_go_on_bit_for_bit_on_the_simulator(tmp_path):
    _resumed(3, tmp_path)
    resumed, last, epochs = _resumed(7, tmp_path)
    assert epochs == [3, 4, 5, 6]
    whole, expected, _ = _resumed(7, None)
    helpers.assert_close(resumed, whole, 0)
    assert last == expected


def test_the_history_goes_on_with_another_number_of_shards(tmp_path):
    """Of six shards two have no weight. Dot products are added up in another order, in double."""
    for epochs, num_shards in ((3, 1), (5, 3), (6, 6), (7, 2)):
        resumed, last, _ = _resumed(epochs, tmp_path, num_shards)
    whole, expected, _ = _resumed(7, None)
    helpers.assert_close(resumed, whole, 1e-5)
    assert (last.number, last.evaluations) == (expected.number, expected.evaluations)


def test_a_history_of_others_is_refused_once():
    strategy, model, options = _resumable()
    model.fit(**options, epochs=2)
    state = strategy.state()
    other, model, options = _resumable()
    broken = {**state, "batch_vector_3": np.zeros((7, 7), "float32")}
    other.restore(broken)
    with pytest.raises(ValueError, match=r"batch_vector_3 is \(7, 7\), and \(3,\) is expected"):
        model.fit(**options)
    before = other.last_iteration()
    assert model.fit(**options).epoch == [0]
    assert before is None and other.last_iteration().number == 3
    del broken["batch_vector_3"]
    with pytest.raises(ValueError, match=r"'batch_vector_3'\] are missing"):
        other.restore(broken)


def test_a_checkpoint_in_the_middle_of_an_epoch_is_refused(tmp_path):
    _, model, options = _resumable()
    backup = tf_dsgd.callbacks.BackupAndRestore(tmp_path, save_freq=2)
    with pytest.raises(ValueError, match='save_freq="epoch"'):
        model.fit(**options, callbacks=[backup])


class _Stop(keras.callbacks.Callback):
    """Ends training after two mini-batches of the third epoch."""

    epoch = 0

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        self.model.stop_training = (self.epoch, batch) == (2, 1)


@pytest.mark.parametrize("backup_first", [False, True])
def test_an_epoch_that_a_callback_ends_is_an_iteration_and_saved(tmp_path, backup_first):
    _, model, options = _resumable()
    backup = tf_dsgd.callbacks.BackupAndRestore(tmp_path, delete_checkpoint=False)
    callbacks = [backup, _Stop()] if backup_first else [_Stop(), backup]
    history = model.fit(**options, epochs=5, shuffle=False, callbacks=callbacks)
    assert history.epoch == [0, 1, 2]
    resumed, last, epochs = _resumed(5, tmp_path)
    assert epochs == [3, 4]
    whole, expected, _ = _resumed(5, None)
    helpers.assert_close(resumed, whole, 0)
    assert last == expected
