"""Checks of arguments: each error names the argument, what was received, and what is possible.

Of Python's and NumPy's numbers alike. A bool is no number, and nothing is rounded or read from
text. Nothing here imports TensorFlow.
"""

from __future__ import annotations

import difflib
import inspect
import math
import numbers
import operator
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

# Python cannot wait much longer (threading.TIMEOUT_MAX); it is 30 years.
_MOST_SECONDS = 1e9


def whole(value: Any) -> int | None:
    """The integer that `value` is; None if it is none."""
    if isinstance(value, (bool, np.bool_)):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def real(value: Any) -> float:
    """The number that `value` is; NaN, which is in no range, if it is none."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return math.nan
    try:
        return float(value)
    except OverflowError:
        return math.nan


def integer(name: str, value: Any, least: int, alternative: str = "", below: int = 1 << 31) -> int:
    """An integer of at least `least` that fits in 31 bits, or is below another limit."""
    found = whole(value)
    if found is None or not least <= found < below:
        limit = "2**31" if below == 1 << 31 else f"{below:,}"
        raise ValueError(
            f"{name} must be an integer of at least {least}{alternative}, below {limit}. "
            f"Received: {value!r}."
        )
    return found


def positive_int(name: str, value: Any, alternative: str = "") -> int:
    """A count."""
    return integer(name, value, 1, f", {alternative}" if alternative else "")


def positive_seconds(name: str, value: Any) -> float:
    """A time to wait, or between two events."""
    found = real(value)
    if not 0 < found < _MOST_SECONDS:
        raise ValueError(
            f"{name} must be a number of seconds above 0 and below {_MOST_SECONDS:g}. "
            f"Received: {value!r}."
        )
    return found


def truth(name: str, value: Any, alternative: str = "") -> bool:
    """A switch."""
    if not isinstance(value, (bool, np.bool_)):
        words = f"True, False or {alternative}" if alternative else "True or False"
        raise ValueError(f"{name} must be {words}. Received: {value!r}.")
    return bool(value)


def one_of(name: str, value: Any, words: Sequence[str], alternative: str = "") -> str:
    """One of some words."""
    if not isinstance(value, str) or value not in words:
        quoted = [f'"{word}"' for word in words]
        end = alternative or quoted.pop()
        raise ValueError(f"{name} must be {', '.join(quoted)} or {end}. Received: {value!r}.")
    return value


def entries(name: str, value: Any, what: str) -> list[Any]:
    """The entries of a list, or of whatever gives them one by one; not the letters of a text."""
    try:
        found = None if isinstance(value, (str, bytes)) else iter(value)
    except TypeError:
        found = None
    if found is None:
        raise ValueError(f"{name} must be {what}. Received: {value!r}.")
    return list(found)


def folder(name: str, value: Any, alternative: str = '"." for the current one') -> str:
    """The path of a folder, which need not exist."""
    path = os.fspath(value) if isinstance(value, (str, os.PathLike)) else None
    if not isinstance(path, str) or not path:
        raise (ValueError if path == "" else TypeError)(
            f"{name} must be the path of a folder, or {alternative}. Received: {value!r}."
        )
    if Path(path).exists() and not Path(path).is_dir():
        raise ValueError(f"{name} must be a folder, and is a file. Received: {value!r}.")
    return path


def period(every: Callable[[int], Any], step: int) -> int:
    """What `average_every`, given as a function of the steps, says after `step` steps."""
    try:
        steps = every(step)
    except Exception as error:
        raise ValueError(
            "average_every must be an integer of at least 1, or a function from the number of "
            f"steps done to that until the next average. Received: {every!r}, which fails for step "
            f"{step}: {type(error).__name__}: {error}"
        ) from error
    found = whole(steps)
    if found is None or not 1 <= found < 1 << 31:
        raise ValueError(
            "average_every must give a number of mini-batches of at least 1, below 2**31. "
            f"Received: {steps!r} for step {step}."
        )
    return found


def call(
    made: Callable[..., Any],
    given: Sequence[Any],
    named: Mapping[str, Any],
    *,
    elsewhere: Mapping[str, str] | None = None,
    examples: Mapping[str, str] | None = None,
) -> None:
    """Whether what a class is called with are its arguments, before Python says it without a hint.

    Args:
        made: the class.
        given: arguments by their place.
        named: arguments by their names.
        elsewhere: of arguments that it does not have and others may: what to write instead.
        examples: of arguments that it needs: a value.

    Raises:
        TypeError: if they are not.
    """
    name, signature = made.__name__, inspect.signature(made)
    taken = signature.parameters
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in taken.values()):
        return  # whoever is behind it knows
    its = f"Its arguments: {', '.join(taken)}."
    for wrong in named.keys() - taken.keys():
        if wrong in (elsewhere or {}):
            raise TypeError(f"{name} has no argument {wrong!r}. {(elsewhere or {})[wrong]}")
        near = difflib.get_close_matches(wrong, taken, n=1, cutoff=0.75)
        near = near or [full for full in taken if full.startswith(f"{wrong}_")]
        hint = f": did you mean {near[0]}?" if near else f". {its}"
        raise TypeError(f"{name} has no argument {wrong!r}{hint}")
    by_place = [p for p in taken.values() if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    if len(given) > len(by_place) and len(by_place) < len(taken):
        first = list(taken)[len(by_place)]
        raise TypeError(
            f"{name} takes {len(by_place)} argument(s) by their place "
            f"({', '.join(p.name for p in by_place)}) and the others by their names, as "
            f"{first}={given[len(by_place)]!r}. {its}"
        )
    got = {*named, *(p.name for p in by_place[: len(given)])}
    for needed, parameter in taken.items():
        if parameter.default is inspect.Parameter.empty and needed not in got:
            as_in = (examples or {}).get(needed)
            shown = f", as {needed}={as_in}" if as_in else ""
            raise TypeError(f"{name} needs the argument {needed!r}{shown}. {its}")
