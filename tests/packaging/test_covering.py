"""The fast tier's part of a product has every value, or every pair; the rest is marked slow."""

import itertools
from types import SimpleNamespace

import pytest

from tests import covering
from tests.conformance import registry

KINDS = ("dies", "comes back", "stops", "stops for long")
# Two factors that are no product, as in tests/engine/test_faults.py.
CASES = [(name, 3) for name in registry.CONFIGURATIONS] + [("softsync", 1), ("elastic", 1)]
PRODUCTS = {
    "strategies and engines": list(itertools.product(registry.CONFIGURATIONS, registry.ENGINES)),
    "faults": [(*case, kind) for case in CASES for kind in KINDS],
    "three": list(itertools.product("abcdefgh", "xy", (1, 2))),
    "four": list(itertools.product(range(4), range(3), range(5), range(2))),
    "not all": [(1, 1, 1), (1, 2, 1), (2, 1, 2)],
    "one factor": [(n,) for n in range(9)],
}


@pytest.mark.parametrize("name", ["", "test_a", "test_b"])
@pytest.mark.parametrize("strength", [1, 2])
@pytest.mark.parametrize("product", PRODUCTS)
def test_every_combination_that_occurs_is_covered(product, strength, name):
    rows = PRODUCTS[product]
    chosen = [rows[n] for n in covering.cover(rows, strength, name)]
    assert len(set(chosen)) == len(chosen)
    factors = range(len(rows[0]))
    for columns in itertools.combinations(factors, min(strength, len(rows[0]))):
        assert {tuple(row[c] for c in columns) for row in chosen} == {
            tuple(row[c] for c in columns) for row in rows
        }


@pytest.mark.parametrize(
    ("product", "strength", "number"),
    [
        ("strategies and engines", 1, len(registry.CONFIGURATIONS)),
        ("strategies and engines", 2, 2 * len(registry.CONFIGURATIONS)),
        ("three", 1, 8),
        ("three", 2, 16),  # two values of the others for each of the first
        ("four", 1, 5),
        ("one factor", 2, 9),
    ],
)
def test_no_more_than_it_takes(product, strength, number):
    assert len(covering.cover(PRODUCTS[product], strength)) == number


def test_the_other_factors_values_are_chosen_about_as_often():
    rows = PRODUCTS["faults"]
    kinds = [rows[n][-1] for n in covering.cover(rows, 1)]
    often = [kinds.count(kind) for kind in KINDS]
    assert max(often) - min(often) <= 1


def item(function, thin, *row, few=None):
    """A test of a function with these parameters; `thin` and `few` are what its marks say."""
    said = {"thin": thin, "few": few}
    marks = [SimpleNamespace(name=name, args=args) for name, args in said.items() if args]
    params = {f"p{n}": value for n, value in enumerate(row)}
    return SimpleNamespace(
        nodeid=f"f.py::{function}[{row}]",
        callspec=SimpleNamespace(params=params, indices=dict.fromkeys(params, 0)),
        get_closest_marker=lambda name: next((m for m in marks if m.name == name), None),
        add_marker=lambda name: marks.append(SimpleNamespace(name=name, args=())),
        row=(function, *row),
        tiers=lambda: [mark.name for mark in marks if mark.name not in said],
    )


def in_tier(items, *tiers):
    return [item.row for item in items if item.tiers() == [*tiers]]


def pairs(rows):
    return {pair for row in rows for pair in itertools.combinations(enumerate(row), 2)}


VALUES = list(itertools.product("ab", (1, 2)))


def test_what_is_left_out_is_marked():
    thin = [item("t", (1,), *row) for row in VALUES]
    whole = [item("u", None, *row) for row in VALUES]
    other = [item("v", None, 1)]  # with other parameters
    covering.mark_rows([*thin, *whole, *other], "slow", "long")
    assert in_tier(thin, "slow") == []
    left_out = [row[1:] for row in in_tier(thin, "long")]
    assert left_out in ([("a", 2), ("b", 1)], [("a", 1), ("b", 2)])
    assert not any(it.tiers() for it in (*whole, *other))


def test_the_slow_tier_adds_the_pairs_that_no_other_function_has():
    alone = [item("t", (1,), *row) for row in VALUES]
    covering.mark_rows(alone, "slow", "long")
    assert len(in_tier(alone, "slow")) == 2 and not in_tier(alone, "long")
    three = [item("t", (1,), *row) for row in itertools.product(range(4), range(3), range(5))]
    three += [item("u", (2,), *row) for row in itertools.product(range(4), range(3), range(5))]
    covering.mark_rows(three, "slow", "long")
    assert pairs(in_tier(three) + in_tier(three, "slow")) == pairs(it.row for it in three)
    assert len(in_tier(three, "long")) > 60


def test_rows_that_are_slow_by_themselves_are_not_in_the_fast_tier():
    """As where the fixture of a parameter is: functions that are not thin have their pairs, too."""
    thin = [item("t", (1,), *row) for row in VALUES]
    whole = [item("u", None, *row) for row in VALUES]
    slow = {("a", 2), ("b", 1)}
    for test in [*thin, *whole]:
        if test.row[1:] in slow:
            test.add_marker("slow")
    covering.mark_rows([*thin, *whole], "slow", "long")
    assert in_tier(thin) == [("t", "a", 1), ("t", "b", 2)]
    assert in_tier(whole, "slow") == [("u", "a", 2), ("u", "b", 1)]
    assert in_tier(thin, "slow", "long") == [("t", "a", 2), ("t", "b", 1)]


def test_together_functions_share_the_values():
    tests = [item(name, (2,), row) for name in "tuv" for row in range(9)]
    covering.mark_rows(tests, "slow", "long", together=True)
    here = in_tier(tests)
    assert len(here) == 9
    assert [{row[n] for row in here} for n in range(2)] == [set("tuv"), set(range(9))]


def test_of_a_function_marked_few_so_many_rows_are_left_with_most_values():
    few = [item("t", None, *row, few=(2,)) for row in itertools.product("ab", (1, 2, 3))]
    slow = item("t", None, "c", 4, few=(2,))
    slow.add_marker("slow")
    other = [item("u", None, *row) for row in itertools.product("ab", (1, 2))]
    covering.mark_all_but_few([*few, slow, *other], "slow")
    left = in_tier(few)
    assert len(left) == 2
    assert {row[1] for row in left} == {"a", "b"} and len({row[2] for row in left}) == 2
    assert len(in_tier(few, "slow")) == 4
    assert in_tier(other) == [test.row for test in other]


def test_few_of_one_factor_are_so_many_of_its_values():
    assert len(covering.cover([(n,) for n in range(9)], 1, "t", at_most=4)) == 4
    assert covering.cover([(n,) for n in range(3)], 1, "t", at_most=7) == [0, 1, 2]
