"""Which of a product's rows each tier runs: covering arrays.

Of strength 1 one has each value of each factor, of strength 2 each pair of values of two factors,
as far as the rows given have them. Most faults need one value or two: what a row more would find is
worth its time in the second tier, and what no pair of values needs where somebody asks for it.
"""

import collections
import dataclasses
import itertools
import zlib


def cover(rows, strength, name="", beside=(), at_most=None):
    """Indices of rows that have among them every combination of `strength` values that all have.

    Rows are tuples of one length or several; what the rows `beside` have need not be met again. The
    next is always one that adds most, and of those one whose values were chosen least; where that
    still leaves a choice, the name decides, so that not all functions choose the same. No more rows
    than `at_most`: those then have as many of the combinations as the first so many can.
    """
    missing = set().union(*(_combinations(row, strength) for row in rows))
    missing.difference_update(*(_combinations(row, strength) for row in beside))
    used = collections.Counter(value for row in beside for value in enumerate(row))
    first = zlib.crc32(name.encode()) % len(rows) if rows else 0
    left = [(first + n) % len(rows) for n in range(len(rows))]
    chosen = []
    while missing and len(chosen) != at_most:
        best = max(
            left,
            key=lambda n: (
                len(_combinations(rows[n], strength) & missing),
                -sum(used[value] for value in enumerate(rows[n])),
            ),
        )
        left.remove(best)
        chosen.append(best)
        missing -= _combinations(rows[best], strength)
        used.update(enumerate(rows[best]))
    return sorted(chosen)


def _combinations(row, strength):
    return set(itertools.combinations(enumerate(row), min(strength, len(row))))


def row_of(params, indices):
    """A test's parameters as one row: values where they are plain, else where they stand."""
    row = []
    for name in sorted(params):
        value = params[name]
        values = value if isinstance(value, tuple) and all(map(_plain, value)) else (value,)
        row += [part if _plain(part) else ("at", indices[name]) for part in values]
    return tuple(row)


def _plain(value):
    return value is None or isinstance(value, str | int | float)


@dataclasses.dataclass(frozen=True)
class _Test:
    """A test with parameters: its row, in which the function is the first factor."""

    item: object
    row: tuple
    strength: int | None  # of a function marked `thin`

    @property
    def slow(self):
        return self.item.get_closest_marker("slow") is not None


def mark_rows(items, slow, long, together=False):
    """Marks what covering arrays leave out of functions marked `thin`.

    The fast tier runs one of each function, of the strength that the mark says and of rows that are
    not slow by themselves. The slow one adds what it takes for each pair of values, in which
    functions of a file with the same parameters are values of one more factor. What is left is
    `long`.

    With `together`, functions of a file with the same parameters are one product already in the
    fast tier, which has each value and each function once.
    """
    products = collections.defaultdict(list)
    for item in items:
        if hasattr(item, "callspec"):
            function = item.nodeid.split("[")[0]
            thin = item.get_closest_marker("thin")
            strength = None if thin is None else (*thin.args, 1)[0]
            row = (function, *row_of(item.callspec.params, item.callspec.indices))
            product = (function.split("::")[0], *sorted(item.callspec.params))
            products[product].append(_Test(item, row, strength))
    for tests in products.values():
        if any(test.strength for test in tests):
            _mark(tests, slow, long, together)


def _mark(tests, slow, long, together):
    arrays, left = collections.defaultdict(list), []
    for test in tests:
        if test.strength and test.slow:
            left.append(test)
        elif test.strength:
            arrays[(1, None) if together else (test.strength, test.row[0])].append(test)
    for (strength, _), thin in arrays.items():
        rows = [test.row if together else test.row[1:] for test in thin]
        chosen = set(cover(rows, strength, thin[0].row[0]))
        left += [test for number, test in enumerate(thin) if number not in chosen]
    out = {id(test) for test in left}
    beside = [test.row for test in tests if id(test) not in out]
    chosen = set(cover([test.row for test in left], 2, tests[0].row[0], beside))
    for number, test in enumerate(left):
        test.item.add_marker(slow if number in chosen else long)


def mark_all_but_few(items, slow):
    """Marks what is more than `few(number)` rows of a function, of those that are not slow yet.

    They are those that have most values among them.
    """
    functions = collections.defaultdict(list)
    for item in items:
        if item.get_closest_marker("few") and not item.get_closest_marker("slow"):
            functions[item.nodeid.split("[")[0]].append(item)
    for function, tests in functions.items():
        (number,) = tests[0].get_closest_marker("few").args
        rows = [row_of(test.callspec.params, test.callspec.indices) for test in tests]
        chosen = cover(rows, 1, function, at_most=number)
        for n, test in enumerate(tests):
            if n not in chosen:
                test.add_marker(slow)
