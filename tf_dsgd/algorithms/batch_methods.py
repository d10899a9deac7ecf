"""An iteration of a batch method: a direction and its line search, on vectors that others hold.

This is the coordinator of Sandblaster (Dean et al., NIPS 2012, section 4.2 and algorithm 1.2): it
has no parameters, only scalars, in double precision. Whoever holds the vectors does as `Vectors`
says; whoever runs an iteration makes a pass over all data for every step that it yields.

    g, f at w                           known from the iteration before
    d <- direction(dots of s, y, g)     one round trip
    a <- line search:  f, g'd at w + a d, one pass for each a
    s <- a d;  y <- g_new - g;  w <- w + a d;  kept as a pair if s'y > 0
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Generator, Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np

from tf_dsgd.algorithms import directions
from tf_dsgd.algorithms.directions import Pair
from tf_dsgd.algorithms.line_search import Armijo, LineSearch, StrongWolfe

STEPPED = "a step was made"
NO_STEP = "no lower point was found, along the steepest descent either"


class Evaluated(NamedTuple):
    """What a pass over all data gave at a point."""

    loss: float
    slope: float
    """g'd; 0 where there was no direction."""
    gradient_square: float
    """g'g."""


class Vectors(Protocol):
    """What holds the vectors: shards, or NumPy arrays in a test."""

    def moved(self) -> bool:
        """Whether the weights are no longer where the last iteration left them.

        Asked first: what an iteration that was not finished has left is forgotten.
        """

    def begin(self) -> None:
        """What was evaluated last, at the weights as they are, is where the iteration begins."""

    def aim(self, coefficients: np.ndarray) -> None:
        """d <- sum_j c_j b_j."""

    def take(self, slot: int) -> np.ndarray:
        """w <- the point evaluated last: its step and change of gradient are row `slot` now.

        Returns:
            `[3, 2m + 1]`: the dot products of that s, y and the new gradient with all b. Of the
            gradient alone, `[1, 1]`, where m = 0.
        """


@dataclasses.dataclass(frozen=True)
class Iteration:
    """How an iteration went.

    Attributes:
        number: iterations of the strategy so far, of all its models, this one included if it made
            a step.
        loss: f where it ended; nan if nothing was evaluated.
        gradient_norm: the Euclidean norm of its gradient there.
        step: a, the step along the direction; 0 if none was made.
        evaluations: passes over the data that it took.
        restarts: whether it went on along the steepest descent, 1 or 0.
        skipped_pairs: pairs with s'y <= 0 so far, which no direction uses.
        reason: why it ended, in words.
        is_last: whether training ends by it.
    """

    number: int
    loss: float
    gradient_norm: float
    step: float
    evaluations: int
    restarts: int
    skipped_pairs: int
    reason: str
    is_last: bool


@dataclasses.dataclass(frozen=True)
class Settings:
    """Of a batch method; see `tf_dsgd.SandblasterStrategy`."""

    method: str = "lbfgs"
    history: int = 10
    line_search: str = "wolfe"
    max_evaluations: int = 20
    gradient_tolerance: float = 0.0
    loss_tolerance: float = 0.0

    @property
    def rows(self) -> int:
        """m."""
        return directions.rows(self.method, self.history)

    def search(self, at: Evaluated, slope: float, step: float, noise: float) -> LineSearch:
        """A line search from a point."""
        loose = self.method == "lbfgs" and self.history > 0
        kind = StrongWolfe if self.line_search == "wolfe" else Armijo
        return kind(
            at.loss,
            slope,
            step,
            curvature=0.9 if loose else 0.1,
            max_evaluations=self.max_evaluations,
            noise=noise * abs(at.loss),
        )


