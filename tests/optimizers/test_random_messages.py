"""Any sequence of fetches and messages leaves what the twin in NumPy has."""

import functools

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.optimizers.bench import Bench
from tests.optimizers.rules import RULES, WORKERS

pytestmark = pytest.mark.medium

SHAPE, TABLE = (2, 2), (30, 2)

worker = st.integers(0, WORKERS - 1)
quarter = st.integers(-8, 8).map(lambda n: n / 4)


def values(*shape):
    return st.lists(quarter, min_size=int(np.prod(shape)), max_size=int(np.prod(shape))).map(
        lambda flat: np.reshape(flat, shape)
    )


row = st.one_of(st.integers(0, 5), st.integers(0, TABLE[0] - 1))  # some rows often, some seldom
rows_and_values = st.lists(row, min_size=1, max_size=6).flatmap(
    lambda rows: st.tuples(st.just(rows), values(len(rows), TABLE[1]))
)


def events(gradient):
    return st.lists(
        st.one_of(
            st.tuples(st.just("fetch"), worker, st.none()),
            st.tuples(st.just("push"), worker, gradient),
            st.tuples(st.just("push"), worker, gradient),
            st.tuples(st.just("no_delay"), st.none(), gradient),
        ),
        min_size=3,
        max_size=25,
    )


@functools.cache
def bench(rule, sparse):
    return Bench(RULES[rule][0], WORKERS, TABLE if sparse else SHAPE, sparse)


def start(shape):
    return np.linspace(-1.0, 1.0, int(np.prod(shape))).reshape(shape)


def check(ours, twin):
    np.testing.assert_allclose(ours.weight(), twin.w, rtol=2e-5, atol=2e-5)
    slots = ours.slots()
    assert len(slots) == len(twin.slots())
    for ours_slot, theirs in zip(slots, twin.slots(), strict=True):
        np.testing.assert_allclose(ours_slot, theirs, rtol=2e-5, atol=2e-5)


SETTINGS = settings(
    max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)


@pytest.mark.few(3)
@pytest.mark.parametrize("rule", RULES)
@SETTINGS
@given(sequence=events(values(*SHAPE)))
def test_dense(rule, sequence):
    ours, twin = bench(rule, sparse=False), RULES[rule][1](start(SHAPE))
    ours.reset(start(SHAPE))
    for m in range(WORKERS):
        ours.fetch(m)
    for kind, m, gradient in sequence:
        if kind == "fetch":
            ours.fetch(m)
            twin.fetch(m)
        elif kind == "push":
            ours.push(m, gradient)
            twin.push(m, gradient)
        else:
            ours.no_delay(gradient)
            twin.no_delay(gradient)
    check(ours, twin)


@pytest.mark.few(3)
@pytest.mark.parametrize("rule", RULES)
@SETTINGS
@given(sequence=events(rows_and_values))
def test_sparse(rule, sequence):
    """The twin's worker fetches, and remembers, the whole table; ours only what changed."""
    ours, twin = bench(rule, sparse=True), RULES[rule][1](start(TABLE))
    ours.reset(start(TABLE))
    for m in range(WORKERS):
        ours.fetch(m)
    for kind, m, part in sequence:
        if kind == "fetch":
            ours.fetch(m)
            twin.fetch(m)
            continue
        rows, gradient = part
        total = np.zeros(TABLE)
        np.add.at(total, rows, gradient)
        touched = np.unique(rows)
        if kind == "push":
            ours.push(m, gradient, rows)
            twin.push(m, total, touched)
        else:
            ours.no_delay(gradient, rows)
            twin.no_delay(total, touched)
    check(ours, twin)
