"""A file is one idea, of at most 500 lines; a constructor takes at most seven arguments."""

import ast

import pytest

from tests.packaging.repository import ROOT, python_sources

MOST_LINES, MOST_ARGUMENTS = 500, 7
FOLDERS = ("tf_dsgd", "tests", "examples", "benchmarks")

LONGER: dict[str, int] = {}
"""Files that are still to be split, and their lines: they may lose some, and gain none."""

MORE_ARGUMENTS = {
    "SimulatedCluster": 11,  # public: what a virtual cluster is, named one by one, all optional
    "DownpourStrategy": 12,  # public: the choices of one algorithm, each of which has a default
    "SoftsyncStrategy": 8,  # public: as of Downpour
    "Runs": 10,  # of benchmarks/reproduce: a study's choices, named where a paper's figure is made
    "Seeds": 8,  # the same
}
"""Classes whose constructors take more, and how many. Dataclasses are records, and not counted."""

SOURCES = sorted(source for source in python_sources() if source.split("/")[0] in FOLDERS)


def lines(source):
    return len((ROOT / source).read_text(encoding="utf-8").splitlines())


def constructors(source):
    """(class, number of arguments) of all classes of a file that have an `__init__`."""
    for node in ast.walk(ast.parse((ROOT / source).read_text(encoding="utf-8"))):
        if isinstance(node, ast.ClassDef):
            for member in node.body:
                if isinstance(member, ast.FunctionDef) and member.name == "__init__":
                    given = member.args
                    count = len(given.posonlyargs) + len(given.args) + len(given.kwonlyargs)
                    yield node.name, count - 1  # self


def test_all_folders_are_looked_at():
    assert {source.split("/")[0] for source in SOURCES} == set(FOLDERS)
    assert "tf_dsgd/strategies/base.py" in SOURCES


@pytest.mark.parametrize("folder", FOLDERS)
def test_files_are_short(folder):
    found = {source: lines(source) for source in SOURCES if source.split("/")[0] == folder}
    longer = {source: n for source, n in found.items() if n > LONGER.get(source, MOST_LINES)}
    assert longer == {}, "split it into files that each are one idea"


def test_longer_files_are_still_there():
    """One that was split is taken off the list."""
    assert [source for source in LONGER if lines(source) <= MOST_LINES] == []


def test_constructors_take_few_arguments():
    found = {name: n for source in SOURCES for name, n in constructors(source)}
    more = {name: n for name, n in found.items() if n > MOST_ARGUMENTS}
    assert more == MORE_ARGUMENTS


def test_arguments_are_counted(tmp_path, monkeypatch):
    monkeypatch.setattr("tests.packaging.test_sizes.ROOT", tmp_path)
    (tmp_path / "made.py").write_text(
        "class A:\n    def __init__(self, a, /, b, c=1, *d, e, f=2, **g): ...\n"
        "    class B:\n        def __init__(self): ...\n        def other(self, a): ...\n"
    )
    # By hand: a, b, c, e and f. What stands behind a star has no number.
    assert dict(constructors("made.py")) == {"A": 5, "B": 0}