class BatchMethod:
    """Iterations, and the scalars that they keep.

    Args:
        settings: the method.
        noise: the relative error of a loss, from its type.
    """

    def __init__(self, settings: Settings, noise: float = 0.0):
        self.settings = settings
        self.noise = noise
        self.number = 0
        self.skipped = 0
        self._at: Evaluated | None = None
        """At the weights; None before anything is known of them."""
        self._last: tuple[float, float] | None = None
        """The last step, and its direction's slope."""
        self._pairs: list[Pair] = []
        """Oldest first."""
        size = 2 * settings.rows + 1
        self._dots = np.zeros((size, size))

    def forget(self) -> None:
        """What is known of the weights is of other data, or of other weights."""
        self._at = None

    def iterate(self, vectors: Vectors) -> Generator[float | None, Evaluated, Iteration]:
        """One iteration: yields steps along the direction that `vectors` has.

        Each is answered by what a pass over all data gave there. None is for the weights as they
        are, and 0 for where the direction begins.
        """
        evaluations = 0
        if vectors.moved() or self._at is None:
            self._begin_anew(vectors, (yield None))
            evaluations = 1
        for restarts in (0, 1):
            at = self._known
            if self._is_small(at):
                return self._ended(0.0, evaluations, restarts, self._small(at), True)
            if restarts:
                self._pairs, self._last = [], None
            direction, slope = self._direction()
            vectors.aim(direction)
            search = self.settings.search(at, slope, self._first_step(slope), self.noise)
            result, tried = at, 0.0
            while search.step is not None:
                tried = search.step
                result = yield tried
                search.tell(result.loss, result.slope)
            evaluations += search.evaluations
            if search.found is None:
                if not self._pairs:
                    break
                continue
            if search.found.step != tried:
                result = yield search.found.step
                evaluations += 1
            self.number += 1
            self._take(vectors, search.found.step, slope, result)
            reason = self._tolerance(at, result)
            return self._ended(
                search.found.step, evaluations, restarts, reason or STEPPED, bool(reason)
            )
        # The weights are at the last point that was tried.
        self._begin_anew(vectors, (yield 0.0))
        return self._ended(0.0, evaluations + 1, restarts, NO_STEP, True)

    @property
    def _known(self) -> Evaluated:
        if self._at is None:
            raise RuntimeError("Nothing is known of the weights.")
        return self._at

    def _begin_anew(self, vectors: Vectors, result: Evaluated) -> None:
        if not math.isfinite(result.loss) or not math.isfinite(result.gradient_square):
            raise ValueError(
                "The loss or its gradient is not finite where training begins. "
                f"Received: a loss of {result.loss}, and a gradient whose squares sum to "
                f"{result.gradient_square}. Begin with smaller weights, scale the inputs, or look "
                "for NaN in the data."
            )
        vectors.begin()
        self._at, self._pairs, self._last = result, [], None
        self._dots[-1, -1] = result.gradient_square

    def _direction(self) -> tuple[np.ndarray, float]:
        """Coefficients, and the slope along it; the steepest descent where that is not below 0."""
        found = directions.coefficients(self.settings.method, self._dots, self._pairs)
        slope = float(found @ self._dots[-1])
        if not slope < 0 or not math.isfinite(slope):
            self._pairs, self._last = [], None
            found = directions.steepest(self._dots)
            slope = float(found @ self._dots[-1])
        return found, slope

    def _first_step(self, slope: float) -> float:
        """1 where the direction has a length of its own; else by the last iteration's decrease.

        See Nocedal, Wright, section 3.5, initial step length.
        """
        if self.settings.method == "lbfgs" and self._pairs:
            return 1.0
        if self._last is not None:
            step, before = self._last
            first = step * before / slope
            if 0.0 < first < math.inf:
                return first
        return min(1.0, 1.0 / math.sqrt(self._known.gradient_square))

    def _take(self, vectors: Vectors, step: float, slope: float, result: Evaluated) -> None:
        m = self.settings.rows
        free = [s for s in range(m) if all(pair.slot != s for pair in self._pairs)]
        slot = 0 if not m else free[0] if free else self._pairs[0].slot
        before = self._known.gradient_square
        rows = np.asarray(vectors.take(slot), np.float64)
        for b, row in zip((slot, m + slot, 2 * m) if m else (0,), rows, strict=True):
            self._dots[b, :] = self._dots[:, b] = row
        self._at, self._last = result, (step, slope)
        self._pairs = [pair for pair in self._pairs if pair.slot != slot]
        if m and self._dots[slot, m + slot] > 0:
            self._pairs.append(Pair(slot, step, before))
        elif m:
            self.skipped += 1

    def _is_small(self, at: Evaluated) -> bool:
        norm = math.sqrt(at.gradient_square)
        return norm <= self.settings.gradient_tolerance or norm == 0.0

    def _small(self, at: Evaluated) -> str:
        if at.gradient_square == 0.0:
            return "the gradient is zero"
        return (
            "the gradient's norm is at most gradient_tolerance="
            f"{self.settings.gradient_tolerance:g}"
        )

    def _tolerance(self, before: Evaluated, after: Evaluated) -> str | None:
        """Why training ends after a step; None if it goes on."""
        if self._is_small(after):
            return self._small(after)
        least = self.settings.loss_tolerance
        scale = max(abs(before.loss), abs(after.loss), 1.0)
        if least and before.loss - after.loss <= least * scale:
            return f"the loss fell by no more than loss_tolerance={least:g} of itself"
        return None

    def _ended(
        self, step: float, evaluations: int, restarts: int, reason: str, is_last: bool
    ) -> Iteration:
        at = self._known
        norm = math.sqrt(at.gradient_square)
        return Iteration(
            self.number,
            at.loss,
            norm,
            step,
            evaluations,
            restarts,
            self.skipped,
            reason,
            is_last,
        )

    # -- checkpoints, between two iterations ------------------------------------------------

    def state(self) -> dict[str, np.ndarray]:
        """All that the next iteration needs, its vectors aside."""
        at = self._at or Evaluated(math.nan, math.nan, math.nan)
        last = self._last or (math.nan, math.nan)
        pairs = [[p.slot, p.step, p.gradient_square] for p in self._pairs]
        return {
            "scalars": np.array([self.number, self.skipped, *at, *last], np.float64),
            "pairs": np.array(pairs, np.float64).reshape(-1, 3),
            "dots": self._dots.copy(),
        }

    def check(self, state: Mapping[str, Any]) -> None:
        """Raises a ValueError if `restore` cannot set this."""
        shapes = {"scalars": (7,), "pairs": (-1, 3), "dots": self._dots.shape}
        for name, shape in shapes.items():
            if name not in state:
                raise ValueError(f"The state is not complete: {[name]} are missing.")
            found = np.asarray(state[name])
            fits = len(found.shape) == len(shape) and all(
                n in (-1, k) for n, k in zip(shape, found.shape, strict=True)
            )
            if found.dtype != np.float64 or not fits:
                raise ValueError(
                    f"The state does not fit: {name} is {found.shape} {found.dtype}, and {shape} "
                    "float64 is expected. Go on with the same method and history."
                )

    def restore(self, state: Mapping[str, Any]) -> None:
        """Sets what `state` gave."""
        number, skipped, loss, slope, square, step, before = np.asarray(state["scalars"]).tolist()
        self.number, self.skipped = int(number), int(skipped)
        self._at = None if math.isnan(square) else Evaluated(loss, slope, square)
        self._last = None if math.isnan(step) else (step, before)
        self._pairs = [Pair(int(s), a, g) for s, a, g in np.asarray(state["pairs"]).tolist()]
        self._dots = np.array(state["dots"], np.float64)
