"""Line searches: what they find satisfies the conditions by which they are defined."""

import math

import numpy as np
import pytest

from tf_dsgd.algorithms.line_search import Armijo, StrongWolfe


def _search(kind, function, step, **options):
    """(the search at its end, the steps it asked for), from 0."""
    loss, slope = function(0.0)
    search, asked = kind(loss, slope, step, **options), []
    while search.step is not None:
        asked.append(search.step)
        search.tell(*function(search.step))
    return search, asked


FUNCTIONS = {
    # (phi, phi'): a quadratic, and functions 1 and 2 of More and Thuente 1994.
    "quadratic": lambda a: (0.5 * (a - 3.0) ** 2, a - 3.0),
    "more_thuente_1": lambda a: (-a / (a * a + 2.0), (a * a - 2.0) / (a * a + 2.0) ** 2),
    "more_thuente_2": lambda a: (
        (a + 0.004) ** 5 - 2.0 * (a + 0.004) ** 4,
        5.0 * (a + 0.004) ** 4 - 8.0 * (a + 0.004) ** 3,
    ),
}


@pytest.mark.parametrize("step", [1e-3, 0.1, 1.0, 10.0, 1e3])
@pytest.mark.parametrize(
    ("name", "curvature"),  # the slope of the last one begins at 5e-7
    [
        ("quadratic", 0.9),
        ("quadratic", 0.1),
        ("more_thuente_1", 0.9),
        ("more_thuente_1", 0.1),
        ("more_thuente_2", 0.9),
    ],
)
def test_strong_wolfe_conditions_hold(name, step, curvature):
    function = FUNCTIONS[name]
    loss, slope = function(0.0)
    search, asked = _search(StrongWolfe, function, step, curvature=curvature, max_evaluations=40)
    a = search.found.step
    assert function(a)[0] <= loss + 1e-4 * a * slope  # (3.7a)
    assert abs(function(a)[1]) <= -curvature * slope  # (3.7b)
    assert search.evaluations == len(asked) < 20


@pytest.mark.parametrize("step", [0.1, 1.0, 10.0, 1e3])
@pytest.mark.parametrize("name", ["quadratic", "more_thuente_1", "more_thuente_2"])
def test_armijo_takes_the_first_sufficient_decrease(name, step):
    function = FUNCTIONS[name]
    loss, slope = function(0.0)

    def enough(a):
        return function(a)[0] <= loss + 1e-4 * a * slope

    search, asked = _search(Armijo, function, step)
    assert asked[0] == step
    assert [enough(a) for a in asked] == [False] * (len(asked) - 1) + [True]
    assert search.found.step == asked[-1]


@pytest.mark.parametrize("kind", [StrongWolfe, Armijo])
def test_a_step_is_shortened_where_the_function_is_not_finite(kind):
    def log_barrier(a):  # infinite from 1 on, least at 0.5
        if a >= 1.0:
            return math.inf, math.nan
        return -math.log(1.0 - a) - 2.0 * a, 1.0 / (1.0 - a) - 2.0

    search, asked = _search(kind, log_barrier, 64.0, curvature=0.1)
    assert asked[0] == 64.0
    assert 0 < search.found.step < 1.0
    assert log_barrier(search.found.step)[0] < log_barrier(0.0)[0]


def test_a_slope_that_lies_finds_no_step():
    search, asked = _search(
        StrongWolfe, lambda a: (a, -1.0 if a == 0 else 1.0), 1.0, max_evaluations=7
    )
    assert search.found is None
    assert len(asked) == 7


def test_the_best_step_so_far_is_taken_when_evaluations_are_used_up():
    def steep(a):  # no step is flat enough
        return -a, -1.0

    search, asked = _search(StrongWolfe, steep, 1.0, curvature=0.5, max_evaluations=3)
    assert len(asked) == 3
    assert search.found.step == asked[-1]


def test_bad_beginnings_are_refused():
    with pytest.raises(ValueError, match="slope below 0"):
        StrongWolfe(1.0, 0.0, 1.0)
    with pytest.raises(ValueError, match=r"step=-1\.0"):
        StrongWolfe(1.0, -1.0, -1.0)
    search, _ = _search(Armijo, FUNCTIONS["quadratic"], 1.0)
    with pytest.raises(RuntimeError, match="has ended"):
        search.tell(np.pi, 0.0)
