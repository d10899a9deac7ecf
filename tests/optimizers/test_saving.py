"""Optimizers for delayed gradients are saved, loaded and resumed like any other."""

import keras
import numpy as np
import pytest

import tf_dsgd
from tests import helpers
from tests.optimizers.bench import Bench
from tests.optimizers.rules import RULES, WORKERS

pytestmark = pytest.mark.medium

OURS = {name: optimizer for name, (optimizer, _) in RULES.items()}


def simulated(num_workers=3):
    return tf_dsgd.SimulatedCluster(
        num_workers, compute_seconds=[1.0, 1.7, 2.9][:num_workers], network_seconds=0.2, seed=0
    )


def make(optimizer, cluster=None):
    keras.utils.set_random_seed(5)
    strategy = tf_dsgd.DownpourStrategy(cluster or simulated())
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((3,), dtype="int32"),
                keras.layers.Embedding(20, 2),
                keras.layers.Flatten(),
                keras.layers.Dense(1),
            ]
        )
        model.compile(optimizer(), "mse")
    return strategy, model


def fit(model, epochs, *callbacks):
    x = np.random.default_rng(2).integers(0, 20, (64, 3))
    y = np.sin(x.sum(1, keepdims=True)).astype("float32")
    model.fit(x, y, batch_size=4, epochs=epochs, shuffle=False, verbose=0, callbacks=[*callbacks])


def state(model):
    return [v.numpy() for v in [*model.weights, *model.optimizer.variables]]


@pytest.mark.parametrize("name", OURS)
def test_a_configuration_makes_the_same_optimizer(name):
    optimizer = OURS[name]()
    again = keras.optimizers.deserialize(keras.optimizers.serialize(optimizer))
    assert type(again) is type(optimizer)
    assert again.get_config() == optimizer.get_config()
    defaults = type(optimizer)().get_config()
    assert set(again.get_config()) == set(defaults)
    assert again.get_config() != defaults


def test_a_schedule_is_kept():
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.5)
    config = keras.optimizers.serialize(tf_dsgd.optimizers.AdaptiveRevision(schedule))
    again = keras.optimizers.deserialize(config)
    again.build([keras.Variable(np.zeros(2))])
    again.iterations.assign(20)
    assert float(again.learning_rate) == pytest.approx(0.025)


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["adaptive_revision", "delay_compensated_adaptive", "fasgd"])
def test_a_model_of_three_workers_loads_in_plain_keras_and_with_two(name, tmp_path):
    """What workers had fetched is not part of it, so their number plays no role."""
    strategy, model = make(OURS[name])
    fit(model, 1)
    assert strategy.staleness().max >= 2
    model.save(tmp_path / "model.keras")
    plain = keras.saving.load_model(tmp_path / "model.keras")
    with tf_dsgd.DownpourStrategy(simulated(2)).scope():
        two = keras.saving.load_model(tmp_path / "model.keras")
    for loaded in (plain, two):
        assert type(loaded.optimizer) is type(model.optimizer)
        assert loaded.optimizer.get_config() == model.optimizer.get_config()
        helpers.assert_close(state(loaded), state(model), 0)
        fit(loaded, 1)
        assert int(loaded.optimizer.iterations) == 32


class Stop(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        if epoch == 2:
            raise KeyboardInterrupt


@pytest.mark.parametrize(
    "name",
    [
        "adaptive_revision",
        *(pytest.param(n, marks=pytest.mark.slow) for n in ("delay_compensated_adaptive", "fasgd")),
    ],
)
def test_a_resumed_run_ends_where_an_unbroken_one_does(name, tmp_path):
    """Bit for bit, with one worker; with more, their order after a start is another."""
    _, unbroken = make(OURS[name], simulated(1))
    fit(unbroken, 4)
    backup = tf_dsgd.callbacks.BackupAndRestore
    _, model = make(OURS[name], simulated(1))
    with pytest.raises(KeyboardInterrupt):
        fit(model, 4, backup(tmp_path / "backup"), Stop())
    strategy, model = make(OURS[name], simulated(1))
    fit(model, 4, backup(tmp_path / "backup"))
    helpers.assert_close(state(model), state(unbroken), 0)
    assert strategy.steps == 64


@pytest.mark.few(2)
@pytest.mark.thin
@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
@pytest.mark.parametrize("name", OURS)
def test_restored_variables_are_all_that_is_needed(name, sparse):
    """The same messages, stale ones, after each worker fetched: the same weights, to the bit."""
    first, second = (Bench(OURS[name], WORKERS, (6, 2), sparse) for _ in range(2))
    random = np.random.default_rng(0)

    def some_messages():
        fetches = [("fetch", m, None, None) for m in range(WORKERS)]
        for _ in range(20):
            m, rows = random.integers(WORKERS), random.choice(6, 3)
            gradient = random.integers(-4, 5, (3, 2) if sparse else (6, 2)) / 4
            fetches.append((random.choice(["fetch", "push", "push"]), m, gradient, rows))
        return fetches

    def play(bench, events):
        for kind, m, gradient, rows in events:
            if kind == "fetch":
                bench.fetch(m)
            else:
                bench.push(m, gradient, rows)

    play(first, some_messages())
    play(second, some_messages())  # remembers something else
    for variable, value in zip(second.variables, first.variables, strict=True):
        variable.assign(value.numpy())
    events = some_messages()
    play(first, events)
    play(second, events)
    helpers.assert_close(state(second.model), state(first.model), 0)
