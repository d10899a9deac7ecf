"""Stopped and started again: the epoch, the optimizer and the strategy's own counters go on."""

import keras
import numpy as np
import pytest

import tf_dsgd
from tests import helpers

pytestmark = pytest.mark.medium

CALLBACKS = {
    "keras": keras.callbacks.BackupAndRestore,
    "tf_dsgd": lambda path: tf_dsgd.callbacks.BackupAndRestore(path),
}
STEPS = 8


class Interrupted(Exception):
    """Stands for whatever ends a run."""


class InterruptAt(keras.callbacks.Callback):
    def __init__(self, epoch, batch):
        super().__init__()
        self.at, self.epoch = (epoch, batch), None

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        if (self.epoch, batch) == self.at:
            raise Interrupted


def start(**options):
    keras.utils.set_random_seed(3)
    cluster = tf_dsgd.SimulatedCluster(1, compute_seconds=1.0, network_seconds=0.0, seed=0)
    strategy = tf_dsgd.DownpourStrategy(cluster, **options)
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.Adam(0.05), "mse")
    return strategy, model


def fit(model, *callbacks):
    x, y = helpers.regression(8 * STEPS, ids=False)
    seen = []
    note = keras.callbacks.LambdaCallback(on_epoch_begin=lambda epoch, logs: seen.append(epoch))
    settings = {"batch_size": 8, "epochs": 4, "shuffle": False, "verbose": 0}
    model.fit(x, y, callbacks=[*callbacks, note], **settings)
    return seen


OPTIONS = {
    "1_1": {},
    "3_2": {"push_every": 3, "fetch_every": 2},
    "update_3_2": {"push_every": 3, "fetch_every": 2, "local_rule": "optimizer"},
}


@pytest.mark.few(2)
@pytest.mark.thin
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("name", CALLBACKS)
def test_a_resumed_run_ends_where_an_unbroken_one_does(name, options, tmp_path):
    unbroken, reference = start(**options)
    fit(reference)
    strategy, model = start(**options)
    with pytest.raises(Interrupted):
        fit(model, CALLBACKS[name](tmp_path / "backup"), InterruptAt(2, 4))
    strategy, model = start(**options)
    epochs = fit(model, CALLBACKS[name](tmp_path / "backup"))
    assert epochs == [2, 3]
    helpers.assert_close(model.get_weights(), reference.get_weights(), 1e-6)
    assert int(model.optimizer.iterations) == int(reference.optimizer.iterations)
    if name == "tf_dsgd":
        assert strategy.steps == unbroken.steps == 4 * STEPS
        assert strategy.updates == unbroken.updates
        assert strategy.ledger().in_flight == 0


def test_a_schedule_resumes_by_mini_batches(tmp_path):
    """The rate falls to 0 after 24 mini-batches; a run cut after 16 must know that 8 are left."""

    def make():
        cluster = tf_dsgd.SimulatedCluster(1, compute_seconds=1.0, network_seconds=0.0, seed=0)
        strategy = tf_dsgd.DownpourStrategy(cluster, push_every=4, fetch_every=4)
        rate = keras.optimizers.schedules.PiecewiseConstantDecay([24], [1.0, 0.0])
        with strategy.scope():
            return helpers.constant_gradient_model(keras.optimizers.SGD(rate))

    def run(model, *callbacks):
        x, y = helpers.ones(2 * 8)
        model.fit(x, y, batch_size=2, epochs=6, verbose=0, callbacks=list(callbacks))
        return float(model.get_weights()[0][0, 0])

    unbroken = run(make())
    backup = tf_dsgd.callbacks.BackupAndRestore
    with pytest.raises(Interrupted):
        run(make(), backup(tmp_path / "backup"), InterruptAt(2, 1))
    assert run(make(), backup(tmp_path / "backup")) == unbroken
    assert -28.0 <= unbroken <= -24.0


def test_weights_from_a_file_bring_the_mini_batches_of_a_schedule(tmp_path):
    """A file holds updates; with three gradients in each, four of them are twelve mini-batches."""

    def make():
        cluster = tf_dsgd.SimulatedCluster(2, compute_seconds=1.0, network_seconds=0.0, seed=0)
        strategy = tf_dsgd.SoftsyncStrategy(cluster, gradients_per_update=3, staleness_scaling=None)
        rate = keras.optimizers.schedules.PiecewiseConstantDecay([15], [1.0, 0.0])
        with strategy.scope():
            return helpers.constant_gradient_model(keras.optimizers.SGD(rate))

    def run(model):
        x, y = helpers.ones(2 * 12)
        model.fit(x, y, batch_size=2, verbose=0)
        return float(model.get_weights()[0][0, 0])

    model = make()
    assert run(model) == -4.0
    model.save_weights(tmp_path / "after.weights.h5")
    model = make()
    model.load_weights(tmp_path / "after.weights.h5")
    assert int(model.optimizer.iterations) == 4
    # Updates by mini-batches 14, 17, 20 and 23, counted from 0: only the first has a rate of 1.
    assert run(model) == -5.0


