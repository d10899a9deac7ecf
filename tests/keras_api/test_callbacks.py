"""Keras's callbacks under a strategy do what they do without one."""

import csv

import keras
import numpy as np
import pytest
from keras import callbacks

import tf_dsgd
from tests import helpers

ENGINES = helpers.engines(
    local=lambda: tf_dsgd.LocalCluster(2),
    simulated=lambda: tf_dsgd.SimulatedCluster(
        2, compute_seconds=[1.0, 1.5], network_seconds=0.1, seed=0
    ),
)


@pytest.fixture(params=ENGINES)
def strategy(request):
    return tf_dsgd.DownpourStrategy(ENGINES[request.param]())


def linear(strategy, rate=0.02, **arguments):
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(rate), "mse", **arguments)
    return model


def fit(model, epochs, *used, **arguments):
    x, y = helpers.regression(64, ids=False)
    return model.fit(
        x, y, batch_size=8, epochs=epochs, callbacks=list(used), verbose=0, **arguments
    ).history


def test_history_and_csv_agree(strategy, tmp_path):
    path = tmp_path / "log.csv"
    model = linear(strategy, metrics=["mae"])
    x, y = helpers.regression(20, seed=3, ids=False)
    history = fit(model, 3, callbacks.CSVLogger(path), validation_data=(x, y))
    assert set(history) == {"loss", "mae", "val_loss", "val_mae"}
    with path.open() as file:
        rows = list(csv.DictReader(file))
    assert [row["epoch"] for row in rows] == ["0", "1", "2"]
    for name, values in history.items():
        np.testing.assert_allclose([float(row[name]) for row in rows], values, rtol=1e-6)


def test_batch_hooks_fire_in_order(strategy):
    """Every step has its begin and its end, and its logs hold a finite loss."""
    events, losses = [], []
    hooks = callbacks.LambdaCallback(
        on_epoch_begin=lambda epoch, logs: events.append(("epoch", epoch)),
        on_train_batch_begin=lambda batch, logs: events.append(("begin", batch)),
        on_train_batch_end=lambda batch, logs: (
            events.append(("end", batch)),
            losses.append(float(logs["loss"])),
        ),
    )
    fit(linear(strategy), 2, hooks)
    epoch = [(kind, batch) for batch in range(8) for kind in ("begin", "end")]
    assert events == [("epoch", 0), *epoch, ("epoch", 1), *epoch]
    assert np.isfinite(losses).all()


@pytest.mark.few(1)
def test_model_checkpoint_holds_the_settled_weights(strategy, tmp_path):
    """Each epoch's file holds the weights that the epoch's validation saw."""
    x, y = helpers.regression(20, seed=3, ids=False)
    save = callbacks.ModelCheckpoint(tmp_path / "{epoch}.keras")
    weights = callbacks.ModelCheckpoint(
        tmp_path / "best.weights.h5", save_best_only=True, save_weights_only=True
    )
    model = linear(strategy)
    history = fit(model, 3, save, weights, validation_data=(x, y))
    for epoch in range(3):
        loaded = keras.saving.load_model(tmp_path / f"{epoch + 1}.keras")
        loss = loaded.evaluate(x, y, batch_size=8, verbose=0)
        np.testing.assert_allclose(loss, history["val_loss"][epoch], rtol=1e-5)
        assert isinstance(loaded.optimizer, keras.optimizers.SGD)
        assert float(loaded.optimizer.learning_rate) == pytest.approx(0.02)
        if epoch == 2:
            assert int(loaded.optimizer.iterations) == strategy.updates
    model.load_weights(tmp_path / "best.weights.h5")
    loss = model.evaluate(x, y, batch_size=8, verbose=0)
    np.testing.assert_allclose(loss, min(history["val_loss"]), rtol=1e-5)


def test_checkpoints_by_batches(strategy, tmp_path):
    path = tmp_path / "{batch}.weights.h5"
    save = callbacks.ModelCheckpoint(path, save_freq=3, save_weights_only=True)
    fit(linear(strategy), 1, save)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["3.weights.h5", "6.weights.h5"]


