"""Four algorithms against the contract, on the simulator, each with a twin in NumPy.

The fifth, averaging with slots per worker, is in tests/algorithms/test_averaging.py.
"""

from __future__ import annotations

import keras
import numpy as np
import pytest

import tf_dsgd
from tests.contract import sketches
from tests.contract.clockwork import Twin
from tests.contract.linear import BATCH, FEATURES, data, gradient, split
from tf_dsgd import algorithm
from tf_dsgd.algorithms.downpour import AccrueGradient, Periods
from tf_dsgd.strategies.base import DistributedStrategy
from tf_dsgd.strategies.rows.splitting import Patterns


def fit(strategy, optimizer, x, y, start):
    with strategy.scope():
        model = keras.Sequential([keras.Input((FEATURES,)), keras.layers.Dense(1)])
        model.compile(optimizer(), loss="mse")
    model.set_weights([start[:-1], start[-1]])
    model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)
    kernel, bias = model.get_weights()
    return np.concatenate([kernel, bias[None]]), model


def start_weights(seed=3):
    return np.random.default_rng(seed).standard_normal((FEATURES + 1, 1)).astype("float32")


class Accruing(Twin):
    """Downpour's worker in NumPy; `arrive` is the server's."""

    def __init__(self, start, num_workers, rate):
        self.w = start.astype("float64")
        self.local = [self.w.copy() for _ in range(num_workers)]
        self.accrued = [np.zeros_like(self.w) for _ in range(num_workers)]
        self.rate = rate

    def fetch(self, m):
        self.local[m] = self.w.copy()

    def step(self, m, batch):
        g = gradient(self.local[m], batch)
        self.accrued[m] += g
        self.local[m] -= self.rate * g

    def message(self, m):
        message, self.accrued[m] = self.accrued[m], np.zeros_like(self.w)
        return message


COMPUTE, NETWORK = [1.0, 1.713, 2.937], [0.25, 0.531, 0.117]  # no two turns at one instant


def cluster(num_workers=3):
    return tf_dsgd.SimulatedCluster(
        num_workers,
        compute_seconds=COMPUTE[:num_workers],
        network_seconds=NETWORK[:num_workers],
        seed=0,
    )


def test_downpour_with_adam_at_a_period_of_20():
    class DownpourAdam(Accruing):
        push_every = fetch_every = 20
        m = v = count = 0

        def arrive(self, worker, g, staleness):
            self.count += 1
            self.m = 0.9 * self.m + 0.1 * g
            self.v = 0.999 * self.v + 0.001 * g * g
            m, v = self.m / (1 - 0.9**self.count), self.v / (1 - 0.999**self.count)
            self.w -= 0.01 * m / (np.sqrt(v) + 1e-7)
            return True

    x, y = data(230)
    twin = DownpourAdam(start_weights(), 3, rate=0.01)
    twin.run(3, COMPUTE, NETWORK, split(x, y))
    strategy = tf_dsgd.DownpourStrategy(cluster(), push_every=20, fetch_every=20)
    weights, model = fit(strategy, lambda: keras.optimizers.Adam(0.01), x, y, start_weights())
    np.testing.assert_allclose(weights, twin.w, rtol=1e-4, atol=1e-5)
    assert int(model.optimizer.iterations) == twin.count == strategy.updates
    assert strategy.steps == 230


