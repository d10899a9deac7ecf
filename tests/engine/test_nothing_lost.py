"""Two threads push to one shard, and every push counts once, whole: closed forms."""

import keras
import numpy as np
import pytest

import tf_dsgd
from tests import helpers

STEPS = 400


def train(strategy, make_optimizer, steps=STEPS, **fit_args):
    with strategy.scope():
        model = helpers.constant_gradient_model(make_optimizer())
    x, y = helpers.ones(2 * steps)
    model.fit(x, y, batch_size=2, verbose=0, **fit_args)
    return model


def slot(model, name):
    (variable,) = [v for v in model.optimizer.variables if name in v.path]
    return variable.numpy()


def test_momentum_one_is_an_exact_counter():
    """With momentum 1 and gradients of 1 the slot counts pushes, and the weight sums the counts.

    m_n = m_(n-1) - 1 = -n and w_n = w_(n-1) + m_n = -n (n + 1) / 2: integers below 2^24, so exact
    in float32. One lost or doubled push moves both.
    """
    strategy = tf_dsgd.DownpourStrategy(helpers.workers(2))
    model = train(strategy, lambda: keras.optimizers.SGD(1.0, momentum=1.0))
    n = STEPS
    np.testing.assert_array_equal(slot(model, "momentum"), np.full((3, 1), -n, "float32"))
    np.testing.assert_array_equal(
        model.get_weights()[0], np.full((3, 1), -n * (n + 1) / 2, "float32")
    )
    ledger = helpers.assert_ledger_balances(strategy)
    assert strategy.steps == strategy.updates == ledger.sent == ledger.applied == n
    assert int(model.optimizer.iterations) == n
    assert len(ledger.workers) == 2


def test_rmsprop_equals_its_recurrence():
    """v = rho v + (1 - rho) g^2; w -= rate g / sqrt(v + eps), for g = 1, in float32."""
    strategy = tf_dsgd.DownpourStrategy(helpers.workers(2))
    model = train(strategy, lambda: keras.optimizers.RMSprop(0.125, rho=0.99, epsilon=1e-7))
    v, w = 0.0, 0.0
    for _ in range(STEPS):
        v = 0.99 * v + 0.01
        w -= 0.125 / np.sqrt(v + 1e-7)
    # The 400th step alone moves w by 0.126, over 50 times what is tolerated.
    np.testing.assert_allclose(model.get_weights()[0], np.full((3, 1), w), rtol=2e-5)
    np.testing.assert_allclose(slot(model, "velocity"), np.full((3, 1), v), rtol=1e-4)
    helpers.assert_ledger_balances(strategy)


@pytest.mark.few(1)
@pytest.mark.parametrize(("push_every", "fetch_every"), [(4, 4), (3, 5), (1, 8)])
def test_the_slot_holds_every_gradient_whatever_the_periods(push_every, fetch_every):
    """Momentum of 1 adds up what is pushed, and pushes are sums: minus the count of batches."""
    strategy = tf_dsgd.DownpourStrategy(
        helpers.workers(2), push_every=push_every, fetch_every=fetch_every
    )
    model = train(strategy, lambda: keras.optimizers.SGD(1.0, momentum=1.0), epochs=2)
    np.testing.assert_array_equal(slot(model, "momentum"), np.full((3, 1), -2 * STEPS, "float32"))
    ledger = helpers.assert_ledger_balances(strategy)
    assert strategy.steps == 2 * STEPS
    # Each worker's drain at an epoch's end may push less than push_every gradients.
    fewest = 2 * STEPS / push_every
    assert fewest <= strategy.updates <= fewest + 2 * len(ledger.workers)
    assert int(model.optimizer.iterations) == strategy.updates


def test_update_based_changes_all_arrive():
    """Without momentum each worker's change is -1 per mini-batch, and the server adds them."""
    strategy = tf_dsgd.DownpourStrategy(
        helpers.workers(2), push_every=3, fetch_every=5, local_rule="optimizer"
    )
    model = train(strategy, lambda: keras.optimizers.SGD(1.0))
    np.testing.assert_array_equal(model.get_weights()[0], np.full((3, 1), -STEPS, "float32"))
    helpers.assert_ledger_balances(strategy)


