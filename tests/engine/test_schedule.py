"""Schedules: given by hand, and recorded from threads and played in the simulator, bit for bit."""

import keras
import numpy as np
import pytest

import tf_dsgd
from tests import helpers
from tests.contract import sketches
from tf_dsgd.strategies.base import DistributedStrategy

pytestmark = pytest.mark.medium

FETCHES = [(0, "fetch"), (1, "fetch")]


def played(num_workers, schedule, **options):
    cluster = tf_dsgd.SimulatedCluster(num_workers, schedule=schedule)
    return tf_dsgd.DownpourStrategy(cluster, **options)


def linear(strategy):
    with strategy.scope():
        return helpers.constant_gradient_model(keras.optimizers.SGD(1.0))


def fit_ones(model, steps, epochs=1):
    x, y = helpers.ones(steps)
    model.fit(x, y, batch_size=1, epochs=epochs, shuffle=False, verbose=0)


# -- given by hand ---------------------------------------------------------------------------


def test_a_schedule_by_hand():
    """Three fetch version 0; then 0 sends twice, 1 and 2 once: staleness 0, 0, 2, 3.

    With the step divided by max(staleness, 1): 1 + 1 + 1/2 + 1/3.
    """
    schedule = [
        *[(m, "fetch") for m in range(3)],
        (0, "push"),
        (0, "fetch"),
        (0, "push"),
        (1, "push"),
        (2, "push"),
    ]
    strategy = played(3, schedule, staleness_scaling="inverse")
    model = linear(strategy)
    fit_ones(model, 4)
    assert [w.steps for w in strategy.ledger().workers] == [2, 1, 1]
    assert strategy.staleness().mean == pytest.approx(5 / 4)
    assert strategy.staleness().max == 3
    np.testing.assert_allclose(model.get_weights()[0], -(2 + 1 / 2 + 1 / 3), rtol=1e-6)


def test_batches_go_where_the_schedule_sends_them():
    """Batch b holds 2^b, and the gradient is its mean: each worker's copy tells what it got."""
    schedule = [
        (0, "fetch"),
        (1, "fetch"),
        (0, "step", (3, 0)),
        (1, "push", [1]),
        (0, "push", (2,)),
    ]
    strategy = played(2, schedule, push_every=3, fetch_every=3, local_rule=tf_dsgd.LocalSGD(1.0))
    model = linear(strategy)
    x = np.repeat(2.0 ** np.arange(4, dtype="float32")[:, None], 3, 1)
    model.fit(x, np.zeros((4, 1), "float32"), batch_size=1, shuffle=False, verbose=0)
    copies = model.weights[0].value.on_workers().copies
    np.testing.assert_array_equal(copies[0].numpy(), np.full((3, 1), -(8 + 1 + 4)))
    np.testing.assert_array_equal(copies[1].numpy(), np.full((3, 1), -2))
    np.testing.assert_array_equal(model.get_weights()[0], np.full((3, 1), -15))


def test_what_is_accrued_at_the_end_of_an_epoch_is_sent():
    schedule = [(0, "fetch"), (0, "step"), (0, "step"), (0, "fetch"), (0, "push")]
    strategy = played(1, schedule, push_every=5, fetch_every=5)
    model = linear(strategy)
    fit_ones(model, 2)
    assert strategy.updates == 1
    fit_ones(model, 1)
    assert strategy.updates == 2
    np.testing.assert_allclose(model.get_weights()[0], -3.0)


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        (
            [(0, "fetch", 1), (0, "push"), (0, "fetch"), (0, "push")],
            r"schedule\[0\], \(0, 'fetch'\), does not fit: the shard is at version 0",
        ),
        ([(0, "push")], r"schedule\[0\], .* worker 0 has not fetched"),
        (
            [*FETCHES, (0, "push"), (0, "push")],
            r"schedule\[3\], .* for 2 mini-batches, and fetch_e",
        ),
        ([*FETCHES, (0, "push", (0, 1))], r"schedule\[2\], .* push_every is 1"),
        (
            [*FETCHES, (0, "push"), (1, "push", ()), (1, "push")],
            r"schedule\[3\], .* has nothing to send",
        ),
        ([*FETCHES, (0, "push")], "gives mini-batch 1 to no worker: it names 1"),
        ([*FETCHES, (0, "push", [7]), (1, "push")], "gives mini-batch 1 to no worker"),
        ([*FETCHES, (0, "push", [2]), *[(1, "push")] * 2], r"schedule\[2\], .*batch 2; but"),
    ],
)
def test_a_schedule_that_does_not_fit(schedule, message):
    strategy = played(2, [*schedule])
    model = linear(strategy)
    with pytest.raises(ValueError, match=message):
        fit_ones(model, 2)


# -- recorded and played ---------------------------------------------------------------------


