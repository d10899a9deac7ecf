"""n-softsync against its twin in NumPy, a trace by hand, and the algorithms it contains."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import tf_dsgd
from tests import helpers
from tests.algorithms import softsync_twin
from tests.contract.clockwork import Twin
from tf_dsgd.strategies.base import DistributedStrategy

pytestmark = pytest.mark.medium

FEATURES, BATCH = 3, 4
SCALINGS = {
    None: None,
    "inverse": "inverse",
    "half_life": lambda tau: 0.5 ** tf.cast(tau, tf.float32),
    "zero": lambda tau: tf.zeros([]),
}
OPTIMIZERS = {
    "sgd": lambda rate: keras.optimizers.SGD(rate),
    "momentum": lambda rate: keras.optimizers.SGD(rate, momentum=0.9),
    "adagrad": lambda rate: keras.optimizers.Adagrad(rate),
    "rmsprop": lambda rate: keras.optimizers.RMSprop(rate),
    "adam": lambda rate: keras.optimizers.Adam(rate),
}
OPTIONS = {
    "clipped": lambda: keras.optimizers.SGD(0.1, momentum=0.9, global_clipnorm=0.3),
    "averaged": lambda: keras.optimizers.AdamW(0.1, weight_decay=0.1, use_ema=True),
    "accumulated": lambda: keras.optimizers.Adam(0.1, gradient_accumulation_steps=2),
    "loss_scaled": lambda: keras.optimizers.LossScaleOptimizer(
        keras.optimizers.SGD(0.1, momentum=0.9), initial_scale=4.0, dynamic_growth_steps=3
    ),
}


def simulated(num_workers, compute=1.0, network=0.0, seed=0):
    return tf_dsgd.SimulatedCluster(
        num_workers, compute_seconds=compute, network_seconds=network, seed=seed
    )


def linear_model(optimizer):
    model = keras.Sequential(
        [
            keras.Input((FEATURES,)),
            keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros"),
        ]
    )
    model.compile(optimizer, "mse")
    return model


def problem(batches, seed=1):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((batches * BATCH, FEATURES)).astype("float32")
    y = x @ np.array([[1.0], [-2.0], [0.5]], "f") + rng.standard_normal((len(x), 1))
    return x, y.astype("float32")


def gradient(w, batch):
    """Of the mean squared error of x w."""
    x, y = batch
    return 2.0 / len(x) * x.T @ (x @ w - y)


def train(strategy, optimizer, x, y, batch=BATCH, epochs=1):
    with strategy.scope():
        model = linear_model(optimizer())
    model.fit(x, y, batch_size=batch, epochs=epochs, shuffle=False, verbose=0)
    return model


# -- all the way through `fit`, with random delays --------------------------------------------


class FitTwin(Twin):
    """The simulator's schedule with softsync's server."""

    def __init__(self, num_workers, server):
        self.server = server
        self.local = [server.w] * num_workers
        self.sent = [server.w] * num_workers

    def fetch(self, m):
        self.local[m] = self.server.w

    def step(self, m, batch):
        self.sent[m] = gradient(self.local[m], batch)

    def message(self, m):
        return self.sent[m]

    def arrive(self, worker, message, staleness):
        return self.server.receive(message, staleness)

    def flush(self):
        return self.server.flush()


@st.composite
def delays(draw):
    """Seconds for each worker, such that no two turns fall on one instant."""
    number = draw(st.integers(1, 5))
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    spread = draw(st.sampled_from([0.01, 1.0, 10.0]))
    compute = 1.0 + spread * random.random(number)
    return compute.tolist(), (random.random(number) * draw(st.sampled_from([0.1, 3.0]))).tolist()


@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    delays(),
    st.integers(1, 7),
    st.integers(1, 40),
    st.sampled_from(sorted(SCALINGS, key=str)),
    st.sampled_from(sorted(OPTIMIZERS)),
)
def test_fit_equals_the_twin_under_random_delays(delays, count, batches, scaling, optimizer):
    compute, network = delays
    x, y = problem(batches)
    server = softsync_twin.Server(
        np.zeros((FEATURES, 1)),
        count,
        softsync_twin.FACTORS[scaling],
        softsync_twin.Optimizer(optimizer, 0.02),
    )
    in_batches = [(x[i : i + BATCH], y[i : i + BATCH]) for i in range(0, len(x), BATCH)]
    FitTwin(len(compute), server).run(len(compute), compute, network, in_batches)
    strategy = tf_dsgd.SoftsyncStrategy(
        simulated(len(compute), compute, network),
        gradients_per_update=count,
        staleness_scaling=SCALINGS[scaling],
    )
    model = train(strategy, lambda: OPTIMIZERS[optimizer](0.02), x, y)
    np.testing.assert_allclose(model.get_weights()[0], server.w, rtol=2e-4, atol=2e-5)
    assert strategy.updates == server.version == -(-batches // count)
    assert int(model.optimizer.iterations) == strategy.updates
    staleness = strategy.staleness()
    assert staleness.count == strategy.ledger().applied == batches
    assert staleness.mean == pytest.approx(np.mean(server.staleness))
    assert staleness.max == max(server.staleness)


# -- any order of fetches and messages --------------------------------------------------------

WORKERS, ROWS = 4, 5
EVENTS = st.lists(st.tuples(st.integers(0, WORKERS), st.integers(0, 2**16)))
# Worker 0 sends on what it fetched fourteen messages of worker 1 before.
STALE = [(0, 0), *((1, k) for k in range(28)), (0, 1)]


def played(turns):
    """Events and their gradients: at its turn a worker fetches or, if it has, sends.

    The turn of a worker that does not exist is a drain.
    """
    events, fetched = [], set()
    for worker, seed in turns:
        if worker == WORKERS:
            events.append((0, "flush"))
        elif worker not in fetched:
            events.append((worker, "fetch"))
        else:
            random = np.random.default_rng(seed)
            dense = random.standard_normal(FEATURES).astype("float32")
            rows = random.integers(0, ROWS, random.integers(1, 4))  # some of them twice
            values = random.standard_normal((len(rows), 2)).astype("float32")
            events.append((worker, "push", [dense, (rows, values)]))
        fetched ^= {worker}
    return events


def flat(dense, slices):
    table = np.zeros((ROWS, 2))
    np.add.at(table, slices[0], slices[1])
    return np.concatenate([dense, table.ravel()])


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("count", "scaling", "optimizer"),
    [
        (2, "half_life", "adagrad"),
        (3, "inverse", "adagrad"),
        pytest.param(1, "inverse", "sgd", marks=pytest.mark.slow),
        pytest.param(5, None, "adagrad", marks=pytest.mark.slow),
        pytest.param(7, "half_life", "sgd", marks=pytest.mark.slow),
    ],
)
def test_random_sequences_of_fetches_and_messages(count, scaling, optimizer):
    """After every event, with a dense weight and a table whose gradients are of a few rows."""
    rules = tf_dsgd.SoftsyncStrategy(
        simulated(1), gradients_per_update=count, staleness_scaling=SCALINGS[scaling]
    ).algorithm
    keras_optimizer = OPTIMIZERS[optimizer](0.02)
    start = [np.zeros(FEATURES), np.zeros((ROWS, 2))]
    seen = []

    @settings(max_examples=30, deadline=None)
    @example(STALE, 0)
    @given(EVENTS, st.integers(0, 2**16))
    def check(turns, seed):
        random = np.random.default_rng(seed)
        more = zip(random.integers(0, WORKERS, 60), random.integers(0, 2**16, 60), strict=True)
        events = played([*turns, *((int(m), int(s)) for m, s in more)])
        result = tf_dsgd.simulate(rules, keras_optimizer, start, events, num_workers=WORKERS)
        server = softsync_twin.Server(
            np.zeros(FEATURES + 2 * ROWS),
            count,
            softsync_twin.FACTORS[scaling],
            softsync_twin.Optimizer(optimizer, 0.02),
        )
        fetched = {}
        for k, (worker, action, *what) in enumerate(events):
            if action == "fetch":
                fetched[worker] = server.version, server.w
            elif action == "push":
                server.receive(flat(*what[0]), server.version - fetched[worker][0])
            else:
                server.flush()
            assert result.versions[k] == server.version
            want = [(result.weights[k], server.w)]
            if action != "flush":
                want.append((result.copies[k], fetched[worker][1]))
            for got, w in want:
                got = np.concatenate([part.ravel() for part in got])
                np.testing.assert_allclose(got, w, rtol=1e-4, atol=1e-6)
        staleness = [tau for tau in result.staleness if tau is not None]
        assert staleness == server.staleness
        seen.extend(staleness)

    check()
    assert min(seen) == 0 and max(seen) >= 2


# -- by hand -----------------------------------------------------------------------------------

# One weight w, the loss of a batch with target v is (w - v)^2 / 2, so its gradient is w - v.
# Rate 1, c = 2. A takes 2 seconds for a batch and B 5; the network takes no time;
# targets 2 6 4 8 12 10.
# f = 1 (the first number) or f = 2^-tau (the second):
#
#   t = 0   A fetches w = 0, takes 2.   B fetches w = 0, takes 6.
#   t = 2   A sends 0 - 2 = -2, tau 0: one is there.   A fetches 0, takes 4.
#   t = 4   A sends 0 - 4 = -4, tau 0: two are there, w = 0 + (2 + 4) / 2 = 3, version 1.
#           A fetches 3, takes 8.
#   t = 5   B sends 0 - 6 = -6, tau 1: one is there.   B fetches 3, takes 12.
#   t = 6   A sends 3 - 8 = -5, tau 0: two.   w = 3 + (6 + 5) / 2 = 8.5, or 3 + (3 + 5) / 2 = 7.
#           A fetches, takes 10.
#   t = 8   A sends 8.5 - 10 = -1.5, or 7 - 10 = -3, tau 0: one.
#   t = 10  B sends 3 - 12 = -9, tau 1: two.
#           w = 8.5 + (1.5 + 9) / 2 = 13.75, or 7 + (3 + 4.5) / 2 = 10.75.
# With five batches, B's last message is the only one of its collection, and c is 1 for it:
#           w = 8.5 + 9 = 17.5, or 7 + 4.5 = 11.5.
TARGETS = [2, 6, 4, 8, 12, 10]
LAST = {(None, 6): 13.75, ("half_life", 6): 10.75, (None, 5): 17.5, ("half_life", 5): 11.5}


def half_square(y_true, y_pred):
    return 0.5 * keras.ops.mean(keras.ops.square(y_true - y_pred), axis=-1)


@pytest.mark.parametrize(("scaling", "batches"), LAST)
def test_a_trace_by_hand(scaling, batches):
    strategy = tf_dsgd.SoftsyncStrategy(
        simulated(2, [2.0, 5.0]), gradients_per_update=2, staleness_scaling=SCALINGS[scaling]
    )
    with strategy.scope():
        model = keras.Sequential(
            [keras.Input((1,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")]
        )
        model.compile(keras.optimizers.SGD(1.0), half_square)
    y = np.array(TARGETS[:batches], "float32")[:, None]
    model.fit(np.ones_like(y), y, batch_size=1, shuffle=False, verbose=0)
    assert float(model.get_weights()[0][0, 0]) == LAST[scaling, batches]
    assert (strategy.steps, strategy.updates) == (batches, 3)
    staleness = strategy.staleness()
    assert (staleness.count, staleness.max) == (batches, 1)
    assert staleness.mean == pytest.approx(2 / batches)


# -- algorithms that it contains ---------------------------------------------------------------


@pytest.mark.few(1)
@pytest.mark.thin
@pytest.mark.parametrize("scaling", [None, "inverse"])
@pytest.mark.parametrize("optimizer", ["momentum", "adam"])
def test_one_gradient_per_update_is_downpour(scaling, optimizer):
    x, y = problem(40)
    compute, network = [1.0, 1.713, 2.937], [0.25, 0.531, 0.117]
    models, strategies = [], []
    for make, options in (
        (tf_dsgd.SoftsyncStrategy, {"gradients_per_update": 1}),
        (tf_dsgd.DownpourStrategy, {"push_every": 1, "fetch_every": 1}),
    ):
        cluster = simulated(3, compute, network)
        strategies.append(make(cluster, staleness_scaling=scaling, **options))
        models.append(train(strategies[-1], lambda: OPTIMIZERS[optimizer](0.02), x, y))
    ours, theirs = (model.get_weights()[0] for model in models)
    np.testing.assert_allclose(ours, theirs, rtol=0 if scaling is None else 1e-5)
    assert strategies[0].staleness() == strategies[1].staleness()
    assert strategies[0].staleness().max >= 2


@pytest.mark.few(3)
@pytest.mark.thin
@pytest.mark.parametrize("scaling", [None, "inverse"])
@pytest.mark.parametrize("optimizer", [*OPTIMIZERS, *OPTIONS])
def test_workers_in_lock_step_with_c_equal_to_their_number_are_synchronous_sgd(optimizer, scaling):
    """Plain Keras on batches of four workers' examples, clipping of the mean included."""
    x, y = problem(48)
    make = OPTIONS.get(optimizer) or functools.partial(OPTIMIZERS[optimizer], 0.1)
    plain = linear_model(make())
    plain.fit(x, y, batch_size=4 * BATCH, epochs=2, shuffle=False, verbose=0)
    strategy = tf_dsgd.SoftsyncStrategy(
        simulated(4, 1.0, 0.25), gradients_per_update=4, staleness_scaling=scaling
    )
    model = train(strategy, make, x, y, epochs=2)
    np.testing.assert_allclose(model.get_weights()[0], plain.get_weights()[0], rtol=1e-5, atol=1e-6)
    assert int(model.optimizer.iterations) == int(plain.optimizer.iterations) > 0
    assert strategy.updates == 24
    assert strategy.staleness().max == 0


