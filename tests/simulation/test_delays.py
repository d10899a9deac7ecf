"""The simulated cluster's delays: moments and tails against closed forms, and wrong arguments."""

import math

import numpy as np
import pytest

import tf_dsgd
from tests import helpers
from tf_dsgd.simulation.delays import Constant

DRAWS = 40_000


def draw(what, count=DRAWS, now=0.0):
    random = np.random.default_rng(12)
    return np.array([what.draw(random, now) for _ in range(count)])


@pytest.mark.parametrize(
    ("what", "mean", "deviation"),
    [
        (Constant(0.3), 0.3, 0.0),
        (tf_dsgd.Exponential(0.2), 0.2, 0.2),
        (tf_dsgd.LogNormal(2.0, sigma=0.0), 2.0, 0.0),
        (tf_dsgd.LogNormal(2.0, sigma=0.5), 2.0, 2.0 * math.sqrt(math.exp(0.25) - 1)),
        (tf_dsgd.LogNormal(0.1), 0.1, 0.1 * math.sqrt(math.e - 1)),
        # t_min = 3 * 9 / 10; variance t_min^2 a / ((a - 1)^2 (a - 2))
        (tf_dsgd.Pareto(3.0, shape=10.0), 3.0, 2.7 * math.sqrt(10 / 8) / 9),
        (tf_dsgd.Straggler(tf_dsgd.Exponential(0.2), factor=7), 1.4, 1.4),
    ],
)
def test_mean_and_deviation(what, mean, deviation):
    """Within five standard errors of the mean; the deviation, whose error is larger, in 10 %."""
    drawn = draw(what)
    assert abs(drawn.mean() - mean) <= 5 * deviation / math.sqrt(DRAWS) + 1e-9
    assert drawn.std() == pytest.approx(deviation, rel=0.1, abs=1e-9)
    assert drawn.min() >= 0


def test_the_tail_of_pareto_falls_as_a_power():
    """P(t > x) = (t_min / x)^a also where the variance is infinite; t_min = mean (a - 1) / a."""
    drawn = draw(tf_dsgd.Pareto(3.0, shape=1.5))
    least = 3.0 * 0.5 / 1.5
    assert drawn.min() >= least
    for x in (1.5, 4.0, 20.0):
        share = (least / x) ** 1.5
        error = math.sqrt(share * (1 - share) / DRAWS)
        assert abs(np.mean(drawn > x) - share) < 5 * error


def test_the_median_of_lognormal():
    """exp(mu) = mean exp(-sigma^2 / 2)."""
    drawn = draw(tf_dsgd.LogNormal(1.0, sigma=1.2))
    assert np.median(drawn) == pytest.approx(math.exp(-0.72), rel=0.03)


def test_a_straggler_is_slow_for_a_time():
    what = tf_dsgd.Straggler(2.0, 5, slow_from=10.0, slow_until=20.0)
    times = [0.0, 9.99, 10.0, 19.99, 20.0]
    assert [what.draw(None, t) for t in times] == [2.0, 2.0, 10.0, 10.0, 2.0]


def test_stragglers_in_a_cluster():
    """A computes a batch a second; B too, but ten from second 4 to second 30, as it begins.

    B begins at 0, 1, 2, 3, and at 4 one that ends at 14, then 24, and at 34 it is fast again. By
    second 40 A has done 40 and B the batches that began at 0-4, 14, 24 (to 34) and 34-39: 4 + 3 +
    6 = 13.
    """
    slow = tf_dsgd.Straggler(1.0, 10, slow_from=4.0, slow_until=30.0)
    cluster = tf_dsgd.SimulatedCluster(2, compute_seconds=[1.0 + 1e-9, slow])
    strategy = tf_dsgd.DownpourStrategy(cluster)
    with strategy.scope():
        model = helpers.constant_gradient_model("sgd")
    x, y = helpers.ones(53)
    model.fit(x, y, batch_size=1, verbose=0)
    assert [w.steps for w in strategy.ledger().workers] == [40, 13]