@pytest.mark.parametrize("batches", [60, 61])
def test_softsync_with_three_gradients_per_update(batches):
    class SoftsyncTwin(Accruing):
        collected, alphas = (), ()

        def arrive(self, worker, g, staleness):
            self.collected = [*self.collected, g / max(staleness, 1)]
            return len(self.collected) == 3 and self.flush()

        def flush(self):
            if not len(self.collected):
                return False
            self.w -= 0.05 * sum(self.collected) / len(self.collected)
            self.collected = ()
            return True

    x, y = data(batches)
    twin = SoftsyncTwin(start_weights(), 3, rate=0.0)
    twin.run(3, COMPUTE, NETWORK, split(x, y))
    strategy = DistributedStrategy(cluster(), sketches.softsync(3))
    weights, _ = fit(strategy, lambda: keras.optimizers.SGD(0.05), x, y, start_weights())
    np.testing.assert_allclose(weights, twin.w, rtol=1e-4, atol=1e-5)
    assert strategy.updates == twin.version == -(-batches // 3)


def test_adaptive_revision():
    class RevisionTwin(Accruing):
        def __init__(self, *args):
            super().__init__(*args)
            self.gbar = np.zeros_like(self.w)
            self.z = self.top = np.ones_like(self.w)
            self.old = dict.fromkeys(range(3), self.gbar)

        def fetch(self, m):
            super().fetch(m)
            self.old[m] = self.gbar.copy()

        def arrive(self, worker, g, staleness):
            backlog = self.gbar - self.old[worker]
            eta_old = 0.3 / np.sqrt(self.top)
            self.z = self.z + g**2 + 2 * g * backlog
            self.top = np.maximum(self.z, self.top)
            eta = 0.3 / np.sqrt(self.top)
            self.w = self.w - eta * g + (eta_old - eta) * backlog
            self.gbar = self.gbar + g
            return True

    x, y = data(60)
    twin = RevisionTwin(start_weights(), 3, 0.0)
    twin.run(3, COMPUTE, NETWORK, split(x, y))
    strategy = DistributedStrategy(cluster(), sketches.adaptive_revision(0.3))
    weights, _ = fit(strategy, lambda: keras.optimizers.SGD(0.1), x, y, start_weights())
    np.testing.assert_allclose(weights, twin.w, rtol=1e-4, atol=1e-5)


def test_float16_loss_scaling_at_a_period_of_4():
    """The scale overflows at first, halves until it does not, and grows again."""

    class ScalingTwin(Accruing):
        push_every = fetch_every = 4
        scale, good, skipped, applied = np.float32(2.0**126), 0, 0, 0

        def __init__(self, *args):
            super().__init__(*args)
            self.seen_scale = [self.scale] * 2
            self.w = self.w.astype("float32")

        def fetch(self, m):
            super().fetch(m)
            self.seen_scale[m] = self.scale

        def step(self, m, batch):
            with np.errstate(over="ignore", invalid="ignore"):
                g = gradient(self.local[m], batch).astype("float32")
                g = (g * self.seen_scale[m]) / self.seen_scale[m]
                self.accrued[m] = self.accrued[m] + g
            if np.all(np.isfinite(g)):
                self.local[m] = self.local[m] - self.rate * g

        def arrive(self, worker, g, staleness):
            with np.errstate(over="ignore", invalid="ignore"):
                finite = np.all(np.isfinite(g.astype("float32") * self.scale))
            if not finite:
                self.scale, self.good = self.scale / 2, 0
                self.skipped += 1
                return True
            self.w = self.w - self.rate * g
            self.applied += 1
            grown = self.good == 11
            self.scale, self.good = (self.scale * 2, 0) if grown else (self.scale, self.good + 1)
            return True

    x, y = data(160)
    y = 100 * y  # gradients of some hundreds, which overflow at the first scale
    twin = ScalingTwin(start_weights(), 2, 0.01)
    twin.run(2, COMPUTE, NETWORK, split(x, y))
    strategy = tf_dsgd.DownpourStrategy(cluster(2), push_every=4, fetch_every=4)

    def optimizer():
        return keras.optimizers.LossScaleOptimizer(
            keras.optimizers.SGD(0.01), initial_scale=2.0**126, dynamic_growth_steps=12
        )

    weights, model = fit(strategy, optimizer, x, y, start_weights())
    assert twin.skipped >= 2 and twin.applied >= 10
    assert float(model.optimizer.dynamic_scale.numpy()) == twin.scale
    assert int(model.optimizer.iterations) == twin.applied
    np.testing.assert_allclose(weights, twin.w, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("num_shards", [1, 3])
def test_a_rule_that_knows_its_rows_on_a_table_that_is_split(num_shards):
    """w_r -= g_r / (1 + r): each row's count in the mini-batch, in the mean over it."""
    simulated = tf_dsgd.SimulatedCluster(1, num_shards=num_shards, seed=0)
    rules = AccrueGradient(rate=0.0), Periods(), sketches.ByRow()
    strategy = DistributedStrategy(simulated, algorithm.Algorithm(*rules))
    strategy.placement.split = Patterns({"table/.*": tf_dsgd.Rows()})
    with strategy.scope():
        inputs = keras.Input((1,), dtype="int32")
        rows = keras.layers.Embedding(10, 2, name="table")(inputs)
        model = keras.Model(inputs, keras.layers.Flatten()(rows))
        model.compile(keras.optimizers.SGD(1.0), lambda _, y: keras.ops.sum(y, axis=-1))
    (before,) = model.get_weights()
    ids = np.array([[0], [3], [3], [7], [8], [3], [9], [0]])
    model.fit(ids, np.zeros((8, 2)), batch_size=8, verbose=0)
    (after,) = model.get_weights()
    count = np.bincount(ids[:, 0], minlength=10)
    expected = before - (count / 8 / (1 + np.arange(10)))[:, None]
    np.testing.assert_allclose(after, expected, rtol=1e-6)
    assert strategy.steps == 1
