"""L-BFGS and conjugate gradients, without TensorFlow: against closed forms, twins and SciPy."""

import dataclasses
import itertools

import numpy as np
import pytest
from scipy import optimize

from tests.algorithms import batch_twin
from tf_dsgd.algorithms import directions
from tf_dsgd.algorithms.batch_methods import (
    NO_STEP,
    STEPPED,
    BatchMethod,
    Evaluated,
    Settings,
)

START = [-1.2, 1.0, 0.7]


def rosenbrock(w):
    return optimize.rosen(w), optimize.rosen_der(w)


def _quadratic(size, seed=0):
    """(function, its minimum): f = w'Aw/2 - b'w."""
    random = np.random.default_rng(seed)
    basis, _ = np.linalg.qr(random.standard_normal((size, size)))
    a = basis @ np.diag(np.linspace(1.0, 30.0, size)) @ basis.T
    b = random.standard_normal(size)
    return lambda w: (w @ a @ w / 2 - b @ w, a @ w - b), np.linalg.solve(a, b)


@pytest.mark.parametrize("used", [1, 3, 5])
def test_two_loops_on_dot_products_are_two_loops_on_vectors(used):
    random = np.random.default_rng(used)
    steps = random.standard_normal((5, 8))
    hessian = np.diag(np.linspace(1.0, 4.0, 8))
    changes, gradient = steps @ hessian, random.standard_normal(8)
    basis = np.concatenate([steps, changes, gradient[None]])
    slots = [3, 1, 4, 0, 2][:used]  # rows are used again in a ring
    found = directions.two_loops(basis @ basis.T, slots) @ basis
    expected = -batch_twin.two_loops(gradient, [(steps[s], changes[s]) for s in slots])
    np.testing.assert_allclose(found, expected, rtol=1e-12)


@pytest.mark.parametrize("method", ["lbfgs", "cg-fr", "cg-pr", "cg-hs"])
def test_a_quadratic_ends_in_n_exact_steps(method):
    size = 6
    function, minimum = _quadratic(size)
    settings = batch_twin.ExactSettings(method=method)
    found, _ = batch_twin.run(function, np.ones(size), settings, size)
    np.testing.assert_allclose(found[-1], minimum, atol=1e-9)
    # All are the method of conjugate gradients there (Nocedal, Wright, algorithm 5.2).
    a_times = function
    w = np.ones(size)
    gradient = a_times(w)[1]
    direction = -gradient
    for k in range(size):
        image = a_times(direction)[1] - a_times(np.zeros(size))[1]
        alpha = gradient @ gradient / (direction @ image)
        w = w + alpha * direction
        np.testing.assert_allclose(found[k], w, atol=1e-8)
        new = gradient + alpha * image
        direction = -new + (new @ new) / (gradient @ gradient) * direction
        gradient = new


@pytest.mark.parametrize(
    ("method", "history"),
    [("lbfgs", 10), ("lbfgs", 2), ("lbfgs", 0), *((m, 10) for m in directions.METHODS[1:])],
)
def test_iterates_are_the_textbook_s(method, history):
    settings = Settings(method=method, history=history)
    found, last = batch_twin.run(rosenbrock, START, settings, 10)
    loose = method == "lbfgs" and history
    expected = batch_twin.textbook(
        rosenbrock, START, method if history else "gd", history, 10, 0.9 if loose else 0.1
    )
    np.testing.assert_allclose(found, expected, rtol=1e-10)
    assert last.reason == STEPPED


def test_history_0_is_steepest_descent():
    lbfgs, _ = batch_twin.run(rosenbrock, START, Settings(history=0), 8)
    descent, _ = batch_twin.run(rosenbrock, START, Settings(method="gd"), 8)
    np.testing.assert_array_equal(lbfgs, descent)


@pytest.mark.parametrize("method", ["lbfgs", "cg-fr", "cg-pr", "cg-hs"])
def test_the_minimum_is_scipy_s(method):
    settings = Settings(method=method, gradient_tolerance=1e-9)
    found, last = batch_twin.run(rosenbrock, START, settings, 2000)
    expected = optimize.minimize(rosenbrock, START, jac=True, method="L-BFGS-B", tol=1e-14)
    np.testing.assert_allclose(found[-1], expected.x, atol=1e-5)
    assert last.is_last
    assert "gradient_tolerance=1e-09" in last.reason


def test_pairs_of_negative_curvature_are_left_out():
    def ridge(w):  # concave: s'y < 0 wherever a step goes
        root = np.sqrt(1 + w @ w)
        return -root, -w / root

    _, last = batch_twin.run(ridge, [0.1], Settings(line_search="armijo"), 3)
    assert last.skipped_pairs == 3


