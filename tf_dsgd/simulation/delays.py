"""Delays of the simulated cluster: constant, random, heavy-tailed, and those of stragglers."""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from tf_dsgd.checks import called, real


class Delay(abc.ABC):
    """How long something takes, drawn anew each time."""

    @abc.abstractmethod
    def draw(self, random: np.random.Generator, now: float) -> float:
        """Virtual seconds of what begins at `now`."""


@dataclasses.dataclass(frozen=True)
class Constant(Delay):
    """Always the same; what a plain number stands for."""

    seconds: float

    def draw(self, random: np.random.Generator, now: float) -> float:
        return self.seconds


@called(examples={"mean_seconds": "0.1"})
@dataclasses.dataclass(frozen=True)
class Exponential(Delay):
    """An exponentially distributed delay, drawn anew each time.

    Args:
        mean_seconds: the mean, in virtual seconds; at least 0.

    Raises:
        ValueError: for a wrong number, naming it.

    Example:

    >>> tf_dsgd.Exponential(0.1)
    Exponential(mean_seconds=0.1)
    """

    mean_seconds: float

    def __post_init__(self) -> None:
        _mean(self.mean_seconds)

    def draw(self, random: np.random.Generator, now: float) -> float:
        return float(random.exponential(float(self.mean_seconds)))


@called(examples={"mean_seconds": "0.1"})
@dataclasses.dataclass(frozen=True)
class LogNormal(Delay):
    """A log-normally distributed delay: now and then several times the mean.

    Use it for compute and network times of a shared machine: their logarithm is about normal::

        delay = exp(mu + sigma n),  n ~ N(0, 1),  mu = log(mean) - sigma^2 / 2

    Its standard deviation is mean * sqrt(exp(sigma^2) - 1), which is 1.31 times the mean at 1.

    Args:
        mean_seconds: the mean, in virtual seconds; at least 0.
        sigma: standard deviation of the logarithm; at least 0, at most 10.

    Raises:
        ValueError: for a wrong number, naming it.

    Example:

    >>> tf_dsgd.LogNormal(0.1, sigma=1.0)
    LogNormal(mean_seconds=0.1, sigma=1.0)
    """

    mean_seconds: float
    sigma: float = 1.0

    def __post_init__(self) -> None:
        _mean(self.mean_seconds)
        _number("sigma", self.sigma, 0.0, 10.0)

    def draw(self, random: np.random.Generator, now: float) -> float:
        normal = random.standard_normal()
        sigma = float(self.sigma)
        return float(self.mean_seconds) * math.exp(sigma * (normal - sigma / 2))


@called(examples={"mean_seconds": "0.1"})
@dataclasses.dataclass(frozen=True)
class Pareto(Delay):
    """A delay with a tail that falls as a power: rarely, but for certain, extremely long.

    Use it for the worst that networks do::

        P(delay > t) = (t_min / t)^a  for t >= t_min,  t_min = mean (a - 1) / a,  a = `shape`

    Its standard deviation is t_min sqrt(a / (a - 2)) / (a - 1), and infinite for a <= 2.

    Args:
        mean_seconds: the mean, in virtual seconds; at least 0.
        shape: the tail's exponent a; above 1, at most 1,000. The smaller, the heavier the tail.

    Raises:
        ValueError: for a wrong number, naming it.

    Example:

    >>> tf_dsgd.Pareto(0.1, shape=2.5)
    Pareto(mean_seconds=0.1, shape=2.5)
    """

    mean_seconds: float
    shape: float = 2.5

    def __post_init__(self) -> None:
        _mean(self.mean_seconds)
        if not 1 < real(self.shape) <= 1000:
            raise ValueError(
                "shape must be a number above 1, where the mean is finite, and at most 1000. "
                f"Received: {self.shape!r}."
            )

    def draw(self, random: np.random.Generator, now: float) -> float:
        shape = float(self.shape)
        least = float(self.mean_seconds) * (shape - 1.0) / shape
        return least * (1.0 + float(random.pareto(shape)))


