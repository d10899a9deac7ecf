"""What stands in junit's file comes out by file; lines of progress state what is counted."""

import os
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from tests import conftest, progress
from tests.packaging import where_time_goes
from tests.packaging.repository import ROOT

JUNIT = """<?xml version="1.0" encoding="utf-8"?>
<testsuites><testsuite tests="3">
<testcase classname="tests.engine.test_one" name="test_a[1]" time="2.5">
  <properties>
    <property name="cpu_seconds" value="0.5"/><property name="x" value="y"/>
  </properties>
</testcase>
<testcase classname="tests.engine.test_one" name="test_b" time="0.5">
  <properties><property name="cpu_seconds" value="0.25"/></properties>
</testcase>
<testcase classname="tests.test_two" name="test_c" time="1.0"/>
</testsuite></testsuites>
"""


def test_by_file(tmp_path):
    (tmp_path / "a.xml").write_text(JUNIT)
    (tmp_path / "b.xml").write_text(JUNIT.replace('time="2.5"', 'time="6.5"'))
    files, tests = where_time_goes.read([tmp_path / "a.xml", tmp_path / "b.xml"])
    assert where_time_goes.table(files, 1).splitlines()[2:] == [
        "| tests/engine/test_one.py | 4 | 10 | 83.3 % | 2 |",
        "| 1 others | 2 | 2 | 16.7 % | 0 |",
        "| all | 6 | 12 | 100.0 % | 2 |",
    ]
    assert tests[0] == (6.5, "tests/engine/test_one.py::test_a[1]")
    assert len(tests) == 6


def report(nodeid, when, outcome="passed"):
    return SimpleNamespace(nodeid=nodeid, when=when, failed=outcome == "failed")


def test_a_line_every_ten_seconds_and_at_once_for_a_failure():
    lines = []
    terminal = SimpleNamespace(
        ensure_newline=lambda: None,
        write_line=lambda text, **markup: lines.append(text.strip()),
        flush=lambda: None,
    )
    now = [100.0]
    written = progress.Progress(terminal, clock=lambda: now[0])
    written.pytest_xdist_node_collection_finished(ids=["a.py::x"] * 50)
    for number in range(50):
        now[0] += 1.5
        outcome = "failed" if number == 1 else "passed"
        for when in ("setup", "call", "teardown"):
            name = "b.py::y" if number > 20 else "a.py::x"
            written.pytest_runtest_logreport(
                report(name, when, outcome if when == "call" else "passed")
            )
    assert lines[0] == "FAILED a.py::x (call)"
    # Every seventh test comes 10.5 s after the one that was said last.
    assert lines[1] == "7 of 50 tests,  14 %, 0:10 gone, about 1:04 to go; a.py"
    assert lines[-1] == "50 of 50 tests, 100 %, 1:15 gone, about 0:00 to go; b.py"
    assert len(lines) == 1 + 7 + 1


def test_no_test_begins_once_its_time_is_gone_and_ci_counts_those(tmp_path):
    def results(until):
        file = tmp_path / f"{until}.xml"
        test = "tests/packaging/test_where_time_goes.py::test_by_file"
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", test]
        subprocess.run(
            [*command, f"--junitxml={file}"],
            cwd=ROOT,
            env=os.environ | {conftest.UNTIL: str(until), "PYTEST_ADDOPTS": ""},
            check=True,
            timeout=100,
        )
        return file.read_text()

    counted = f'message="{conftest.PASSED_OVER}"'
    assert counted in results(0.0) and counted not in results(time.time() + 1000.0)
    run = (ROOT / ".ci/run").read_text()
    assert counted in run and conftest.UNTIL in run


@pytest.mark.parametrize("apart", [1, 60, 3600, 5400, 86400])
def test_no_test_is_passed_over_in_all_runs(apart):
    """Of runs that have time for a third of the tests, twelve leave none out."""
    tests, run = 1000, set()
    for number in range(12):
        first = conftest.first_of(tests, 1.8e9 + number * apart)
        assert 0 <= first < tests
        run.update(n % tests for n in range(first, first + tests // 3))
    assert len(run) == tests


@pytest.mark.parametrize("apart", [1, 60, 3600])
def test_the_tests_of_a_file_keep_their_order(apart):
    """Those of tests/conformance look at one `fit`: out of order, what changes it came first."""
    sizes = [40, 1, 300, 7, 120, 2]
    firsts = set()
    for run in range(40):
        items = [
            SimpleNamespace(path=file, number=number)
            for file, size in enumerate(sizes)
            for number in range(size)
        ]
        conftest.begin_elsewhere(items, 1.8e9 + run * apart)
        for file, size in enumerate(sizes):
            places = [n for n, item in enumerate(items) if item.path == file]
            assert [items[n].number for n in places] == list(range(size))
            assert places == list(range(places[0], places[0] + size))
        firsts.add(items[0].path)
    assert len(firsts) > 3


def made_items(number):
    """Tests of a file, of which some are slow, and some of these run alone."""

    def item(n):
        tiers = ("fast",) if n % 3 == 0 else ("slow", "alone") if n % 7 == 0 else ("slow",)
        return SimpleNamespace(
            nodeid=f"tests/test_some.py::test_it[{n}]",
            get_closest_marker=lambda name: name if name in tiers else None,
            is_divided=tiers == ("slow",),
        )

    return [item(n) for n in range(number)]


@pytest.mark.parametrize("shares", [1, 2, 3, 5])
def test_shares_together_have_each_slow_test_once(shares):
    everything = made_items(2000)
    ran = []
    for number in range(1, shares + 1):
        items = list(everything)
        others = conftest.take_share(items, f"{number}/{shares}")
        assert sorted(items + others, key=everything.index) == everything
        assert all(item.is_divided for item in others)
        mine = [item for item in items if item.is_divided]
        whole = sum(item.is_divided for item in everything)
        assert abs(len(mine) - whole / shares) < 0.1 * whole
        assert mine == sorted(mine, key=everything.index)
        ran += mine
    assert sorted(ran, key=everything.index) == [item for item in everything if item.is_divided]


@pytest.mark.parametrize("share", ["0/3", "4/3", "3", "a/b", "1/0", "-1/3", "1/3/5"])
def test_a_share_that_is_none_says_so(share):
    with pytest.raises(pytest.UsageError, match=r"such as 2/3"):
        conftest.take_share(made_items(3), share)


def test_the_slow_tier_of_a_run_is_a_share():
    """`.ci/run` takes one by the commit, or the one that it is given."""
    run = (ROOT / ".ci/run").read_text()
    assert f"share=${{{conftest.SHARE}:-" in run
    assert f"{conftest.SHARE}=$share " in run


def test_a_run_that_a_test_starts_is_whole_and_begins_at_the_beginning(tmp_path):
    inner = tmp_path / "test_inner.py"
    inner.write_text(
        "import os\nfrom tests import conftest\n\n\n"
        "def test_it():\n    assert not {conftest.UNTIL, conftest.SHARE} & os.environ.keys()\n"
    )
    for options in ([], ["-n", "1"]):
        run = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-p", "tests.conftest", *options, str(inner)],
            cwd=ROOT,
            env=os.environ
            | {
                conftest.UNTIL: str(time.time() + 1000.0),
                conftest.SHARE: "1/2",
                "PYTEST_ADDOPTS": "",
            },
            capture_output=True,
            text=True,
            check=False,
            timeout=100,
        )
        assert run.returncode == 0, run.stdout