def test_no_lower_point_ends_it_after_the_steepest_descent():
    calls = []

    def lies(w):  # a gradient that points downhill
        calls.append(w)
        return float(w @ w), -2 * w

    found, last = batch_twin.run(lies, [1.0, 2.0], Settings(max_evaluations=4), 5)
    assert last.is_last
    assert last.reason == NO_STEP
    assert last.step == last.number == 0
    assert last.evaluations == len(calls) == 1 + 4 + 1
    np.testing.assert_array_equal(found[-1], [1.0, 2.0])


def test_a_history_that_misleads_is_dropped_once():
    lies = []

    def lying(w):  # until the history is dropped, which only a search along the gradient ends
        loss, gradient = rosenbrock(w)
        lies.append(w)
        return (np.inf if 0 < len(lies) - told <= 12 else loss), gradient

    told = np.inf
    method, vectors = BatchMethod(Settings(max_evaluations=12)), batch_twin.Arrays(START, 10)
    for _ in range(3):
        batch_twin.one_iteration(method, vectors, lying)
    told, before = len(lies), rosenbrock(vectors.weights)
    last = batch_twin.one_iteration(method, vectors, lying)
    assert (last.restarts, last.reason) == (1, STEPPED)
    assert rosenbrock(vectors.weights)[0] < before[0]
    moved = vectors.steps[0]  # the first row, as there are no others any more
    np.testing.assert_allclose(
        moved / np.linalg.norm(moved), -before[1] / np.linalg.norm(before[1])
    )


def test_the_loss_tolerance_ends_it():
    function, _ = _quadratic(4)
    losses = []

    def noted(w):
        losses.append(function(w)[0])
        return function(w)

    _, last = batch_twin.run(noted, np.ones(4), Settings(loss_tolerance=1e-2), 50)
    assert "loss_tolerance=0.01" in last.reason
    assert last.number < 20


def test_a_state_goes_on_where_it_was_taken():
    whole, _ = batch_twin.run(rosenbrock, START, Settings(history=3), 9)
    method, vectors = BatchMethod(Settings(history=3)), batch_twin.Arrays(START, 3)
    for _ in range(5):
        batch_twin.one_iteration(method, vectors, rosenbrock)
    state, method = method.state(), BatchMethod(Settings(history=3))
    method.check(state)
    method.restore(state)
    for _ in range(4):
        last = batch_twin.one_iteration(method, vectors, rosenbrock)
    np.testing.assert_array_equal(vectors.weights, whole[-1])
    assert last.number == 9
    with pytest.raises(ValueError, match="same method and history"):
        BatchMethod(Settings(history=4)).check(state)


def test_weights_that_were_changed_are_evaluated_anew():
    method, vectors = BatchMethod(Settings()), batch_twin.Arrays(START, 10)
    for _ in range(3):
        batch_twin.one_iteration(method, vectors, rosenbrock)
    vectors.weights = np.array(START)
    batch_twin.one_iteration(method, vectors, rosenbrock)
    first, _ = batch_twin.run(rosenbrock, START, Settings(), 1)
    np.testing.assert_array_equal(vectors.weights, first[0])


def test_a_beginning_that_is_not_finite_is_refused():
    with pytest.raises(ValueError, match="not finite where training begins"):
        batch_twin.run(lambda w: (np.nan, w), START, Settings(), 1)


def test_iterations_are_numbers_of_python():
    _, last = batch_twin.run(rosenbrock, START, Settings(), 2)
    kinds = {type(value) for value in dataclasses.astuple(last)}
    assert kinds <= {int, float, str, bool}


@pytest.mark.parametrize("method", ["lbfgs", "cg-pr", "gd"])
@pytest.mark.parametrize("most", [2, 3, 4])
def test_the_weights_are_where_the_iteration_says(method, most):
    """On a function full of dents, where the lowest point often is not the last that was tried."""
    random = np.random.default_rng(most)
    waves = random.normal(size=(12, 5)) * 4.0

    def dented(w):
        angles = waves @ w
        return w @ w / 2 + np.sin(angles).sum() / 4, w + waves.T @ np.cos(angles) / 4

    settings = Settings(method=method, max_evaluations=most)
    again = 0
    for seed in range(20):
        start = np.random.default_rng(seed).normal(size=5)
        vectors, engine = batch_twin.Arrays(start, settings.rows), BatchMethod(settings)
        for _ in range(6):
            before, at = dented(vectors.weights)[0], vectors.weights.copy()
            last = batch_twin.one_iteration(engine, vectors, dented)
            if last.is_last:
                break
            loss, gradient = dented(vectors.weights)
            assert last.loss == loss < before
            assert last.gradient_norm == pytest.approx(np.linalg.norm(gradient))
            np.testing.assert_array_equal(vectors.weights, at + last.step * vectors.direction)
            again += last.evaluations > most + (last.number == 1)
    assert again or most > 2


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_the_loss_tolerance_is_relative_above_1(scale):
    function, _ = _quadratic(4)

    def scaled(w):
        loss, gradient = function(w)
        return scale * (loss + 100.0), scale * gradient

    settings = Settings(loss_tolerance=1e-6)
    found, last = batch_twin.run(scaled, np.ones(4), settings, 100)
    losses = [scaled(w)[0] for w in found]
    fell = [a - b for a, b in itertools.pairwise([scaled(np.ones(4))[0], *losses])]
    bound = [1e-6 * max(1.0, abs(loss)) for loss in losses]
    assert last.is_last and "loss_tolerance" in last.reason
    assert fell[-1] <= bound[-1] * (1 + 1e-3)
    assert all(f > b * (1 - 1e-3) for f, b in zip(fell[:-1], bound[:-1], strict=True))


