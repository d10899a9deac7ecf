"""`local_rule="optimizer"`: a worker runs the optimizer and pushes the change of its weights."""

import keras
import numpy as np
import pytest
from keras import optimizers

import tf_dsgd
from tests import helpers
from tests.equivalence import twin

OPTIMIZERS = {
    "sgd": lambda: optimizers.SGD(0.05),
    "nesterov": lambda: optimizers.SGD(0.05, momentum=0.9, nesterov=True),
    "adagrad": lambda: optimizers.Adagrad(0.1),
    "rmsprop": lambda: optimizers.RMSprop(0.01),
    "adadelta": lambda: optimizers.Adadelta(1.0),
    "adam": lambda: optimizers.Adam(0.01),
    "adamw_clipped": lambda: optimizers.AdamW(0.01, weight_decay=0.1, global_clipnorm=0.05),
    "schedule": lambda: optimizers.Adam(optimizers.schedules.ExponentialDecay(0.05, 4, 0.5)),
}


@pytest.mark.few(3)
@pytest.mark.thin
@pytest.mark.parametrize("engine", twin.ENGINES)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_one_worker_equals_plain_keras(name, engine):
    strategy = tf_dsgd.DownpourStrategy(twin.ENGINES[engine](), local_rule="optimizer")
    make = twin.mlp(OPTIMIZERS[name])
    twin.assert_same_as_plain(make, strategy, *twin.data(), slots=False)


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["sgd", "nesterov", "adam"])
def test_one_worker_with_longer_periods_still_equals_plain_keras(name):
    """Adding up the changes of K steps is taking them: only rounding is between the two."""
    strategy = tf_dsgd.DownpourStrategy(
        helpers.workers(1), push_every=3, fetch_every=3, local_rule="optimizer"
    )
    x, y = twin.data()
    plain, _, _ = twin.fit(twin.mlp(OPTIMIZERS[name]), x, y)
    with strategy.scope():
        model, _, _ = twin.fit(twin.mlp(OPTIMIZERS[name]), x, y)
    helpers.assert_close(twin.state(model.weights), twin.state(plain.weights), 2e-6)
    assert strategy.steps == twin.STEPS
    assert strategy.updates == twin.STEPS // 3


def test_two_workers_add_their_changes():
    """A constant gradient and momentum 1: a worker's n-th change is -n, whoever pushes it when.

    Two workers with n0 and n1 steps leave the sum of 1..n0 and of 1..n1, and not of 1..n0+n1, which
    a server's momentum would give.
    """
    strategy = tf_dsgd.DownpourStrategy(
        tf_dsgd.SimulatedCluster(2, compute_seconds=[1.0, 2.5], network_seconds=0.0, seed=0),
        local_rule="optimizer",
    )
    x, y = helpers.ones(8 * 20)
    with strategy.scope():
        model = helpers.constant_gradient_model(keras.optimizers.SGD(1.0, momentum=1.0))
    model.fit(x, y, batch_size=8, verbose=0)
    steps = [worker.steps for worker in strategy.ledger().workers]
    assert sum(steps) == 20
    assert min(steps) >= 4
    want = -sum(n * (n + 1) // 2 for n in steps)
    np.testing.assert_array_equal(model.get_weights()[0], np.full((3, 1), want, "float32"))
