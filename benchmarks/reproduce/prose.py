"""Single figures of the studies, for the words between their tables, for `benchmarks/figures.py`.

Between `<!--figure: NAME-->` and `<!--end-->` stands what a name of these says:

    difference STUDY: CONDITION less CONDITION    +1.04 (+0.75 to +1.33)
    points STUDY: CONDITION less CONDITION        1.0 (0.7 to 1.3): no plus, and a digit less
    ratio STUDY: CONDITION by CONDITION           1.47 (1.36 to 1.57)
    times STUDY: CONDITION by CONDITION           147: a whole number, without an interval
    value STUDY: CONDITION                        a mean over seeds
    rate STUDY: CONDITION                         the one that all seeds together choose
    sure STUDY: CLAIM                             3 of 8: comparisons that came out as expected
    milliseconds STUDY: CONDITION less CONDITION, of N   4.4 (3.4 to 5.4): an Nth of the seconds
    room STUDY: CONDITION, at most X              16: the largest rate by the least, means up to X
    rates STUDY                                   7 to 9, all of them whole powers of 2

A condition is given by some of its fields, `workers=4; method=EASGD`, and must be the only one that
has them. Differences, ratios and values are of the measure that chooses the rates, or of another
after the study, `ratio averaging_seconds, cpu_seconds: ...`, or of one that chooses them in its
place, `points delay_tolerance, held_out by itself: ...`; at the rates that the other seeds choose,
or, with `, 2^K` at the end, at this one. Intervals are those of `evidence.compared`.
"""

import dataclasses
import math
import re
from collections.abc import Mapping
from typing import Any

import evidence
import pages

_STUDY = r"(?P<study>\w+)"
_MEASURED = rf"{_STUDY}(?:, (?P<measure>\w+)(?P<itself> by itself)?)?"
_AT = r"(?:, 2\^(?P<exponent>-?\d+))?"
_FORMS = {
    "difference": rf"{_MEASURED}: (?P<a>.+?) less (?P<b>.+?){_AT}",
    "points": rf"{_MEASURED}: (?P<a>.+?) less (?P<b>.+?){_AT}",
    "ratio": rf"{_MEASURED}: (?P<a>.+?) by (?P<b>.+?){_AT}",
    "times": rf"{_MEASURED}: (?P<a>.+?) by (?P<b>.+?){_AT}",
    "value": rf"{_MEASURED}: (?P<a>.+?){_AT}",
    "rate": rf"{_STUDY}: (?P<a>.+?)",
    "sure": rf"{_STUDY}: (?P<claim>.+?)",
    "milliseconds": rf"{_MEASURED}: (?P<a>.+?) less (?P<b>.+?), of (?P<parts>\d+)",
    "room": rf"{_STUDY}: (?P<a>.+?), at most (?P<most>[\d.]+)",
    "rates": _STUDY,
}
KINDS = tuple(_FORMS)
"""The first words of all names."""


def condition(results: evidence.Results, text: str) -> Mapping[str, Any]:
    """The one that has these fields."""
    fields = text.split("; ")
    if not all("=" in field for field in fields):
        raise ValueError(f"{text!r} are not fields of a condition, such as 'workers=4; period=1'.")
    given = dict(field.split("=", 1) for field in fields)
    found = [c for c in results.conditions() if all(str(c.get(k)) == v for k, v in given.items())]
    if len(found) != 1:
        raise ValueError(f"{text!r} are fields of {len(found)} conditions, not of one: {found}")
    return found[0]


def at_rate(results: evidence.Results, rate: float) -> evidence.Results:
    """Only the runs at this rate, so that there is no other to choose."""
    runs = [run for run in results.runs if math.isclose(run["rate"], rate)]
    return dataclasses.replace(results, runs=runs)


def power(rate: float) -> str:
    """A rate as a power of 2; in HTML, as GitHub wants space around a formula's dollars."""
    return f"2<sup>{math.log2(rate):.2g}</sup>"