@pytest.mark.few(2)
@pytest.mark.thin
@pytest.mark.parametrize("engine", helpers.engines(local=None, simulated=None))
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_factor_of_one_half_halves_the_step(optimizer, engine):
    """One worker, c = 3: plain Keras on batches three times as large, at half the rate.

    A gradient of half the size would leave Adagrad, RMSprop and Adam where they were.
    """
    x, y = problem(13)  # the last collection has one batch
    plain = linear_model(OPTIMIZERS[optimizer](0.1))
    plain.fit(x, y, batch_size=3 * BATCH, shuffle=False, verbose=0)
    strategy = tf_dsgd.SoftsyncStrategy(
        simulated(1) if engine == "simulated" else helpers.workers(1),
        gradients_per_update=3,
        staleness_scaling=lambda tau: 0.5,
    )
    model = train(strategy, lambda: OPTIMIZERS[optimizer](0.2), x, y)
    np.testing.assert_allclose(model.get_weights()[0], plain.get_weights()[0], rtol=1e-5, atol=1e-6)
    assert (strategy.steps, strategy.updates) == (13, 5)


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_factors_of_zero_change_nothing(optimizer):
    strategy = tf_dsgd.SoftsyncStrategy(
        simulated(2), gradients_per_update=3, staleness_scaling=SCALINGS["zero"]
    )
    model = train(strategy, lambda: OPTIMIZERS[optimizer](1.0), *problem(8))
    np.testing.assert_array_equal(model.get_weights()[0], np.zeros((FEATURES, 1)))
    assert strategy.updates == int(model.optimizer.iterations) == 3