@called(examples={"seconds": "0.1", "factor": "10"})
@dataclasses.dataclass(frozen=True)
class Straggler(Delay):
    """A delay that is several times as long, always or between two moments.

    Use it, in a list with one entry per worker, for a worker that is slow, or becomes so::

        delay = factor * seconds  for what begins at a time t with slow_from <= t < slow_until

    Args:
        seconds: the delay otherwise: a number of virtual seconds, or another delay.
        factor: how many times as long; at least 0, at most a million.
        slow_from: when the worker becomes slow, in virtual seconds since the strategy was made.
        slow_until: when it is over; above `slow_from`; infinity for never.

    Raises:
        ValueError: for a wrong number, naming it.

    Example: the last of three workers computes ten times as long from second 60 to second 90.

    >>> slow = tf_dsgd.Straggler(tf_dsgd.Exponential(0.1), 10, slow_from=60.0, slow_until=90.0)
    >>> cluster = tf_dsgd.SimulatedCluster(3, compute_seconds=[0.1, 0.1, slow])
    """

    seconds: Any
    factor: float
    slow_from: float = 0.0
    slow_until: float = math.inf

    def __post_init__(self) -> None:
        delay("seconds", self.seconds)
        _number("factor", self.factor, 0.0, 1e6)
        _number("slow_from", self.slow_from, 0.0, 1e12)
        if real(self.slow_until) != math.inf:
            _number("slow_until", self.slow_until, 0.0, 1e12)
        if not self.slow_until > self.slow_from:
            raise ValueError(
                f"slow_until must be above slow_from, {self.slow_from}. "
                f"Received: {self.slow_until!r}."
            )

    def draw(self, random: np.random.Generator, now: float) -> float:
        usual = delay("seconds", self.seconds).draw(random, now)
        return float(self.factor) * usual if self.slow_from <= now < self.slow_until else usual


def delays(name: str, value: Any, num_workers: int) -> list[Delay]:
    """One delay per worker of what a caller gave; an error names `name`."""
    if isinstance(value, np.ndarray) and value.ndim:
        value = list(value)
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        if len(value) != num_workers:
            raise ValueError(
                f"{name} has one entry per worker or is one number. Received: {len(value)} entries "
                f"for {num_workers} workers."
            )
        return [delay(f"{name}[{m}]", v) for m, v in enumerate(value)]
    return [delay(name, value)] * num_workers


def delay(name: str, value: Any) -> Delay:
    """A delay as it is, a number as a constant one."""
    return value if isinstance(value, Delay) else Constant(seconds(name, value))


def seconds(name: str, value: Any) -> float:
    """Checks a number of virtual seconds."""
    found = real(value)
    if not 0 <= found < 1e9:
        raise ValueError(
            f"{name} must be a number of virtual seconds of at least 0, or a delay: "
            "tf_dsgd.Exponential(mean), LogNormal, Pareto or Straggler. "
            f"Received: {value!r}."
        )
    return found


def bytes_per_second(value: Any) -> float | None:
    """Checks how fast a link is; None for one on which bytes take no time."""
    if value is not None and not 0 < real(value) < math.inf:
        raise ValueError(
            "network_bytes_per_second must be a finite number above 0 (12.5e6 is 100 Mbit/s), or "
            f"None for a network on which bytes take no time. Received: {value!r}."
        )
    return None if value is None else float(value)


def _mean(value: Any) -> None:
    if not 0 <= real(value) < 1e9:
        raise ValueError(
            "mean_seconds must be a number of virtual seconds of at least 0, below 1e9. "
            f"Received: {value!r}."
        )


def _number(name: str, value: Any, least: float, most: float) -> None:
    if not least <= real(value) <= most:
        raise ValueError(
            f"{name} must be a number from {least:g} to {most:g}. Received: {value!r}."
        )
