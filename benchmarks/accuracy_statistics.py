"""What time_to_accuracy.py makes of its runs: rates, medians, intervals, ratios.

A run that did not reach the target is later than any that did: its seconds are infinite. So a
median is infinite where half of the runs or more did not get there, and no run is left out.
"""

import math
import statistics
from collections.abc import Callable, Sequence

MEASURES = ("seconds", "cpu_seconds", "epochs")
EXTENSIONS = 6
"""How many rates a search may add to its grid."""
COVERAGE = 0.9
"""An interval has at least this, where there are enough values."""


def score(runs: Sequence[dict], epochs: int) -> tuple[int, float]:
    """Of a rate, the less the better: runs that did not get there, and the mean epochs of all."""
    lost = sum(not run["reached"] for run in runs)
    return lost, statistics.fmean(run["epochs"] if run["reached"] else epochs for run in runs)


def best_rate(runs: Sequence[dict], epochs: int) -> float:
    """The rate of the best score; the smaller one of two that are equal."""
    rates = sorted({run["rate"] for run in runs})
    return min(rates, key=lambda rate: score([r for r in runs if r["rate"] == rate], epochs))


def limit(runs: Sequence[dict], epochs: int) -> int:
    """How many epochs the next rate gets: twice what the best took so far, where it got there."""
    if not runs:
        return epochs
    best = best_rate(runs, epochs)
    lost, mean = score([r for r in runs if r["rate"] == best], epochs)
    return epochs if lost else min(epochs, math.ceil(2 * mean))


def search(
    grid: Sequence[float],
    run: Callable[[float, int], list[dict]],
    epochs: int,
    found: list[dict],
) -> float:
    """The best rate, with the grid extended by factors of 2 until it is not at the edge.

    Args:
        grid: the rates that every contender tries.
        run: from a rate, and after how many epochs a run of it is given up, to its runs.
        epochs: after how many any run is given up.
        found: gets all runs.
    """
    if len(grid) < 2:
        raise ValueError(f"A grid needs two rates or more. Received: {list(grid)}.")
    for rate in grid:
        found.extend(run(rate, limit(found, epochs)))
    for _ in range(EXTENSIONS):
        rates = sorted({each["rate"] for each in found})
        best = best_rate(found, epochs)
        if best not in (rates[0], rates[-1]):
            break
        found.extend(run(best / 2 if best == rates[0] else best * 2, limit(found, epochs)))
    return best_rate(found, epochs)


def at_the_edge(runs: Sequence[dict], rate: float) -> bool:
    """Whether a search ended before it had seen a rate on both sides."""
    rates = [run["rate"] for run in runs]
    return rate in (min(rates), max(rates))


def value(run: dict, measure: str) -> float:
    return float(run[measure]) if run["reached"] else math.inf


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Two of the values, with the median of what they are drawn from between them, and how sure.

    The narrowest pair, as far from the least as from the largest, that has `COVERAGE`; or the least
    and the largest. By the binomial distribution, whatever the values' own: of 5, the least and the
    largest have the median between them with a probability of 1 - 2 / 32 = 0.94.
    """
    ordered, n = sorted(values), len(values)

    def coverage(k: int) -> float:
        return 1.0 - 2.0 * sum(math.comb(n, i) for i in range(k + 1)) / 2.0**n

    k = max((k for k in range((n + 1) // 2) if coverage(k) >= COVERAGE), default=0)
    return ordered[k], ordered[n - 1 - k], max(0.0, coverage(k))


def median(values: Sequence[float]) -> float:
    """Infinite where one of the middle ones is."""
    ordered, n = sorted(values), len(values)
    low, high = ordered[(n - 1) // 2], ordered[n // 2]
    return high if math.isinf(high) else (low + high) / 2.0


def ratios(ours: Sequence[dict], plain: Sequence[Sequence[dict]], measure: str) -> list[float]:
    """What plain `fit` took at its better setting, in what we took, by seed; 2 is twice as fast.

    0 where we did not get there. Seeds that plain `fit` did not do, or not get there, are left out.
    """
    found = []
    for run in ours:
        same = [value(r, measure) for runs in plain for r in runs if r["seed"] == run["seed"]]
        best = min(same, default=math.inf)
        if math.isfinite(best):
            found.append(best / value(run, measure))
    return found