def train(strategy, optimizer, dropout=0.2, recorded=True):
    """Two epochs and a bit of a small network; its weights, and what was recorded."""
    keras.utils.set_random_seed(3)
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((6,)),
                keras.layers.Dense(16, "tanh"),
                keras.layers.BatchNormalization(),
                keras.layers.Dropout(dropout),
                keras.layers.Dense(1),
            ]
        )
        model.compile(optimizer(), "mse", metrics=["mae"])
    random = np.random.default_rng(1)
    x = random.standard_normal((8 * 45, 6)).astype("float32")
    y = np.sin(x.sum(1, keepdims=True))
    if not recorded:
        history = model.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0)
        model.fit(x[:56], y[:56], batch_size=8, shuffle=False, verbose=0)
        return model.get_weights(), history.history, None
    with strategy.recording() as schedule:
        history = model.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0)
        model.fit(x[:56], y[:56], batch_size=8, shuffle=False, verbose=0)
    return model.get_weights(), history.history, schedule


OPTIMIZERS = {
    "momentum": lambda: keras.optimizers.SGD(0.02, momentum=0.9),
    "adam": lambda: keras.optimizers.Adam(0.01),
}


@pytest.mark.few(1)
@pytest.mark.thin
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("periods", [(1, 1), (3, 2)])
@pytest.mark.parametrize("workers", [2, 4])
def test_a_record_of_threads_played_in_the_simulator(workers, periods, optimizer):
    """Who came when differs from run to run; what was recorded gives the same weights, each bit."""
    options = {"push_every": periods[0], "fetch_every": periods[1]}
    strategy = tf_dsgd.DownpourStrategy(tf_dsgd.LocalCluster(workers), **options)
    weights, history, schedule = train(strategy, OPTIMIZERS[optimizer])
    assert strategy.steps == 97
    batches = [b for e in schedule if e[1] == "step" for b in e[2]]
    assert sorted(batches) == list(range(97))
    assert sum(e[1] == "push" for e in schedule) == strategy.updates

    again = played(workers, schedule, **options)
    replayed, history_again, _ = train(again, OPTIMIZERS[optimizer], recorded=False)
    for a, b in zip(weights, replayed, strict=True):
        np.testing.assert_array_equal(a, b)
    assert again.staleness() == strategy.staleness()
    assert again.ledger() == strategy.ledger()
    np.testing.assert_allclose(history_again["mae"], history["mae"], rtol=1e-6)


@pytest.mark.few(1)
@pytest.mark.parametrize("algorithm", ["softsync", "averaging"])
def test_rules_that_collect_and_wait(algorithm):
    make = {
        "softsync": lambda c: DistributedStrategy(c, sketches.softsync(3)),
        "averaging": lambda c: tf_dsgd.PeriodicAveragingStrategy(c, average_every=4),
    }[algorithm]
    strategy = make(tf_dsgd.LocalCluster(3))
    weights, _, schedule = train(strategy, OPTIMIZERS["momentum"])
    again = make(tf_dsgd.SimulatedCluster(3, schedule=schedule))
    replayed, _, _ = train(again, OPTIMIZERS["momentum"], recorded=False)
    for a, b in zip(weights, replayed, strict=True):
        np.testing.assert_array_equal(a, b)
    assert again.updates == strategy.updates


def test_a_record_of_the_simulator_itself():
    def cluster():
        return tf_dsgd.SimulatedCluster(
            4, compute_seconds=tf_dsgd.Exponential(1.0), network_seconds=0.3, seed=5
        )

    options = {"push_every": 2, "fetch_every": 3}
    plain = tf_dsgd.DownpourStrategy(cluster(), **options)
    weights, _, _ = train(plain, OPTIMIZERS["adam"], recorded=False)
    recorded = tf_dsgd.DownpourStrategy(cluster(), **options)
    same, _, schedule = train(recorded, OPTIMIZERS["adam"])
    replayed, _, _ = train(played(4, schedule, **options), OPTIMIZERS["adam"], recorded=False)
    for a, b, c in zip(weights, same, replayed, strict=True):
        np.testing.assert_array_equal(a, b)
        np.testing.assert_array_equal(a, c)


def test_a_record_of_what_is_played():
    """A schedule of pushes with their mini-batches in them becomes steps and pushes: the same."""
    order = np.random.default_rng(2).permutation([0] * 50 + [1] * 47)
    schedule = [(int(m), action) for m in order for action in ("fetch", "push")]
    weights, _, record = train(played(2, schedule), OPTIMIZERS["adam"])
    assert sum(entry[1] == "step" for entry in record) == 97
    assert [entry[1] for entry in record if entry[1] != "step"] == [a for _, a in schedule]
    replayed, _, _ = train(played(2, record), OPTIMIZERS["adam"], recorded=False)
    for a, b in zip(weights, replayed, strict=True):
        np.testing.assert_array_equal(a, b)


def test_what_cannot_be_recorded_is_refused(monkeypatch):
    """A cluster of processes."""
    strategy = played(1, [])
    monkeypatch.setattr(type(strategy.engine), "can_record", False)
    refused = pytest.raises(ValueError, match="where workers are threads or simulated")
    with refused, strategy.recording():
        pass
