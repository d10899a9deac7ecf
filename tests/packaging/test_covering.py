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


def test_what_is_left_out_is_marked():
    def item(nodeid, thin, **params):
        marks = []
        found = SimpleNamespace(args=thin) if thin is not None else None
        indices = {name: n for n, name in enumerate(params)}
        return SimpleNamespace(
            nodeid=nodeid,
            callspec=SimpleNamespace(params=params, indices=indices),
            get_closest_marker=lambda name: found,
            add_marker=marks.append,
            marks=marks,
        )

    values = list(itertools.product(("a", "b"), (1, 2)))
    thin = [item(f"f.py::t[{a}-{n}]", (1,), pair=(a, n)) for a, n in values]
    whole = [item(f"f.py::u[{a}-{n}]", None, pair=(a, n)) for a, n in values]
    covering.mark_rows([*thin, *whole], "slow")
    left_out = [it.nodeid for it in thin if it.marks == ["slow"]]
    assert left_out in (["f.py::t[a-2]", "f.py::t[b-1]"], ["f.py::t[a-1]", "f.py::t[b-2]"])
    assert not any(it.marks for it in whole)