def plain(outcome: evidence.Outcome, digits: int, unit: float = 1.0) -> str:
    """A difference, or how many times more the first is, with its interval, without plus signs."""
    ends = (outcome.mean, outcome.low, outcome.high)
    values = map(math.exp, ends) if outcome.cell.ratio else (end / unit for end in ends)
    return "{} ({} to {})".format(*(f"{value:.{digits}f}" for value in values))


def sure(study: str, claim: str) -> str:
    """Of how many of a claim's comparisons the runs say for sure what it expects."""
    found = [each for each in pages.claims_of(pages.known(study)) if each.claim.name == claim]
    if len(found) != 1:
        raise ValueError(f"{study} has {len(found)} claims named {claim!r}, not one.")
    words = [word for _, word in found[0].said]
    return f"{words.count(evidence.YES)} of {len(words)}"


def room(results: evidence.Results, found: Mapping[str, Any], most: float) -> str:
    """How many times the least rate the largest is, of those in a row whose mean is at most so."""
    rates = [setting[-1] for setting in results.settings(found)]
    good = [mean <= most for mean in results.values(found, results.chosen_by).mean(1)]
    inside = [rate for rate, each in zip(rates, good, strict=True) if each]
    if not inside or not all(good[rates.index(inside[0]) : rates.index(inside[-1]) + 1]):
        raise ValueError(f"No rates in a row at which {dict(found)} has at most {most:g}.")
    return f"{inside[-1] / inside[0]:.2g}"


def rates(results: evidence.Results) -> str:
    """How many the conditions of a study have, of those that have a choice; and which."""
    counts = sorted({len(results.settings(each)) for each in results.conditions()} - {1})
    whole = all(math.log2(run["rate"]).is_integer() for run in results.runs)
    which = "all of them whole powers of 2" if whole else "half octaves beside the best among them"
    return f"{' to '.join(map(str, dict.fromkeys((counts[0], counts[-1]))))}, {which}"


def figure(name: str) -> str:
    """What stands for a name, with as many digits as the study's first claim has."""
    kind, _, rest = name.partition(" ")
    parts = re.fullmatch(_FORMS[kind], rest) if kind in _FORMS else None
    if parts is None:
        raise ValueError(f"No figure has such a name: {name!r}. See {__name__}.py.")
    study = parts["study"]
    if kind == "sure":
        return sure(study, parts["claim"])
    results = pages.results_of(pages.known(study))
    if kind == "rates":
        return rates(results)
    a = condition(results, parts["a"])
    if kind == "rate":
        return power(results.best(a)[-1])
    if kind == "room":
        return room(results, a, float(parts["most"]))
    measure = parts["measure"] or results.chosen_by
    if measure not in results.measures:
        raise ValueError(f"{study} measures {', '.join(results.measures)}, and no {measure!r}.")
    b = condition(results, parts["b"]) if kind != "value" else 0.0
    if parts.groupdict().get("exponent"):
        results = at_rate(results, 2.0 ** int(parts["exponent"]))
    like = pages.claims_about(study)[0]
    cell = evidence.Cell("", a, b, "<", measure, by_rank=like.cells[0].by_rank)
    chosen_by = measure if parts["itself"] else None
    cell = dataclasses.replace(cell, ratio=kind in ("ratio", "times"), chosen_by=chosen_by)
    outcome = evidence.compared(results, cell)
    if outcome is None:
        raise ValueError(f"No seed has run all of {name!r}.")
    if kind == "milliseconds":
        return plain(outcome, 1, int(parts["parts"]) / 1e3)
    if kind == "times":
        return f"{math.exp(outcome.mean):.0f}"
    digits = like.digits
    if kind == "value":
        return f"{outcome.mean:.{digits}f}"
    if kind == "difference":
        return evidence.shown(outcome, digits)
    return plain(outcome, digits - 1 if kind == "points" else digits)
