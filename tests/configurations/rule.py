"""A rule of what may be configured: wrong values are generated, right ones are listed."""

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any, NamedTuple

import hypothesis
import numpy as np
from hypothesis import strategies as st


class Refused(Exception):
    """What a program says when it does not start."""


class Rule(NamedTuple):
    """What a user may write, and what becomes of anything else."""

    sentence: str
    apply: Callable[[Any], Any]
    """Configures with a value."""
    wrong: st.SearchStrategy
    right: list | Callable[[], list]
    says: tuple[str, ...]
    """What a message has: the argument's name, and what is possible instead."""
    shown: Callable[[Any], str] = repr
    """What a message shows of the value."""
    error: Any = ValueError
    opens_devices: bool = False
    """Whether TensorFlow has to be used before the value can be judged."""
    few: bool = False
    """Whether there are only a few wrong values."""


def check_refused(rule):
    """Applies generated wrong values; gives how many distinct ones there were."""
    seen = set()

    @hypothesis.settings(
        max_examples=15,
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=[hypothesis.HealthCheck.too_slow],  # on a machine that is busy
    )
    @hypothesis.given(rule.wrong)
    def check(value):
        seen.add(repr(value))
        try:
            rule.apply(value)
        except rule.error as error:
            message = str(error)
        else:
            raise AssertionError(f"accepted: {value!r}")
        for words in (*rule.says, rule.shown(value)):
            assert words in message, (words, message)

    check()
    return len(seen)


# -- values that are wrong ------------------------------------------------------------------

WORDS = st.text(max_size=6) | st.sampled_from(["4", "0.5", "1e3", "auto", "None"])
SEQUENCES = st.lists(st.integers(0, 9), max_size=3) | st.sampled_from(
    [(1, 2), np.array([1, 2]), np.array([0.5, 1.5])]
)
NOT_NUMBERS = st.one_of(
    WORDS,
    st.binary(max_size=3),
    st.booleans() | st.booleans().map(np.bool_),
    st.complex_numbers(max_magnitude=9.0),
    st.dictionaries(st.integers(0, 9), st.integers(0, 9), max_size=2),
    st.sampled_from([object, int, Ellipsis, np.datetime64(3, "s")]),
)
FLOATS = (
    st.floats()
    | st.floats(width=32).map(np.float32)
    | st.sampled_from([1.0, 2.0, math.nan, math.inf, -math.inf, np.float64(3.0)])
)
HUGE = st.sampled_from([10**400, -(10**400)])


def nones(allowed):
    return st.nothing() if allowed else st.none()


def not_integers(least, below=1 << 31, none=False):
    """Whatever is no integer from `least` on; `none` is whether None is right."""
    return st.one_of(
        NOT_NUMBERS,
        SEQUENCES,
        nones(none),
        FLOATS,
        st.fractions(),
        HUGE,
        st.integers(max_value=least - 1),
        st.integers(-(2**31), least - 1).map(np.int64),
        st.integers(min_value=below),
    )


def not_reals(inside, none=False, sequences=False):
    """Whatever is no number that is `inside`; `sequences` is whether those are right."""
    numbers = FLOATS | st.integers(-(10**9), 10**9) | st.integers(-100, 100).map(np.int16)
    return st.one_of(
        NOT_NUMBERS,
        st.nothing() if sequences else SEQUENCES,
        nones(none),
        HUGE,
        numbers.filter(lambda value: not inside(float(value))),
    )


def not_words(*words, none=False):
    """Whatever is none of these words."""
    near = st.sampled_from(words).map(lambda word: word[:-1] or "x")
    anything = st.one_of(
        NOT_NUMBERS, SEQUENCES, nones(none), near, st.sampled_from(words).map(str.upper), FLOATS
    )
    return anything.filter(lambda value: not isinstance(value, str) or value not in words)


def not_bools(none=False):
    """Whatever is neither true nor false."""
    numbers = st.sampled_from([0, 1, 0.0, 1.0, np.int8(1), Fraction(1)])
    words = st.sampled_from(["True", "yes", "", b"1", [], [True], {}, np.array([True, False]), int])
    return numbers | words | nones(none) | WORDS


# -- and right ones -------------------------------------------------------------------------


def integers(least):
    return [least, least + 1, np.int64(least), np.uint8(least + 2), np.int32(least + 1)]


def reals(*values):
    return [*values, np.float32(values[0]), np.float64(values[-1]), Fraction(values[0])]


SECONDS = reals(0.5, 60, 1e8)


def within(least, most):
    return lambda value: least <= value <= most


def between(low, high):
    return lambda value: low < value < high


def below(least, high):
    return lambda value: least <= value < high
