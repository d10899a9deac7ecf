"""Tables of speed in README.md and benchmarks/README.md are those of the runs committed."""

import importlib
import re

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
    assert single == set(figures.INLINE)
    assert found == {name for name in figures.BLOCKS if figures.is_published(name)}


def test_another_figure_would_be_found(figures):
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    ratio = re.search(r"<!-- figures: .*?(\d\.\d\d) \(", text, re.DOTALL)
    changed = f"{text[: ratio.start(1)]}9.99{text[ratio.end(1) :]}"
    assert figures.written(changed) == text != changed
