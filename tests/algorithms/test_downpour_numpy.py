"""Downpour on simulated workers against the NumPy twin."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_dsgd
from tests.algorithms import downpour_twin

FEATURES, BATCH, STEPS, EPOCHS = 3, 4, 12, 2
SECONDS = [1.0, 1.001, 1.002]  # lock step, with an order: worker 0 is always a moment ahead
SERVERS = {
    "sgd": lambda rate: keras.optimizers.SGD(rate),
    "momentum": lambda rate: keras.optimizers.SGD(rate, momentum=0.9),
    "adagrad": lambda rate: keras.optimizers.Adagrad(rate),
}


def gradient(w, batch):
    """Of the mean squared error of x w."""
    x, y = batch
    return 2.0 / len(x) * x.T @ (x @ w - y)


def problem(batches, seed=1, *, equal):
    """Batches of a noisy linear problem, all equal if it must not matter who takes which."""
    rng = np.random.default_rng(seed)
    made = []
    for _ in range(batches):
        if made and equal:
            made.append(made[0])
            continue
        x = rng.standard_normal((BATCH, FEATURES)).astype("float32")
        made.append((x, rng.standard_normal((BATCH, 1)).astype("float32")))
    return made


def train(strategy, make_optimizer, batches, epochs):
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((FEATURES,)),
                keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros"),
            ]
        )
        model.compile(make_optimizer(), "mse")
    x, y = (np.concatenate(part) for part in zip(*batches, strict=True))
    model.fit(x, y, batch_size=BATCH, epochs=epochs, shuffle=False, verbose=0)
    return model.get_weights()[0]


def compare(
    seconds,
    batches,
    epochs,
    *,
    server,
    rate,
    push_every,
    fetch_every,
    local_rule,
    local_rate,
    network=0.0,
):
    strategy = tf_dsgd.DownpourStrategy(
        tf_dsgd.SimulatedCluster(
            len(seconds), compute_seconds=seconds, network_seconds=network, seed=0
        ),
        push_every=push_every,
        fetch_every=fetch_every,
        local_rule=local_rule,
    )
    got = train(strategy, lambda: SERVERS[server](rate), batches, epochs)
    twin = downpour_twin.Server(np.zeros((FEATURES, 1)), rate, server)
    periods = {"push_every": push_every, "fetch_every": fetch_every, "local_rate": local_rate}
    workers = [downpour_twin.Worker(twin, s, network=network, **periods) for s in seconds]
    downpour_twin.run(twin, workers, gradient, [batches] * epochs)
    np.testing.assert_allclose(got, twin.w, rtol=1e-5, atol=1e-6)
    assert strategy.updates == twin.version
    ledger = strategy.ledger()
    assert [worker.steps for worker in ledger.workers] == [worker.total for worker in workers]
    staleness = strategy.staleness()
    assert staleness.mean == pytest.approx(np.mean(twin.staleness))
    assert staleness.max == max(twin.staleness)
    return twin


@pytest.mark.thin
@pytest.mark.parametrize("push_every", [1, 2, 3, 4])
@pytest.mark.parametrize("fetch_every", [1, 2, 3, 4])
def test_periods_in_lock_step(push_every, fetch_every):
    compare(
        SECONDS,
        problem(len(SECONDS) * STEPS, equal=True),
        EPOCHS,
        server="sgd",
        rate=0.02,
        push_every=push_every,
        fetch_every=fetch_every,
        local_rule="sgd",
        local_rate=0.02,
    )


@pytest.mark.thin
@pytest.mark.parametrize("server", SERVERS)
@pytest.mark.parametrize(
    ("local_rule", "local_rate"),
    [("sgd", 0.05), ("none", 0.0), (0.01, 0.01)],
    ids=["sgd", "none", "own_rate"],
)
def test_servers_and_local_rules(server, local_rule, local_rate):
    """Seven does not divide the epoch's 12 steps, so its end pushes what is accrued."""
    rule = local_rule if isinstance(local_rule, str) else tf_dsgd.LocalSGD(local_rule)
    compare(
        SECONDS,
        problem(len(SECONDS) * STEPS, equal=True),
        EPOCHS,
        server=server,
        rate=0.05,
        push_every=7,
        fetch_every=4,
        local_rule=rule,
        local_rate=local_rate,
    )


@pytest.mark.thin
@pytest.mark.parametrize("network", [0.0, 0.31, 5.3])
@pytest.mark.parametrize("server", SERVERS)
def test_workers_of_different_speed_on_different_batches(server, network):
    """Who takes which batch, and what it sees, follows from the clock alone."""
    twin = compare(
        [1.0, 1.7, 2.9],
        problem(40, equal=False),
        1,
        server=server,
        rate=0.03,
        push_every=1,
        fetch_every=1,
        local_rule="sgd",
        local_rate=0.03,
        network=network,
    )
    assert max(twin.staleness) >= 2


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_what_travels_is_rounded_and_the_shard_is_not(dtype):
    """w <- w - rate * round(g(round(w))), with the shard's w in float32."""
    short = tf.as_dtype(dtype).as_numpy_dtype
    cluster = tf_dsgd.SimulatedCluster(1, compute_seconds=1.0, network_seconds=0.0, seed=0)
    batches = problem(20, equal=False)
    strategy = tf_dsgd.DownpourStrategy(cluster, wire_dtype=dtype)
    got = train(strategy, lambda: keras.optimizers.SGD(0.05), batches, 2)
    exact = w = np.zeros((FEATURES, 1))
    for batch in batches * 2:
        seen = w.astype("float32").astype(short).astype(np.float64)
        w = w - 0.05 * gradient(seen, batch).astype("float32").astype(short).astype(np.float64)
        exact = exact - 0.05 * gradient(exact, batch)
    np.testing.assert_allclose(got, w, rtol=1e-4, atol=1e-5)
    assert np.abs(got - exact).max() > 5 * np.abs(got - w).max()