def test_early_stopping_restores_the_best(strategy):
    """The loss is put up on purpose: the first epoch is the best, and comes back."""
    model = linear(strategy, rate=0.0)
    kept = []

    class Spoil(callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 1:
                kept.extend(self.model.get_weights())
                self.model.set_weights([w + 10.0 for w in kept])

    stop = callbacks.EarlyStopping("loss", patience=2, restore_best_weights=True)
    history = fit(model, 10, Spoil(), stop)
    assert len(history["loss"]) == 3
    helpers.assert_close(model.get_weights(), kept, 0)
    assert strategy.steps == 3 * 8
    helpers.assert_ledger_balances(strategy)


@pytest.mark.thin
@pytest.mark.parametrize("local_rule", ["sgd", "optimizer"])
@pytest.mark.parametrize("engine", ENGINES)
def test_rates_that_callbacks_set_reach_the_workers(local_rule, engine):
    """On a constant gradient the weight is minus the rates' sum: 8 steps each of 4, 2 and 1."""
    strategy = tf_dsgd.DownpourStrategy(
        ENGINES[engine](), push_every=2, fetch_every=2, local_rule=local_rule
    )
    with strategy.scope():
        model = helpers.constant_gradient_model(keras.optimizers.SGD(1.0))
    x, y = helpers.ones(16)
    schedule = callbacks.LearningRateScheduler(lambda epoch, rate: 4.0 / 2**epoch)
    history = model.fit(x, y, batch_size=2, epochs=3, verbose=0, callbacks=[schedule]).history
    np.testing.assert_array_equal(model.get_weights()[0], np.full((3, 1), -56.0, "f"))
    assert history["learning_rate"] == [4.0, 2.0, 1.0]


def test_reduce_on_plateau(strategy):
    """Nothing is ever enough of an improvement: the rate halves after each epoch but the first."""
    with strategy.scope():
        model = helpers.constant_gradient_model(keras.optimizers.SGD(4.0))
    plateau = callbacks.ReduceLROnPlateau("loss", factor=0.5, patience=1, min_delta=1e9)
    x, y = helpers.ones(16)
    model.fit(x, y, batch_size=2, epochs=4, verbose=0, callbacks=[plateau])
    # Rates 4, 4, 2, 1: the first epoch sets what the next three do not beat.
    np.testing.assert_array_equal(model.get_weights()[0], np.full((3, 1), -8.0 * 11.0, "f"))


def test_terminate_on_nan(strategy, capsys):
    """The logs may be late by some batches, but never by an epoch."""
    x, y = helpers.regression(256, ids=False)
    y[40] = np.nan
    history = (
        linear(strategy)
        .fit(
            x,
            y,
            batch_size=4,
            epochs=6,
            shuffle=False,
            verbose=0,
            callbacks=[callbacks.TerminateOnNaN()],
        )
        .history
    )
    assert len(history["loss"]) <= 2
    assert np.isnan(history["loss"][-1])
    assert strategy.steps < 2 * 64
    assert "Invalid loss" in capsys.readouterr().out
    helpers.assert_ledger_balances(strategy)


def test_tensorboard(strategy, tmp_path):
    pytest.importorskip("tensorboard", reason="TensorBoard is an extra")
    fit(linear(strategy), 2, callbacks.TensorBoard(tmp_path, update_freq=2))
    assert list(tmp_path.rglob("events.out.tfevents.*"))


def test_staleness_monitor_among_others(strategy, tmp_path):
    """It changes nothing that others see, and the callbacks after it see what it adds."""
    path = tmp_path / "log.csv"
    monitor = tf_dsgd.callbacks.StalenessMonitor(tmp_path, every_seconds=0.01, tensorboard=False)
    history = fit(linear(strategy, metrics=["mae"]), 3, monitor, callbacks.CSVLogger(path))
    added = {f"staleness_{name}" for name in ("mean", "p50", "p99", "max")}
    assert set(history) > {"loss", "mae", "effective_rate", "steps_per_second"} | added
    with path.open() as file:
        rows = list(csv.DictReader(file))
    for name, values in history.items():
        np.testing.assert_allclose([float(row[name]) for row in rows], values, rtol=1e-6)
    np.testing.assert_allclose(history["effective_rate"], 0.02, rtol=1e-6)
    messages = strategy.staleness().count / 3  # as many in each epoch: periods of 1
    mean = np.mean(history["staleness_mean"])
    assert messages == 8
    assert mean == pytest.approx(strategy.staleness().mean)
    helpers.assert_ledger_balances(strategy)


def test_swap_ema_weights(strategy):
    """A callback that swaps weights and their averages, and back, leaves training where it was."""
    with strategy.scope():
        model = helpers.constant_gradient_model(
            keras.optimizers.SGD(1.0, use_ema=True, ema_momentum=0.5)
        )
    x, y = helpers.ones(16)
    seen = []
    look = callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: seen.append(float(model.get_weights()[0][0, 0]))
    )
    swap = callbacks.SwapEMAWeights(swap_on_epoch=True)
    model.fit(x, y, batch_size=2, epochs=2, verbose=0, callbacks=[swap, look])
    average, w = 0.0, 0.0
    want = []
    for step in range(16):
        w -= 1.0
        average = 0.5 * average + 0.5 * w if step else w
        if step % 8 == 7:
            want.append(average)
    np.testing.assert_allclose(seen, want, rtol=1e-6)
