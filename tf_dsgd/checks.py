"""Checks of arguments: each error names the argument, what was received, and what is possible.

Of Python's and NumPy's numbers alike. A bool is no number, and nothing is rounded or read from
text. Nothing here imports TensorFlow.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import math
import numbers
import operator
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

# Python cannot wait much longer (threading.TIMEOUT_MAX); it is 30 years.
_MOST_SECONDS = 1e9

_Made = TypeVar("_Made", bound=Callable[..., Any])


def whole(value: Any) -> int | None:
    """The integer that `value` is; None if it is none."""
    if isinstance(value, (bool, np.bool_)):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def named(value: Any) -> str:
    """What a user calls a function or an object of Keras's, whose `repr` is an address."""
    return str(getattr(value, "__name__", type(value).__name__))


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
    hands_on: bool = False,
    elsewhere: Mapping[str, str] | None = None,
    examples: Mapping[str, str] | None = None,
) -> None:
    """Whether what is called takes these arguments, before Python says it without a hint.

    Args:
        made: a class, or a function.
        given: arguments by their place.
        named: arguments by their names.
        hands_on: what a class takes by `**` are arguments of the classes it is made from.
        elsewhere: of arguments that it does not have and others may: what to write instead.
        examples: of arguments that it needs: a value.

    Raises:
        TypeError: if they are not.
    """
    name, signature = made.__name__, inspect.signature(made)
    kinds = inspect.Parameter
    open_ended = any(p.kind is kinds.VAR_KEYWORD for p in signature.parameters.values())
    if open_ended and not hands_on:
        return  # whoever is behind it knows
    own = {n: p for n, p in signature.parameters.items() if p.kind is not kinds.VAR_KEYWORD}
    elsewhere, taken = elsewhere or {}, list(own)
    if open_ended:
        taken += [n for n in _handed_on(made) if n not in own and n not in elsewhere]
    its = f"Its arguments: {', '.join(taken)}." if taken else "It takes none."
    for wrong in named.keys() - taken:
        received = f"Received: {wrong}={named[wrong]!r}."
        if wrong in elsewhere:
            raise TypeError(f"{name} has no argument {wrong!r}. {elsewhere[wrong]} {received}")
        near = difflib.get_close_matches(wrong, taken, n=1, cutoff=0.75)
        near = near or [full for full in taken if full.startswith(f"{wrong}_")]
        hint = f": did you mean {near[0]}?" if near else f". {its}"
        raise TypeError(f"{name} has no argument {wrong!r}{hint} {received}")
    by_place = [p.name for p in own.values() if p.kind is kinds.POSITIONAL_OR_KEYWORD]
    if len(given) > len(by_place):
        extra = given[len(by_place)]
        first = next((n for n in taken if n not in by_place), None)
        places = f"{len(by_place)} argument(s) by their place ({', '.join(by_place)})"
        others = f" and the others by their names, as {first}={extra!r}" if first else ""
        takes = f"{places}{others}. {its}" if taken else "no arguments."
        raise TypeError(f"{name} takes {takes} Received: {extra!r}.")
    for again in named.keys() & by_place[: len(given)]:
        raise TypeError(
            f"{name} was given {again!r} twice, by its place and by its name. "
            f"Received: {given[by_place.index(again)]!r} and {again}={named[again]!r}."
        )
    got = {*named, *by_place[: len(given)]}
    for needed, parameter in own.items():
        if parameter.default is kinds.empty and needed not in got:
            as_in = (examples or {}).get(needed)
            shown = f", as {needed}={as_in}" if as_in else ""
            raise TypeError(f"{name} needs the argument {needed!r}{shown}. {its}")


def _handed_on(made: Any) -> list[str]:
    """The arguments of the classes that `made` is made from, as far as `**` leads."""
    found = []
    for base in made.__mro__[1:]:
        if "__init__" not in vars(base):
            continue
        parameters = [*inspect.signature(base.__init__).parameters.values()][1:]
        named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        found += [p.name for p in parameters if p.kind in named]
        if all(p.kind is not inspect.Parameter.VAR_KEYWORD for p in parameters):
            break
    return found


def called(
    *,
    hands_on: bool = False,
    elsewhere: Mapping[str, str] | None = None,
    examples: Mapping[str, str] | None = None,
) -> Callable[[_Made], _Made]:
    """Decorates a public class or function: `call` looks at what it is called with.

    Of a class this is what its `__init__` is called with, also by a subclass.
    """

    def decorate(made: Any) -> Any:
        is_class = isinstance(made, type)
        function = made.__init__ if is_class else made

        @functools.wraps(function)
        def checked(*args: Any, **named: Any) -> Any:
            given = args[is_class:]  # without `self`
            call(made, given, named, hands_on=hands_on, elsewhere=elsewhere, examples=examples)
            return function(*args, **named)

        if not is_class:
            return checked
        made.__init__ = checked
        return made

    return decorate
