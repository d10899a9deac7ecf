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


# -- the states between, by numbers of one's own ---------------------------------------------------


def _cubic_least(a, b):
    """Where the cubic through two points (step, phi, phi'), of their slopes, is least."""
    rows, values = [], []
    for step, loss, slope in (a, b):
        rows += [[step**3, step**2, step, 1.0], [3 * step**2, 2 * step, 1.0, 0.0]]
        values += [loss, slope]
    cubic = np.polynomial.Polynomial(np.linalg.solve(rows, values)[::-1])
    least = [r.real for r in cubic.deriv().roots() if cubic.deriv(2)(r.real) > 0]
    return least[0]


def _within(a, b):
    """The next step between two ends: the cubic's least, a tenth of the width from either."""
    first, last = sorted((a[0], b[0]))
    margin = 0.1 * (last - first)
    return min(max(_cubic_least(a, b), first + margin), last - margin)


ORIGIN = (0.0, 0.0, -1.0)


def _told(*points, step=1.0, **options):
    """A search from `ORIGIN` that was told of these points, whatever steps it has asked for."""
    search = StrongWolfe(*ORIGIN[1:], step, **{"curvature": 0.1, **options})
    for at, loss, slope in points:
        search.step = at
        search.tell(loss, slope)
    return search


HIGH = (1.0, 0.4, 2.0)  # above the line of sufficient decrease
LOW = (0.4, -0.2, -0.3)  # below it, and downhill of it is HIGH
TURNED = (0.6, -0.2, 0.3)  # below it, and downhill of it is ORIGIN


@pytest.mark.parametrize(
    ("points", "ends"),
    [
        # Algorithm 3.5: the interval begins where the loss is too high, or the slope has turned.
        ([HIGH], (ORIGIN, HIGH)),
        ([(1.0, -0.3, 0.5)], (ORIGIN, (1.0, -0.3, 0.5))),
        ([(1.0, -0.5, -0.4), (2.0, -0.4, -0.2)], ((1.0, -0.5, -0.4), (2.0, -0.4, -0.2))),
        # Algorithm 3.6: of three points the lowest stays, and the end that is downhill of it.
        ([HIGH, LOW], (LOW, HIGH)),
        ([HIGH, TURNED], (TURNED, ORIGIN)),
        ([HIGH, (0.3, 0.1, 1.0)], (ORIGIN, (0.3, 0.1, 1.0))),
        ([HIGH, LOW, (0.7, -0.1, 0.5)], (LOW, (0.7, -0.1, 0.5))),
        # The same where the lowest is the farther end: downhill is to the left.
        ([HIGH, TURNED, (0.3, -0.3, -0.4)], ((0.3, -0.3, -0.4), TURNED)),
        ([HIGH, TURNED, (0.3, -0.3, 0.4)], ((0.3, -0.3, 0.4), ORIGIN)),
        ([HIGH, TURNED, (0.3, -0.1, -0.5)], (TURNED, (0.3, -0.1, -0.5))),
    ],
)
def test_the_next_step_is_between_the_right_ends(points, ends):
    assert _told(*points).step == pytest.approx(_within(*ends), rel=1e-12)


def test_bracketing_goes_farther_by_no_more_than_four_times():
    """As the cubic says; farther than the point by a tenth at least; 4 times where it has none."""
    first = (1.0, -0.95, -0.5)
    assert _told(first).step == pytest.approx(_cubic_least(ORIGIN, first), rel=1e-12)
    assert 1.1 < _told(first).step < 4.0
    assert _told((1.0, -1.0, -1.0)).step == 4.0  # a line
    assert _told((1.0, -0.6, -0.11)).step == pytest.approx(1.1)
    assert _told((1.0, -1.0, -0.999)).step == 4.0


def test_a_loss_within_the_noise_counts_as_no_higher():
    above = (1.0, 5e-3, 0.0)  # and flat
    assert _told(above, noise=1e-2).found.step == 1.0
    assert _told(above, noise=1e-3).found is None
    assert _told(above, noise=1e-3).step == pytest.approx(_within(ORIGIN, above), rel=1e-12)
    # The same beside the lowest point so far, which is not where it began.
    flat = (0.5, LOW[1] + 5e-3, 0.0)
    assert _told(HIGH, LOW, flat, noise=1e-2).found.step == 0.5
    assert _told(HIGH, LOW, flat, noise=1e-3).found is None
    armijo = Armijo(0.0, -1.0, 1.0, noise=1e-2)
    armijo.tell(5e-3, 0.0)
    assert armijo.found.step == 1.0
    armijo = Armijo(0.0, -1.0, 1.0, noise=1e-3)
    armijo.tell(5e-3, 0.0)
    assert armijo.found is None and armijo.step is not None


def test_the_beginning_is_no_lowest_point_to_be_undercut():
    """Where the slope is too small to show in the loss, a flat point as high is taken."""
    search = StrongWolfe(1.0, -1e-20, 1.0)
    search.tell(1.0, 0.0)
    assert search.found.step == 1.0


def test_a_loss_as_high_as_the_lowest_ends_the_interval():
    equal = (0.8, LOW[1], 0.0)  # flat, but no lower than the lowest
    search = _told(HIGH, LOW, equal)
    assert search.found is None
    assert search.step == pytest.approx(_within(LOW, equal), rel=1e-12)


def test_without_evaluations_left_only_a_lower_point_is_taken():
    within_noise = (1.0, 5e-3, -0.9)  # no lower than the beginning, but for the noise
    assert _told(within_noise, noise=1e-2, max_evaluations=1).found is None
    found = _told(HIGH, LOW, (0.7, -0.1, 0.5), max_evaluations=3).found
    assert (found.step, found.loss) == LOW[:2]


def test_an_interval_without_width_ends_the_search():
    low, high = (1.0, -0.5, -0.4), (1.0 + 1e-15, -0.4, 0.4)
    search = _told(low, high)
    assert search.step is None and search.found.step == 1.0
    search = _told((1e-300, 1.0, 1.0), (1e-300, 1.0, 1.0))
    assert search.step is not None  # the width counts beside the steps, not beside 1


def test_a_tenth_of_the_way_to_where_the_function_is_not_finite():
    assert _told((1.0, math.nan, math.nan)).step == pytest.approx(0.1)
    assert _told((1.0, math.inf, 1.0)).step == pytest.approx(0.1)
    assert _told((1.0, -1.0, math.nan)).step == pytest.approx(0.1)  # one alone is not enough
    search = _told((1.0, -0.5, -0.4), (4.0, math.inf, math.nan))
    assert search.step == pytest.approx(1.3)