class Aims(batch_twin.Arrays):
    """Takes down the directions' coefficients."""

    def __init__(self, rows):
        super().__init__([0.0], rows)
        self.aims = []

    def aim(self, coefficients):
        self.aims.append(coefficients.tolist())
        super().aim(coefficients)


@pytest.mark.parametrize(("noise", "accepted"), [(1e-3, True), (1e-4, False)])
def test_losses_are_compared_to_within_their_noise(noise, accepted):
    """Relative to the loss, whose sign does not matter: -99.95 is no higher than -100 +- 0.1."""
    iterating = BatchMethod(Settings(), noise).iterate(Aims(10))
    assert next(iterating) is None
    assert iterating.send(Evaluated(-100.0, 0.0, 1.0)) == 1.0
    if accepted:
        with pytest.raises(StopIteration) as ended:
            iterating.send(Evaluated(-99.95, 0.0, 0.5))
        assert (ended.value.value.loss, ended.value.value.step) == (-99.95, 1.0)
    else:
        assert 0 < iterating.send(Evaluated(-99.95, 0.0, 0.5)) < 1.0


def _gone_on(method, dots, **options):
    """(an iteration that goes on with one pair, its vectors, the method): f = 3 and g'g = 4."""
    settings = Settings(method=method, history=1, **options)
    going, vectors = BatchMethod(settings), Aims(1)
    state = {
        "scalars": np.array([5, 0, 3.0, -1.0, 4.0, 8.0, -6.0]),  # the last step was 8
        "pairs": np.array([[0, 8.0, 9.0]]),
        "dots": np.array(dots),  # of s, y, g
    }
    going.check(state)
    going.restore(state)
    return going.iterate(vectors), vectors, going


def test_a_direction_that_leads_uphill_is_replaced_by_the_steepest_descent():
    """And with it the step of the one before: 1 / |g|, and not the last one's decrease."""
    # beta = g'y / (s'y / 8) = 16, and g'd = -4 + 16 / 8 s'g = 6
    dots = [[1.0, 1.0, 5.0], [1.0, 1.0, 2.0], [5.0, 2.0, 4.0]]
    iterating, vectors, going = _gone_on("cg-hs", dots)
    assert next(iterating) == 0.5
    assert vectors.aims == [[0.0, 0.0, -1.0]]
    assert len(going.state()["pairs"]) == 0
    # The same with s'g = 1: g'd = -2, and the step is 8 * -6 / -2.
    dots[0][2] = dots[2][0] = 1.0
    iterating, vectors, going = _gone_on("cg-hs", dots)
    assert next(iterating) == 24.0
    assert vectors.aims == [[2.0, 0.0, -1.0]]
    assert len(going.state()["pairs"]) == 1


def test_after_a_search_without_a_step_it_begins_anew_along_the_gradient():
    dots = [[1.0, 1.0, 1.0], [1.0, 1.0, 1.0], [1.0, 1.0, 4.0]]
    iterating, vectors, going = _gone_on("lbfgs", dots, max_evaluations=2)
    nothing = Evaluated(np.inf, np.nan, np.nan)
    assert next(iterating) == 1.0
    assert iterating.send(nothing) == pytest.approx(0.1)
    assert iterating.send(nothing) == 0.5  # 1 / |g|
    assert vectors.aims[1:] == [[0.0, 0.0, -1.0]]
    vectors.weights, vectors.tried = np.array([1.0]), np.array([1.0])
    with pytest.raises(StopIteration) as ended:
        iterating.send(Evaluated(2.0, 0.0, 1.0))
    got = ended.value.value
    assert (got.restarts, got.evaluations, got.step, got.number) == (1, 3, 0.5, 6)
    assert going.state()["pairs"].tolist() == [[0, 0.5, 4.0]]  # the old one is gone
