r"""Elastic averaging's first gradient: before the pull, as the paper has it, or after it.

    python benchmarks/reproduce/elastic_order.py

Algorithm 1 of Zhang, Choromanska and LeCun (2015) saves x, pulls the worker to the center, and then
uses the gradient at the x that it saved. `ElasticAveragingStrategy` takes it after the pull, where
the worker is:

    paper:     x <- x - E - eta g(x)
    tf_dsgd:   x <- x - E;   x <- x - eta g(x)

For f(x) = h x^2 / 2 and gradients with noise of variance 1 both are linear, so that nothing has to
be run: M workers take turns (the paper's round robin), each with a force and then tau steps. Of a
whole round, x <- A x + noise of covariance Q. Printed are the spectral radius of A, by which the
distance to the optimum falls in a round, and how the variance of the center in the long run, P of
P = A P A' + Q, differs.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Sequence

import numpy as np


def whole_round(
    workers: int, tau: int, share: float, rate: float, saved: bool
) -> tuple[np.ndarray, np.ndarray]:
    """(A, Q) of a round; the center comes last. `rate` is eta h, noise is in units of eta."""
    size = workers + 1
    a, q = np.eye(size), np.zeros((size, size))
    for i in range(workers):
        force = np.eye(size)
        force[i, i] = force[-1, -1] = 1.0 - share
        force[i, -1] = force[-1, i] = share
        step = np.eye(size)
        step[i, i] -= rate
        noise = np.zeros((size, size))
        noise[i, i] = 1.0
        first = force - rate * noise if saved else step @ force
        for matrix in [first, *[step] * (tau - 1)]:
            a, q = matrix @ a, matrix @ q @ matrix.T + noise
    return a, q


def radius(a: np.ndarray) -> float:
    """The largest absolute value of an eigenvalue."""
    return float(abs(np.linalg.eigvals(a)).max())


def variance_of_center(a: np.ndarray, q: np.ndarray) -> float:
    """In the long run; infinite where there is none."""
    if radius(a) >= 1.0:
        return float("inf")
    covariance = np.linalg.solve(np.eye(a.size) - np.kron(a, a), q.ravel())
    return float(covariance[-1])


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", default="4,16", help="M")
    parser.add_argument("--periods", default="1,4,16", help="tau")
    parser.add_argument("--rates", default="0.01,0.1,0.5,1.0,1.5,1.9", help="eta h; stable below 2")
    options = parser.parse_args()
    counts, periods = (
        [int(n) for n in each.split(",")] for each in (options.workers, options.periods)
    )
    rates = [float(rate) for rate in options.rates.split(",")]
    print(table(counts, periods, rates))


def table(counts: Sequence[int], periods: Sequence[int], rates: Sequence[float]) -> str:
    """A line for each setting."""
    lines = [
        "| M | period | rate times curvature | $\\rho$, at the pulled $x_i$ | $\\rho$, the paper's "
        "| variance of the center, beside the paper's |",
        "|---|---|---|---|---|---|",
    ]
    for workers, tau, rate in itertools.product(counts, periods, rates):
        rounds = [whole_round(workers, tau, 0.9 / workers, rate, s) for s in (False, True)]
        after, before = (radius(a) for a, _ in rounds)
        diverges = max(after, before) >= 1.0
        ratio = variance_of_center(*rounds[0]) / variance_of_center(*rounds[1])
        cells = [workers, tau, f"{rate:g}", f"{after:.3f}", f"{before:.3f}"]
        cells.append("none, it diverges" if diverges else f"{ratio:.2f}")
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
