"""Batch methods on NumPy vectors: `Vectors` for the coordinator, and textbook twins of it."""

import dataclasses

import numpy as np

from tf_dsgd.algorithms.batch_methods import BatchMethod, Evaluated, Settings
from tf_dsgd.algorithms.line_search import LineSearch, StrongWolfe


class Arrays:
    """`batch_methods.Vectors`, in one process."""

    def __init__(self, weights, rows):
        self.weights = np.array(weights, np.float64)
        size = len(self.weights)
        self.base, self.tried = self.weights.copy(), np.zeros(size)
        self.gradient, self.direction = np.zeros(size), np.zeros(size)
        self.steps, self.changes = np.zeros((rows, size)), np.zeros((rows, size))

    @property
    def basis(self):
        return np.concatenate([self.steps, self.changes, self.gradient[None]])

    def moved(self):
        return bool((self.weights != self.base).any())

    def begin(self):
        self.base, self.gradient = self.weights.copy(), self.tried.copy()

    def aim(self, coefficients):
        self.direction = coefficients @ self.basis

    def take(self, slot):
        if len(self.steps):
            self.steps[slot] = self.weights - self.base
            self.changes[slot] = self.tried - self.gradient
        self.begin()
        new = [slot, len(self.steps) + slot, -1] if len(self.steps) else [-1]
        return self.basis[new] @ self.basis.T


def run(function, weights, settings, iterations):
    """(weights after each iteration, the last `Iteration`)."""
    vectors = Arrays(weights, settings.rows)
    method = BatchMethod(settings)
    found, last = [], None
    for _ in range(iterations):
        last = one_iteration(method, vectors, function)
        found.append(vectors.weights.copy())
        if last.is_last:
            break
    return found, last


def one_iteration(method, vectors, function):
    """Evaluates where the coordinator asks for it."""
    iterating = method.iterate(vectors)
    try:
        step = next(iterating)
        while True:
            if step is not None:
                vectors.weights = vectors.base + step * vectors.direction
            loss, gradient = function(vectors.weights)
            vectors.tried = gradient
            slope = float(gradient @ vectors.direction)
            step = iterating.send(Evaluated(float(loss), slope, float(gradient @ gradient)))
    except StopIteration as ended:
        return ended.value


class Exact(LineSearch):
    """For quadratics: phi' is a line, and two of its values give where it is 0."""

    def _after(self, point):
        if self.evaluations == 2:
            self._end(point)
            return None
        slope = self._origin.slope
        return -slope * point.step / (point.slope - slope)

    @property
    def _best(self):
        return None


@dataclasses.dataclass(frozen=True)
class ExactSettings(Settings):
    """Settings with that search."""

    def search(self, at, slope, step, noise):
        return Exact(at.loss, slope, step)


def textbook(function, weights, method, history, iterations, curvature):
    """Weights after each iteration, of vectors as the books have them, and the same line search."""
    weights = np.array(weights, np.float64)
    loss, gradient = function(weights)
    pairs, found, before = [], [], None
    step = min(1.0, 1.0 / np.linalg.norm(gradient))
    direction, beta = np.zeros_like(gradient), lambda new: 0.0
    for _ in range(iterations):
        if method == "lbfgs":
            direction = -two_loops(gradient, pairs)
        else:
            direction = -gradient + beta(gradient) * direction
        slope = gradient @ direction
        if method == "lbfgs" and pairs:
            step = 1.0
        elif before is not None:
            step = before[0] * before[1] / slope
        search = StrongWolfe(loss, slope, step, curvature=curvature)
        while search.step is not None:
            at = weights + search.step * direction
            tried, tried_gradient = function(at)
            search.tell(tried, tried_gradient @ direction)
        pairs = [*pairs, (at - weights, tried_gradient - gradient)][-history:]
        before, beta = (search.found.step, slope), _beta(method, gradient, direction)
        weights, loss, gradient = at, tried, tried_gradient
        found.append(weights)
    return found


def two_loops(gradient, pairs):
    """Nocedal, Wright, algorithm 7.4."""
    q, alphas = gradient.copy(), []
    for s, y in reversed(pairs):
        alphas.append(s @ q / (s @ y))
        q = q - alphas[-1] * y
    if pairs:
        s, y = pairs[-1]
        q = q * (s @ y) / (y @ y)
    for (s, y), alpha in zip(pairs, reversed(alphas), strict=True):
        q = q + s * (alpha - y @ q / (s @ y))
    return q


def _beta(method, old, direction):
    """A function from the next gradient to beta."""

    def beta(new):
        if method == "gd":
            return 0.0
        if method == "cg-fr":
            return 0.0 if abs(new @ old) >= 0.1 * (new @ new) else (new @ new) / (old @ old)
        if method == "cg-pr":
            return max(0.0, new @ (new - old) / (old @ old))
        return new @ (new - old) / (direction @ (new - old))

    return beta
