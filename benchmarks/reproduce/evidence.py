"""What runs say of a claim: rates chosen by other seeds, paired differences, Holm's correction.

Means are tested by t; seconds of a machine, some turns of which something has disturbed, by ranks.

Nothing here trains, or needs TensorFlow: `driver.py` makes the runs, `claims.py` has the claims.
"""

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from scipy import stats

LEVEL = 0.95
"""Of the intervals, and 1 less what p is compared with after Holm's correction."""


def key(condition: Mapping[str, Any]) -> str:
    """Of a condition in a dict; the order of its fields says nothing."""
    return json.dumps(dict(condition), sort_keys=True)


def packed(runs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Runs as a file has them: those of a condition and a seed together, at all rates."""
    groups: dict[tuple[str, int], dict[str, Any]] = {}
    for run in runs:
        empty = {"rates": [], "values": {name: [] for name in run["values"]}}
        new = {"condition": run["condition"], "seed": run["seed"], **empty}
        group = groups.setdefault((key(run["condition"]), run["seed"]), new)
        group["rates"].append(run["rate"])
        for name, value in run["values"].items():
            group["values"][name].append(value)
    return list(groups.values())


def unpacked(groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Runs one by one, each with `condition`, `seed`, `rate` and `values`."""
    return [
        {
            "condition": group["condition"],
            "seed": group["seed"],
            "rate": rate,
            "values": {name: values[k] for name, values in group["values"].items()},
        }
        for group in groups
        for k, rate in enumerate(group["rates"])
    ]


@dataclasses.dataclass
class Results:
    """What a study's runs gave.

    A condition that names a tuned field has that value alone; one that does not, the choice.

    Args:
        runs: each with `condition`, `seed`, `rate` and `values`, by the name of a measure.
        tuned: fields of a condition that are chosen as its rate is, such as a momentum.
        chosen_by: the measure by which they are, the less the better.
    """

    runs: Sequence[Mapping[str, Any]]
    tuned: Sequence[str]
    chosen_by: str

    def __post_init__(self) -> None:
        self._found: dict[str, dict[tuple, dict[int, Mapping]]] = {}
        for run in self.runs:
            setting = (*(run["condition"].get(name) for name in self.tuned), run["rate"])
            pool = self._found.setdefault(key(self.untuned(run["condition"])), {})
            pool.setdefault(setting, {})[run["seed"]] = run["values"]

    def untuned(self, condition: Mapping[str, Any]) -> dict[str, Any]:
        """Without what is chosen."""
        return {k: v for k, v in condition.items() if k not in self.tuned}

    @property
    def measures(self) -> list[str]:
        """What each run gave."""
        return list(self.runs[0]["values"])

    def conditions(self) -> list[dict[str, Any]]:
        """In the order of the runs."""
        return [json.loads(found) for found in self._found]

    def _pool(self, condition: Mapping[str, Any]) -> dict[tuple, dict[int, Mapping]]:
        """By setting and seed what was measured."""
        pool = self._found.get(key(self.untuned(condition)), {})
        given = {k: condition[name] for k, name in enumerate(self.tuned) if name in condition}
        return {s: v for s, v in pool.items() if all(s[k] == given[k] for k in given)}

    def settings(self, condition: Mapping[str, Any]) -> list[tuple]:
        """What can be chosen: values of the tuned fields, and the rate; in ascending order."""
        return sorted(self._pool(condition))

    def seeds(self, condition: Mapping[str, Any]) -> list[int]:
        """Those that ran at every setting."""
        ran = [set(by_seed) for by_seed in self._pool(condition).values()]
        return sorted(set.intersection(*ran)) if ran else []

    def values(
        self, condition: Mapping[str, Any], measure: str, seeds: Sequence[int] | None = None
    ) -> np.ndarray:
        """`[settings, seeds]`."""
        pool = self._pool(condition)
        seeds = self.seeds(condition) if seeds is None else seeds
        return np.array(
            [[pool[s][seed][measure] for seed in seeds] for s in self.settings(condition)]
        )

    def choices(
        self, condition: Mapping[str, Any], seeds: Sequence[int], chosen_by: str | None = None
    ) -> list[tuple]:
        """For each seed the setting with the least mean over the *other* seeds."""
        settings = self.settings(condition)
        by = self.values(condition, chosen_by or self.chosen_by, seeds)
        if len(seeds) < 2:
            return [settings[int(np.argmin(np.round(by.mean(1), 9)))]] * len(seeds)
        others = (by.sum(1, keepdims=True) - by) / (len(seeds) - 1)
        # A mean of the same numbers in another order is the same: of two, the first, smaller rate.
        return [settings[k] for k in np.argmin(np.round(others, 9), 0)]

    def best(self, condition: Mapping[str, Any]) -> tuple:
        """The setting that all seeds together choose."""
        by = self.values(condition, self.chosen_by)
        return self.settings(condition)[int(np.argmin(np.round(by.mean(1), 9)))]

    def edges(self, condition: Mapping[str, Any]) -> tuple[bool, bool]:
        """Whether a choice is the least rate, or the largest, of those with its tuned fields."""
        low = high = False
        settings = self.settings(condition)
        for *tuned, rate in {*self.choices(condition, self.seeds(condition)), self.best(condition)}:
            rates = [s[-1] for s in settings if list(s[:-1]) == tuned]
            if len(rates) == 1:
                continue  # there is none to choose
            low, high = low or rate == min(rates), high or rate == max(rates)
        return low, high

    def judged(
        self,
        condition: Mapping[str, Any],
        measure: str,
        seeds: Sequence[int],
        at: Mapping[str, Any] | None = None,
        chosen_by: str | None = None,
    ) -> np.ndarray:
        """Each seed's value at the setting that the others choose, of this condition or of `at`."""
        pool = self._pool(condition)
        chosen = self.choices(at or condition, seeds, chosen_by)
        return np.array([pool[s][seed][measure] for s, seed in zip(chosen, seeds, strict=True)])


@dataclasses.dataclass(frozen=True)
class Cell:
    """One comparison: `a` less `b`.

    Args:
        title: what is compared.
        a: a condition.
        b: another, or a number.
        expected: "<"; ">", by more than the `margin`; "=", within it; "<=", at most so much more.
        measure: of both; by default the one that chooses the rates.
        chosen_by: the measure that chooses them here, in place of the study's.
        beside: two more conditions, whose difference is subtracted.
        at: the condition whose choice of a rate all take, in place of their own.
        margin: not of a "<".
        ratio: compare logarithms, and show b / a: how many times less `a` is.
        by_rank: by Wilcoxon's signed-rank test, and Hodges and Lehmann's median in place of a mean.
    """

    title: str
    a: Mapping[str, Any]
    b: Mapping[str, Any] | float
    expected: str
    measure: str | None = None
    beside: tuple[Mapping[str, Any], Mapping[str, Any]] | None = None
    at: Mapping[str, Any] | None = None
    margin: float = 0.0
    ratio: bool = False
    chosen_by: str | None = None
    by_rank: bool = False

    @property
    def sides(self) -> tuple[Mapping[str, Any] | float, ...]:
        """All that is measured."""
        return self.a, self.b, *(self.beside or ())


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What the runs say of a cell; `p` is of what was expected, `against` of the opposite.

    `mean` is a median where it is compared by rank.
    """

    cell: Cell
    seeds: int
    mean: float
    low: float
    high: float
    p: float
    against: float


def one_sided(values: np.ndarray, above: float) -> float:
    """The p of a t-test that the mean is not above a number."""
    n, mean = len(values), float(np.mean(values))
    error = float(np.std(values, ddof=1)) / math.sqrt(n) if n > 1 else math.nan
    if not error > 0:
        return math.nan if n < 2 else float(mean <= above)
    return float(stats.t.sf((mean - above) / error, n - 1))


def _rank_sums(n: int) -> np.ndarray:
    """Of n values the probability of each sum of signed ranks, 0 to n (n + 1) / 2."""
    found = np.ones(1)
    for rank in range(1, n + 1):
        more = np.zeros(rank + 1)
        more[0] = more[-1] = 0.5
        found = np.convolve(found, more)
    return found


def _walsh(values: np.ndarray) -> np.ndarray:
    """Means of all pairs, each value with itself, too; in ascending order."""
    first, second = np.triu_indices(len(values))
    return np.sort((values[first] + values[second]) / 2)


def one_sided_by_rank(values: np.ndarray, above: float) -> float:
    """The p of Wilcoxon's signed-rank test, exact, that the median is not above a number."""
    if len(values) < 2:
        return math.nan
    found = int(np.sum(_walsh(values) > above))
    return float(min(1.0, _rank_sums(len(values))[found:].sum()))


def interval_by_rank(values: np.ndarray) -> tuple[float, float, float]:
    """Hodges and Lehmann's median, and its interval; of few values all that there are."""
    means = _walsh(values)
    outside = np.cumsum(_rank_sums(len(values))) <= (1 - LEVEL) / 2
    k = max(int(np.sum(outside)), 1)
    return float(np.median(means)), float(means[k - 1]), float(means[-k])


def interval(values: np.ndarray) -> tuple[float, float, float]:
    """Mean and t-interval; of one value itself."""
    mean, n = float(np.mean(values)), len(values)
    if n < 2:
        return mean, mean, mean
    half = stats.t.ppf((1 + LEVEL) / 2, n - 1) * float(np.std(values, ddof=1)) / math.sqrt(n)
    return mean, mean - half, mean + half


def compared(results: Results, cell: Cell) -> Outcome | None:
    """A cell's differences, seed by seed; None where no seed has run all of it."""
    measure = cell.measure or results.chosen_by
    conditions = [side for side in [*cell.sides, cell.at] if isinstance(side, Mapping)]
    seeds = sorted(set.intersection(*(set(results.seeds(c)) for c in conditions)))
    if not seeds:
        return None

    def values(side: Mapping[str, Any] | float) -> np.ndarray:
        if not isinstance(side, Mapping):
            return np.full(len(seeds), float(side))
        found = results.judged(side, measure, seeds, cell.at, cell.chosen_by)
        return np.log(found) if cell.ratio else found

    found = [values(side) for side in cell.sides]
    difference = found[0] - found[1] - (found[2] - found[3] if cell.beside else 0.0)
    ends = interval_by_rank(difference) if cell.by_rank else interval(difference)
    return Outcome(cell, len(seeds), *ends, *_tests(difference, cell))


def _tests(difference: np.ndarray, cell: Cell) -> tuple[float, float]:
    """The p of what was expected and of its opposite."""
    test = one_sided_by_rank if cell.by_rank else one_sided
    above, below = test(difference, cell.margin), test(-difference, cell.margin)
    if cell.expected == ">":
        return above, test(-difference, -cell.margin)
    if cell.expected == "<":
        return below, above
    if cell.expected == "<=":
        return test(-difference, -cell.margin), above
    # Two one-sided tests: within the margin on both sides. Outside it is on one, as the interval.
    inside = max(test(difference, -cell.margin), test(-difference, -cell.margin))
    return inside, min(above, below)


def holm(ps: Sequence[float]) -> list[float]:
    """Holm's (1979) corrected p of each; one that is not a number stays so, and counts."""
    order = sorted(range(len(ps)), key=lambda k: (math.isnan(ps[k]), ps[k]))
    corrected, largest = [math.nan] * len(ps), 0.0
    for place, k in enumerate(order):
        if not math.isnan(ps[k]):
            largest = max(largest, min(1.0, (len(ps) - place) * ps[k]))
            corrected[k] = largest
    return corrected


YES, NO, UNKNOWN = "as expected", "the opposite", "cannot tell"


def said(outcomes: Sequence[Outcome]) -> list[tuple[float, str]]:
    """Of each cell the corrected p of its word, or of what was expected, and the word."""
    expected = holm([o.p for o in outcomes])
    against = holm([o.against for o in outcomes])
    level = (1 - LEVEL) / 2  # on each side, as the intervals have it
    return [
        (p, YES) if p < level else (q, NO) if q < level else (p, UNKNOWN)
        for p, q in zip(expected, against, strict=True)
    ]


def verdict(words: Sequence[str], some: bool = False) -> str:
    """Of a claim, from what its cells say: partly, where no more say the opposite.

    Of one that says it of `some` cell, one is enough, and all must say the opposite.
    """
    if some:
        if YES in words:
            return "reproduced"
        return "not reproduced" if set(words) == {NO} else "cannot tell"
    if all(word == YES for word in words):
        return "reproduced"
    if words.count(YES) > 0 and words.count(YES) >= words.count(NO):
        return "partly"
    return "not reproduced" if any(word == NO for word in words) else "cannot tell"


@dataclasses.dataclass(frozen=True)
class Claim:
    """What a paper says, as cells of one study.

    Args:
        study: whose results.
        name: in a few words.
        source: the paper, as the references name it, or "" for nobody's.
        expected: what it says, in words.
        cells: what is compared.
        digits: of differences, after the point.
        some: whether it is said of one cell at least, in place of all.
        computed: whether nothing in it is drawn, so that no test says anything.
    """

    study: str
    name: str
    source: str
    expected: str
    cells: tuple[Cell, ...]
    digits: int = 2
    some: bool = False
    computed: bool = False


def shown(outcome: Outcome, digits: int) -> str:
    """The difference, or how many times less, with its interval."""
    ends = (outcome.mean, outcome.low, outcome.high)
    if outcome.cell.ratio:
        middle, high, low = (math.exp(-value) for value in ends)
        return f"{middle:.{digits}f} times ({low:.{digits}f} to {high:.{digits}f})"
    return "{} ({} to {})".format(*(f"{value:+.{digits}f}" for value in ends))


def p_text(p: float) -> str:
    if math.isnan(p):
        return ""
    digits = 4 if p < 0.01 else 3 if p < 0.1 else 2
    return "< 0.0001" if p < 1e-4 else f"{p:.{digits}f}"
