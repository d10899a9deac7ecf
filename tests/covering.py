"""Which of a product's rows the fast tier runs: a covering array.

Of strength 1 it has each value of each factor, of strength 2 each pair of values of two factors,
as far as the rows given have them. Most faults need one value or two: what a row more would find is
worth its time in the second tier, which runs all rows.
"""

import collections
import itertools
import zlib


def cover(rows, strength, name=""):
    """Indices of rows that have among them every combination of `strength` values that all have.

    Rows are tuples of one length or several. The next is always one that adds most, and of those
    one whose values were chosen least; where that still leaves a choice, the name decides, so that
    not all functions choose the same.
    """
    missing = set().union(*(_combinations(row, strength) for row in rows))
    used = collections.Counter()
    first = zlib.crc32(name.encode()) % len(rows) if rows else 0
    left = [(first + n) % len(rows) for n in range(len(rows))]
    chosen = []
    while missing:
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


def mark_rows(items, mark):
    """Marks tests of functions marked `thin` that their function's covering array leaves out."""
    functions = collections.defaultdict(list)
    for item in items:
        if item.get_closest_marker("thin") is not None and hasattr(item, "callspec"):
            functions[item.nodeid.split("[")[0]].append(item)
    for name, tests in functions.items():
        (strength,) = tests[0].get_closest_marker("thin").args or (1,)
        rows = [row_of(test.callspec.params, test.callspec.indices) for test in tests]
        chosen = set(cover(rows, strength, name))
        for number, test in enumerate(tests):
            if number not in chosen:
                test.add_marker(mark)
