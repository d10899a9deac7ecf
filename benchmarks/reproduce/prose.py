"""Single figures of the studies, for the words between their tables, for `benchmarks/figures.py`.

Between `<!--figure: NAME-->` and `<!--end-->` stands what a name of these says:

    difference STUDY: CONDITION less CONDITION
    value STUDY: CONDITION
    value STUDY: CONDITION, 2^K

A condition is given by some of its fields, `workers=4; method=EASGD`, and must be the only one that
has them. A difference is that of `evidence.compared`, with its interval, and a value a mean over
seeds, of the measure that chooses the rates, at the rate that the others choose, or at 2^K.
"""

import math
import re
from collections.abc import Mapping
from typing import Any

import evidence
import pages
from claims import CLAIMS

_NAME = re.compile(r"(difference|value) (\w+): (.+?)(?: less (.+?))?(?:, 2\^(-?\d+))?")


def condition(results: evidence.Results, text: str) -> Mapping[str, Any]:
    """The one that has these fields."""
    given = dict(part.split("=", 1) for part in text.split("; "))
    found = [c for c in results.conditions() if all(str(c.get(k)) == v for k, v in given.items())]
    if len(found) != 1:
        raise ValueError(f"{text!r} are fields of {len(found)} conditions, not of one: {found}")
    return found[0]


def figure(name: str) -> str:
    """What stands for a name, with as many digits as the study's first claim has."""
    parts = _NAME.fullmatch(name)
    if parts is None:
        raise ValueError(f"No figure has such a name: {name!r}. See {__name__}.py.")
    kind, study, first, second, exponent = parts.groups()
    results = pages.results_of(pages.known(study))
    digits = next(claim.digits for claim in CLAIMS if claim.study == study)
    a = condition(results, first)
    if kind == "difference":
        b = condition(results, second)
        outcome = evidence.compared(results, evidence.Cell("", a, b, "<"))
        if outcome is None:
            raise ValueError(f"No seed has run both sides of {name!r}.")
        return evidence.shown(outcome, digits)
    seeds = results.seeds(a)
    if exponent is None:
        return f"{results.judged(a, results.chosen_by, seeds).mean():.{digits}f}"
    settings = [s for s in results.settings(a) if math.isclose(s[-1], 2.0 ** int(exponent))]
    place = results.settings(a).index(settings[0])
    return f"{results.values(a, results.chosen_by, seeds)[place].mean():.{digits}f}"
