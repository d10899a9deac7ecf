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
    of_studies = {name for name in single if name.partition(" ")[0] in figures.prose.KINDS}
    assert single - of_studies == set(figures.singles.INLINE)
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
        ("points", "No figure has such a name"),
        ("points bmuf: workers=1", "No figure has such a name"),
        ("points bmuf: workers=1 by workers=1", "No figure has such a name"),
        ("rate bmuf, loss: workers=1", "No figure has such a name"),
        ("value bmuf: workers=1 less period=2", "of 0 conditions, not of one"),
        ("value bmuf: 4", "'4' are not fields of a condition"),
        ("value bmuf, regret: workers=1", "bmuf measures error, loss, and no 'regret'"),
        ("value bmuf: workers=1, 2^40", "No seed has run all of"),
        ("room bmuf: workers=1, at most 1", "No rates in a row at which .* has at most 1"),
        ("rates bmuf: workers=1", "No figure has such a name"),
        ("sure bmuf: BMUF is best", "bmuf has 0 claims named 'BMUF is best', not one"),
    ],
)
def test_a_name_that_no_figure_has_is_refused(figures, name, message):
    with pytest.raises(ValueError, match=message):
        figures.single(name)


@pytest.fixture
def made_up(figures, monkeypatch):
    """A study of three conditions with two seeds each, at rates of a half and of 2."""
    evidence = figures.pages.evidence
    found = {  # by rate, of each seed: its error and its seconds
        "a": {0.5: [(3.0, 4.0), (4.2, 8.0)], 2.0: [(5.0, 1.0), (5.0, 1.0)]},
        "b": {0.5: [(7.0, 1.0), (7.0, 1.0)], 2.0: [(2.0, 2.0), (3.0, 2.0)]},
        "c": {0.5: [(8.0, 1.0), (8.0, 1.0)], 2.0: [(3.0, 2.0), (4.0, 2.0)]},
    }
    runs = [
        {"condition": {"way": way}, "seed": seed, "rate": rate, "values": values}
        for way, by_rate in found.items()
        for rate, seeds in by_rate.items()
        for seed, pair in enumerate(seeds)
        for values in [dict(zip(("error", "seconds"), pair, strict=True))]
    ]
    content = {"study": "made_up", "runs": runs, "tuned": [], "chosen_by": "error"}
    a, b, c = ({"way": way} for way in found)
    cells = (evidence.Cell("", c, b, ">"), evidence.Cell("", a, b, ">"))
    claims = [evidence.Claim("made_up", "b is best", "", "", cells)]
    monkeypatch.setattr(figures.pages, "read", {"made_up": content}.get)
    monkeypatch.setattr(figures.pages, "CLAIMS", claims)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        # Differences of 1.0 and 1.2: mean 1.1, standard error 0.1, and t is 12.706 for two seeds.
        ("difference made_up: way=a less way=b", "+1.10 (-0.17 to +2.37)"),
        ("points made_up: way=a less way=b", "1.1 (-0.2 to 2.4)"),
        # Differences of 3 and 2: mean 2.5, standard error 0.5.
        ("points made_up: way=a less way=b, 2^1", "2.5 (-3.9 to 8.9)"),
        # Differences of -4.0 and -2.8: mean -3.4, standard error 0.6.
        ("difference made_up: way=a less way=b, 2^-1", "-3.40 (-11.02 to +4.22)"),
        # Logarithms of 3 / 2 and of 4.2 / 3: mean 0.3710, standard error 0.0345.
        ("ratio made_up: way=a by way=b", "1.45 (0.93 to 2.25)"),
        # Logarithms of 2 and 4: those of 2 and 1, by 2, times 1.5, and a standard error of 0.3466.
        ("ratio made_up, seconds: way=a by way=b", "2.83 (0.03 to 231.22)"),
        ("value made_up: way=a", "3.60"),
        ("value made_up: way=a, 2^1", "5.00"),
        ("value made_up, seconds: way=a", "6.00"),
        ("rate made_up: way=a", "2<sup>-1</sup>"),
        ("rate made_up: way=b", "2<sup>1</sup>"),
        # Differences of 2 and 6: mean 4, standard error 2; a fourth of them, in thousandths.
        (
            "milliseconds made_up, seconds: way=a less way=b, of 4",
            "1000.0 (-5353.1 to 7353.1)",
        ),
        # Means of 3.6 and 5 at the two rates, 2 ** -1 and 2.
        ("room made_up: way=a, at most 5", "4"),
        ("room made_up: way=a, at most 4.9", "1"),
        ("rates made_up", "2, all of them whole powers of 2"),
        # c is more than b by 1 with both seeds; of a and b so few seeds say nothing.
        ("sure made_up: b is best", "1 of 2"),
    ],
)
@pytest.mark.usefixtures("made_up")
def test_a_figure_is_what_its_name_says(figures, name, said):
    assert figures.single(name) == said


def test_nothing_that_was_measured_is_typed_by_hand_in_which_period(figures):
    assert "docs/which_period.md" in figures.FILES
    text = (ROOT / "docs/which_period.md").read_text(encoding="utf-8")
    assert text.count("<!--figure: ") == text.count("<!--end-->")
    by_hand = re.sub(r"<!--figure: .*?<!--end-->", "", text)
    assert re.findall(r"(?<![\w.])\d+\.\d+", by_hand) == ["2.7"]  # a model's MB


def test_a_difference_is_that_of_its_claim(figures):
    said = figures.single("difference bmuf: method=BMUF; workers=16; period=8 less workers=1")
    text = (ROOT / "docs/reproduced_averaging.md").read_text(encoding="utf-8")
    assert f"| BMUF keeps the accuracy of one worker | M = 16 | at most 0.5 more | {said} |" in text
    value = figures.single("value bmuf: method=BMUF; workers=16; period=8")
    assert re.search(rf"^\| BMUF \| 8 \| 16 \| \$2\S+ \| 8 \| {value} ±", text, re.MULTILINE)