class RowPerExample(keras.layers.Layer):
    """A row for each example, with a sparse and with a dense gradient, and one weight for all."""

    def __init__(self, examples):
        super().__init__()
        table = {"shape": (examples, 1), "initializer": "zeros"}
        self.sparse = self.add_weight(name="sparse", **table)
        self.dense = self.add_weight(name="dense", **table)
        self.every = self.add_weight(name="every", shape=(1,), initializer="zeros")

    def call(self, x):
        rows = keras.ops.cast(x[:, 0], "int32")
        sparse = keras.ops.take(self.sparse, rows, axis=0)
        return sparse + keras.ops.take(1.0 * self.dense, rows, axis=0) + self.every


@pytest.mark.few(1)
@pytest.mark.parametrize("scaling", [None, "half"])
def test_every_message_is_in_one_collection(scaling):
    """Four messages of two examples make an update: each example has an eighth of a step.

    A message that two collections share, or none has, or a row that the update leaves out shows.
    """
    strategy = tf_dsgd.SoftsyncStrategy(
        helpers.workers(2),
        gradients_per_update=4,
        staleness_scaling=None if scaling is None else lambda tau: 0.5,
    )
    with strategy.scope():
        model = keras.Sequential([keras.Input((1,)), RowPerExample(2 * STEPS)])
        model.compile(keras.optimizers.SGD(1.0), helpers.mean_output)
    x = np.arange(2 * STEPS, dtype="float32")[:, None]
    model.fit(x, x, batch_size=2, epochs=2, verbose=0)
    factor, updates = 1.0 if scaling is None else 0.5, 2 * STEPS // 4
    sparse, dense, every = model.get_weights()
    np.testing.assert_array_equal(sparse, np.full_like(sparse, -2 * factor / 8))
    np.testing.assert_array_equal(dense, np.full_like(dense, -2 * factor / 8))
    np.testing.assert_array_equal(every, [-factor * updates])
    ledger = helpers.assert_ledger_balances(strategy, updates)
    assert strategy.steps == ledger.applied == 2 * STEPS
    assert int(model.optimizer.iterations) == updates


def test_adam_counts_its_updates():
    """Two workers lose counts where `iterations` is read and then assigned; Adam's steps tell.

    A constant gradient moves Adam's weight by its rate at every update, if the bias correction
    knows how many there have been.
    """
    strategy = tf_dsgd.DownpourStrategy(helpers.workers(2))
    model = train(strategy, lambda: keras.optimizers.Adam(0.125, epsilon=0.0))
    assert int(model.optimizer.iterations) == STEPS
    np.testing.assert_allclose(model.get_weights()[0], np.full((3, 1), -0.125 * STEPS), rtol=1e-4)


def test_metrics_count_every_sample_once():
    """The logs of two workers are one worker's: integer sums, at a rate of 0."""
    x, y = helpers.regression(403)
    strategy = tf_dsgd.DownpourStrategy(helpers.workers(2), push_every=2, fetch_every=3)
    with strategy.scope():
        model = helpers.recording_model(keras.optimizers.SGD(0.0), metrics=helpers.id_metrics())
    history = model.fit(x, y, batch_size=4, epochs=2, verbose=0).history
    ids = np.arange(403)
    assert history["id_count"] == [403, 403]
    assert history["id_sum"] == [ids.sum()] * 2
    assert history["id_squares"] == [(ids**2).sum()] * 2
    np.testing.assert_allclose(history["loss"], [np.mean(y[:, 0] ** 2)] * 2, rtol=1e-6)


def test_batch_norm_statistics_stay_finite_and_right():
    """Every worker sees the same batch, so however copies are averaged, the mean tends to its."""
    strategy = tf_dsgd.DownpourStrategy(helpers.workers(2), push_every=4, fetch_every=4)
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((2,)),
                keras.layers.BatchNormalization(momentum=0.9),
                keras.layers.Dense(1),
            ]
        )
        model.compile(keras.optimizers.SGD(0.0), "mse")
    batch = np.array([[1.0, 4.0], [3.0, 8.0]], "float32")  # mean 2 and 6, variance 1 and 4
    x = np.tile(batch, (200, 1))
    model.fit(x, np.zeros((400, 1), "f"), batch_size=2, shuffle=False, verbose=0)
    layer = model.layers[0]
    # 100 steps on each of two copies: 0.9^100 is 3e-5.
    np.testing.assert_allclose(layer.moving_mean.numpy(), [2.0, 6.0], rtol=1e-3)
    np.testing.assert_allclose(layer.moving_variance.numpy(), [1.0, 4.0], rtol=1e-3)
