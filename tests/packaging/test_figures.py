"""Tables of speed in README.md and benchmarks/README.md are those of the runs committed."""

import importlib
import math
import re
import struct

import pytest

from tests.packaging.repository import ROOT


@pytest.fixture
def figures(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("figures")


def test_tables_are_those_of_the_committed_runs(figures):
    found, single = set(), set()
    for file in figures.FILES:
        text = (ROOT / file).read_text(encoding="utf-8")
        assert figures.written(text) == text, f"{file}: run python benchmarks/figures.py"
        found |= set(re.findall(r"<!-- figures: (.+?) -->", text))
        single |= set(re.findall(r"<!--figure: (.+?)-->", text))
    of_studies = {name for name in single if name.startswith(("difference ", "value "))}
    assert single - of_studies == set(figures.INLINE)
    assert of_studies
    assert found == {name for name in figures.BLOCKS if figures.is_published(name)}


def test_another_figure_would_be_found(figures):
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    ratio = re.search(r"<!-- figures: .*?(\d\.\d\d) \(", text, re.DOTALL)
    changed = f"{text[: ratio.start(1)]}9.99{text[ratio.end(1) :]}"
    assert figures.written(changed) == text != changed


def text_chunks(path):
    """What a PNG file says of itself, by keyword."""
    data, place, found = path.read_bytes(), 8, {}
    while place < len(data):
        (length,) = struct.unpack(">I", data[place : place + 4])
        kind, body = data[place + 4 : place + 8], data[place + 8 : place + 8 + length]
        if kind == b"tEXt":
            keyword, _, text = body.partition(b"\0")
            found[keyword.decode()] = text.decode("latin-1")
        place += 12 + length
    return found


def test_plots_are_those_of_the_committed_runs(figures):
    pages = figures.pages
    shown = {name: pages.read(name) for name in pages.PLOTS}
    results = {name: content["runs"] for name, content in shown.items() if content}
    for name, content in {
        **results,
        "time_to_accuracy": figures.published("time_to_accuracy"),
        "growth": figures.published("growth"),
    }.items():
        said = text_chunks(ROOT / f"docs/images/{name}.png")
        expected = pages.stamp(content)["results"]
        assert said.get("results") == expected, f"{name}: run python benchmarks/figures.py --plots"


# In words after a study's tables: what is set and not found, or a paper's.
NOT_MEASURED = {
    "A3C: seconds until CartPole is solved": {"2.1", "1.8", "1.9"},
    "The period: accuracy and time": {"2.7", "1.5", "1.3"},  # a model's MB; a table by hand
    "Strom: bytes, accuracy and time": {"14.6", "58.4", "0.36", "0.008", "4.5"},
    "Machines for one replica": {"2.2"},
    "DiLoCo between synchronous training and plain averaging": {"0.9", "0.7"},
}


@pytest.mark.parametrize("page", ["docs/reproduced.md", "docs/reproduced_averaging.md"])
def test_what_is_said_of_a_study_stands_in_its_tables(page):
    """Each number with a point in the words after a section's tables is one of these, rounded.

    Or it is generated itself. A verdict whose study was run again is found by it.
    """
    block = re.compile(r"<!-- figures: .*?<!-- end of figures -->", re.DOTALL)
    number = r"(?<![\w.^])\d+\.\d+"
    for section in re.split(r"(?m)^## ", (ROOT / page).read_text(encoding="utf-8"))[1:]:
        title, tables = section.splitlines()[0], block.findall(section)
        if not tables:
            continue
        known = [float(n) for table in tables for n in re.findall(number, table)]
        said = block.sub("", section[section.index(tables[0]) :])
        said = re.sub(r"<!--figure: .*?<!--end-->|\$[^$]*\$|`[^`]*`", "", said)
        # Tables of other programs, and what is said of how a study was made.
        words = [p for p in said.split("\n\n") if not p.startswith(("|", "**Here**", "!"))]
        for text in re.findall(number, "\n\n".join(words)):
            digits = len(text.partition(".")[2])
            found = any(math.isclose(round(n, digits), float(text)) for n in known)
            assert found or text in NOT_MEASURED.get(title, ()), f"{title}: {text}"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("mean elastic: workers=4", "No figure has such a name"),
        ("value elastic: workers=4", "of 12 conditions, not of one"),
        ("value elastic: workers=3; period=1; method=EASGD", "of 0 conditions, not of one"),
        ("value elasticity: workers=3", "no results of 'elasticity'"),
    ],
)
def test_a_name_that_no_figure_has_is_refused(figures, name, message):
    with pytest.raises(ValueError, match=message):
        figures.single(name)


def test_a_difference_is_that_of_its_claim(figures):
    said = figures.single("difference bmuf: method=BMUF; workers=16; period=8 less workers=1")
    text = (ROOT / "docs/reproduced_averaging.md").read_text(encoding="utf-8")
    assert f"| BMUF keeps the accuracy of one worker | M = 16 | at most 0.5 more | {said} |" in text
    value = figures.single("value bmuf: method=BMUF; workers=16; period=8")
    assert re.search(rf"^\| BMUF \| 8 \| 16 \| \$2\S+ \| 8 \| {value} ±", text, re.MULTILINE)