def test_a_finished_run_leaves_no_backup(tmp_path):
    _, model = start()
    assert fit(model, tf_dsgd.callbacks.BackupAndRestore(tmp_path / "backup")) == [0, 1, 2, 3]
    assert not (tmp_path / "backup").exists()


@pytest.mark.parametrize("engine", ["local", "simulated"])
def test_a_fit_after_an_exception_is_exact(engine):
    """What a callback raises ends `fit`; the next one's metrics hold its own samples alone."""
    cluster = (
        tf_dsgd.LocalCluster(2)
        if engine == "local"
        else tf_dsgd.SimulatedCluster(2, compute_seconds=1.0, network_seconds=0.5, seed=0)
    )
    strategy = tf_dsgd.DownpourStrategy(cluster, push_every=2, fetch_every=3)
    x, y = helpers.regression(96)
    with strategy.scope():
        model = helpers.recording_model(keras.optimizers.SGD(0.01), metrics=helpers.id_metrics())
    settings = {"batch_size": 2, "verbose": 0}
    with pytest.raises(Interrupted):
        model.fit(x, y, callbacks=[InterruptAt(0, 9)], **settings)
    history = model.fit(x, y, epochs=2, **settings).history
    assert history["id_sum"] == [96 * 95 / 2] * 2
    assert history["id_count"] == [96] * 2
    done = len(model.get_layer("ids").ids.take()) // 2
    assert 2 * 48 + 10 <= done < 3 * 48
    assert strategy.steps == done  # what had been handed out was done, and counted
    helpers.assert_ledger_balances(strategy)


def test_two_local_workers_resume_after_an_interruption(tmp_path):
    """Nothing of the broken epoch counts: a constant gradient leaves one step per mini-batch."""

    def make():
        strategy = tf_dsgd.DownpourStrategy(tf_dsgd.LocalCluster(2), push_every=2, fetch_every=3)
        with strategy.scope():
            return strategy, helpers.constant_gradient_model(keras.optimizers.SGD(1.0))

    x, y = helpers.ones(2 * STEPS)
    settings = {"batch_size": 2, "epochs": 4, "verbose": 0}
    _, model = make()
    backup = tf_dsgd.callbacks.BackupAndRestore
    with pytest.raises(Interrupted):
        model.fit(x, y, callbacks=[backup(tmp_path / "b"), InterruptAt(1, 3)], **settings)
    strategy, model = make()
    model.fit(x, y, callbacks=[backup(tmp_path / "b")], **settings)
    np.testing.assert_array_equal(model.get_weights()[0], np.full((3, 1), -4.0 * STEPS, "f"))
    assert strategy.steps == 4 * STEPS
    assert strategy.ledger().in_flight == 0


# By a run that is broken off; test_backup_resume.py goes through all strategies.
AVERAGING = {
    "average": lambda c: tf_dsgd.PeriodicAveragingStrategy(c, average_every=3),
    "reset": lambda c: tf_dsgd.PeriodicAveragingStrategy(
        c,
        average_every=3,
        optimizer_state="reset",
        outer_optimizer=tf_dsgd.optimizers.BlockMomentum(),
    ),
}


@pytest.mark.few(1)
@pytest.mark.parametrize("name", AVERAGING)
def test_what_workers_keep_resumes(name, tmp_path):
    """Slots, seeds and weights of each worker, and the outer optimizer: bit for bit."""

    def start():
        keras.utils.set_random_seed(3)
        delays = tf_dsgd.LogNormal(1.0, 0.7)
        strategy = AVERAGING[name](tf_dsgd.SimulatedCluster(3, compute_seconds=delays, seed=0))
        with strategy.scope():
            layers = [keras.layers.Dense(6), keras.layers.Dropout(0.5, seed=1)]
            model = keras.Sequential([keras.Input((4,)), *layers, keras.layers.Dense(1)])
            model.compile(keras.optimizers.Adam(0.05), "mse")
        return strategy, model

    _, reference = start()
    fit(reference)
    _, model = start()
    with pytest.raises(Interrupted):
        fit(model, CALLBACKS["tf_dsgd"](tmp_path / "backup"), InterruptAt(2, 4))
    strategy, model = start()
    assert fit(model, CALLBACKS["tf_dsgd"](tmp_path / "backup")) == [2, 3]
    helpers.assert_close(model.get_weights(), reference.get_weights(), 0)
    for mine, theirs in zip(model.optimizer.variables, reference.optimizer.variables, strict=True):
        np.testing.assert_array_equal(mine.numpy(), theirs.numpy(), err_msg=mine.path)
    assert strategy.steps == 4 * STEPS
