"""Line searches as state machines: they say which step to evaluate next, and are told what came.

An evaluation at a step a gives phi(a) = f(w + a d) and phi'(a) = g(w + a d)'d, and is a pass over
all data: each one counts. Numbers are Python's, in double precision, whatever the weights are.

    sufficient decrease   phi(a) <= phi(0) + c1 a phi'(0)
    curvature            |phi'(a)| <= -c2 phi'(0)

`StrongWolfe` wants both (Nocedal, Wright, Numerical Optimization, 2nd edition, algorithms 3.5 and
3.6), `Armijo` the first alone. References: equations 3.59 (cubic interpolation) and 3.7 there.
"""

from __future__ import annotations

import abc
import dataclasses
import math

_WIDEN = 4.0
"""At most so many times farther is the next step, as long as none is too far."""
_MARGIN = 0.1
"""The next step keeps this part of the interval from either end."""


@dataclasses.dataclass(frozen=True)
class Point:
    """What an evaluation gave: phi and phi' at a step."""

    step: float
    loss: float
    slope: float

    @property
    def is_finite(self) -> bool:
        return math.isfinite(self.loss) and math.isfinite(self.slope)


class LineSearch(abc.ABC):
    """Asks for `step` to be evaluated until that is None; then `found` is the point, or None.

    Args:
        loss: phi(0).
        slope: phi'(0), below 0.
        step: the first one to try.
        decrease: c1.
        curvature: c2.
        max_evaluations: after so many the best point with sufficient decrease is taken, if any.
        noise: how far the loss may be wrong, by which `sufficient decrease` is relaxed.
    """

    def __init__(
        self,
        loss: float,
        slope: float,
        step: float,
        *,
        decrease: float = 1e-4,
        curvature: float = 0.9,
        max_evaluations: int = 20,
        noise: float = 0.0,
    ):
        if not slope < 0 or not step > 0:
            raise ValueError(
                "A line search needs a slope below 0 and a step above 0. "
                f"Received: slope={slope!r}, step={step!r}."
            )
        self._origin = Point(0.0, loss, slope)
        self._decrease = decrease
        self._curvature = curvature
        self._max_evaluations = max_evaluations
        self._noise = noise
        self.evaluations = 0
        self.step: float | None = step
        """To be evaluated next; None at the end."""
        self.found: Point | None = None

    def tell(self, loss: float, slope: float) -> None:
        """What the evaluation at `step` gave; not finite where the function was not."""
        if self.step is None:
            raise RuntimeError("The line search has ended.")
        self.evaluations += 1
        step = self._after(Point(self.step, loss, slope))
        if step is None:
            self.step = None
        elif self.evaluations >= self._max_evaluations:
            self._end(self._best)
        else:
            self.step = step

    @abc.abstractmethod
    def _after(self, point: Point) -> float | None:
        """The next step, after a point was evaluated; None where `found` says how it ended."""

    @property
    @abc.abstractmethod
    def _best(self) -> Point | None:
        """A point of sufficient decrease, if there is any."""

    def _end(self, point: Point | None) -> None:
        self.step, self.found = None, point

    def _decreases(self, point: Point) -> bool:
        slope = self._origin.slope
        least = self._origin.loss + self._decrease * point.step * slope + self._noise
        return point.is_finite and point.loss <= least

    def _is_flat(self, point: Point) -> bool:
        return abs(point.slope) <= -self._curvature * self._origin.slope


class StrongWolfe(LineSearch):
    """Bracketing, then zoom."""

    _lowest: Point | None = None
    """The best point of sufficient decrease so far; None for where it begins."""
    _high: Point | None = None
    """The other end of an interval that holds an acceptable step; None while bracketing."""

    @property
    def _low(self) -> Point:
        return self._lowest or self._origin

    @property
    def _best(self) -> Point | None:
        return self._low if self._low.loss < self._origin.loss else None

    def _after(self, point: Point) -> float | None:
        low, high = self._low, self._high
        too_high = not self._decreases(point) or (
            point.loss >= low.loss + self._noise and low.step > 0
        )
        if too_high:
            self._high = point
        elif self._is_flat(point):
            self._end(point)
            return None
        elif high is None:
            # Algorithm 3.5: farther, or back towards the last point where the slope has turned.
            if point.slope >= 0:
                self._high = low
            else:
                farther = _interpolated(low, point)
                self._lowest = point
                most = _WIDEN * point.step
                least = point.step + _MARGIN * (point.step - low.step)
                return min(max(farther, least), most) if farther > point.step else most
            self._lowest = point
        else:
            # Algorithm 3.6: the interval is between the new point and the end downhill of it.
            if point.slope * (high.step - low.step) >= 0:
                self._high = low
            self._lowest = point
        return self._within()

    def _within(self) -> float | None:
        """The next step in the interval; None where it is too narrow for any."""
        low, high = self._low, self._high
        if high is None:
            raise RuntimeError("There is no interval yet.")
        first, last = sorted((low.step, high.step))
        width = last - first
        if width <= 1e-14 * last:
            self._end(self._best)
            return None
        if not high.is_finite:
            return low.step + _MARGIN * (high.step - low.step)
        step = _interpolated(low, high)
        return min(max(step, first + _MARGIN * width), last - _MARGIN * width)


class Armijo(LineSearch):
    """Sufficient decrease alone; each step is shorter than the one before."""

    @property
    def _best(self) -> Point | None:
        return None  # the first one ends it

    def _after(self, point: Point) -> float | None:
        if self._decreases(point):
            self._end(point)
            return None
        if not point.is_finite:
            return _MARGIN * point.step
        step = _interpolated(self._origin, point)
        return min(max(step, _MARGIN * point.step), 0.5 * point.step)


def _interpolated(a: Point, b: Point) -> float:
    """Where the cubic through both points, of their slopes, is least (3.59); else the middle."""
    width = b.step - a.step
    middle = a.step + 0.5 * width
    if not width or not b.is_finite:
        return middle
    d1 = a.slope + b.slope - 3.0 * (a.loss - b.loss) / (a.step - b.step)
    square = d1 * d1 - a.slope * b.slope
    if not square >= 0 or math.isinf(square):
        return middle
    d2 = math.copysign(math.sqrt(square), width)
    divisor = b.slope - a.slope + 2.0 * d2
    step = b.step - width * (b.slope + d2 - d1) / divisor if divisor else middle
    return step if math.isfinite(step) else middle