# -- the paper's setting -----------------------------------------------------------------------


def staleness_of(n, steps=1500, workers=30):
    """Staleness of n-softsync on 30 workers of one speed, whose messages take a varying time."""
    strategy = tf_dsgd.SoftsyncStrategy(
        simulated(workers, 1.0, tf_dsgd.Exponential(0.05), seed=3),
        gradients_per_update=workers // n,
    )
    with strategy.scope():
        model = helpers.constant_gradient_model(keras.optimizers.SGD(0.0))
    x, y = helpers.ones(steps)
    model.fit(x, y, batch_size=1, verbose=0)
    assert strategy.updates == -(-steps // (workers // n))
    return strategy.staleness()


def test_1_softsync_has_a_staleness_of_0_1_or_2():
    staleness = staleness_of(1)
    assert 0.5 <= staleness.mean <= 1.5
    assert staleness.max <= 2


@pytest.mark.few(1)
@pytest.mark.parametrize("n", [3, 15, 30])
def test_the_mean_staleness_of_n_softsync_is_about_n(n):
    staleness = staleness_of(n)
    assert 0.8 * n <= staleness.mean <= 1.05 * n
    assert staleness.max <= 2 * n


# -- the contract ------------------------------------------------------------------------------


def test_collections_of_several_programs_are_not_mixed():
    """What one `fit` left is used before another begins: nothing waits for later messages."""
    strategy = tf_dsgd.SoftsyncStrategy(
        simulated(2), gradients_per_update=100, staleness_scaling=None
    )
    with strategy.scope():
        models = [helpers.constant_gradient_model(keras.optimizers.SGD(1.0)) for _ in range(2)]
    x, y = helpers.ones(10)
    for turn in (1, 2):
        for model in models:
            model.fit(x, y, batch_size=2, verbose=0)
            np.testing.assert_array_equal(model.get_weights()[0], np.full((3, 1), -turn, "f"))
    assert (strategy.steps, strategy.updates) == (20, 4)


def test_a_rule_may_be_given_another_local_rule():
    """The server rule knows nothing of the workers': here each message is a sum of two."""
    from tf_dsgd import algorithm
    from tf_dsgd.algorithms.downpour import AccrueGradient, Periods
    from tf_dsgd.algorithms.softsync import CollectGradients

    rules = algorithm.Algorithm(
        AccrueGradient(rate=0.0, push_every=2, fetch_every=2),
        Periods(push_every=2, fetch_every=2),
        CollectGradients(2, None),
    )
    strategy = DistributedStrategy(simulated(2), rules)
    with strategy.scope():
        model = helpers.constant_gradient_model(keras.optimizers.SGD(1.0))
    x, y = helpers.ones(16)
    model.fit(x, y, batch_size=2, verbose=0)
    # Eight mini-batches in four messages of 1 + 1; two updates by the mean of two messages.
    np.testing.assert_array_equal(model.get_weights()[0], np.full((3, 1), -4.0, "f"))
    assert (strategy.steps, strategy.updates, strategy.ledger().applied) == (8, 2, 4)


@pytest.mark.parametrize(
    "make",
    [
        lambda c: tf_dsgd.DownpourStrategy(c, staleness_scaling="inverse"),
        lambda c: tf_dsgd.SoftsyncStrategy(c, gradients_per_update=1),
    ],
    ids=["downpour", "softsync"],
)
def test_factors_are_as_precise_as_the_model(make):
    """A gradient of 1 at a rate of 1: the weight is minus the sum of the factors, as of 1/3."""
    cluster = tf_dsgd.SimulatedCluster(4, compute_seconds=1.0, network_seconds=0.0, seed=0)
    strategy = make(cluster)
    with strategy.scope():
        layer = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros", dtype="float64")
        model = keras.Sequential([keras.Input((1,), dtype="float64"), layer])
        model.compile(keras.optimizers.SGD(1.0), lambda _, y: keras.ops.sum(y, axis=-1))
    ones = np.ones((8, 1))
    model.fit(ones, ones, batch_size=1, verbose=0)
    expected = 2 * (1 + 1 + 1 / 2 + 1 / 3)  # messages of a turn are 0, 1, 2 and 3 updates stale
    np.testing.assert_allclose(-model.get_weights()[0][0, 0], expected, rtol=1e-15)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (tf_dsgd.SoftsyncStrategy, {"gradients_per_update": 2}),
        (
            tf_dsgd.PeriodicAveragingStrategy,
            {"average_every": 2, "outer_optimizer": keras.optimizers.SGD(1.0)},
        ),
    ],
    ids=["softsync", "averaging"],
)
def test_the_update_on_shards_is_traced_once(kind, options, monkeypatch):
    """Of full collections, as of the one that a drain finds."""
    traced = []
    original = keras.optimizers.SGD.update_step

    def update_step(self, gradient, variable, rate):
        traced.append((self, variable))
        original(self, gradient, variable, rate)

    monkeypatch.setattr(keras.optimizers.SGD, "update_step", update_step)
    strategy = kind(tf_dsgd.LocalCluster(2), **options)
    with strategy.scope():
        model = helpers.constant_gradient_model("adam" if "outer_optimizer" in options else "sgd")
    model.fit(*helpers.ones(12), batch_size=4, verbose=0)
    assert strategy.steps == 3
    assert len(traced) == len(model.trainable_variables)
