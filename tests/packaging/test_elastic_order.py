"""What `benchmarks/reproduce/elastic_order.py` computes, beside the algorithms run by hand."""

import importlib.util

import numpy as np
import pytest

from tests import helpers

PROGRAM = helpers.ROOT / "benchmarks" / "reproduce" / "elastic_order.py"
spec = importlib.util.spec_from_file_location("elastic_order", PROGRAM)
elastic_order = importlib.util.module_from_spec(spec)
spec.loader.exec_module(elastic_order)


@pytest.mark.parametrize("saved", [False, True])
def test_the_order_of_pull_and_gradient_is_what_is_written(saved):
    """The matrix of a round, beside the two algorithms, word for word."""
    workers, tau, share, rate = 3, 2, 0.3, 0.4
    a, _ = elastic_order.whole_round(workers, tau, share, rate, saved)
    start = np.array([1.0, -2.0, 0.5, 3.0])
    *x, center = start
    for i in range(workers):
        before = x[i]
        force = share * (x[i] - center)
        x[i] -= force
        center += force
        for k in range(tau):
            x[i] -= rate * (before if saved and k == 0 else x[i])
    np.testing.assert_allclose(a @ start, [*x, center], rtol=1e-12)


def test_the_variance_of_the_center_is_that_of_a_long_run():
    a, q = elastic_order.whole_round(2, 1, 0.45, 0.5, True)
    covariance = np.zeros_like(q)
    for _ in range(200):
        covariance = a @ covariance @ a.T + q
    assert elastic_order.variance_of_center(a, q) == pytest.approx(covariance[-1, -1], rel=1e-9)
    unstable, noise = elastic_order.whole_round(4, 1, 0.225, 1.9, True)
    assert elastic_order.radius(unstable) > 1.0
    assert elastic_order.variance_of_center(unstable, noise) == float("inf")
