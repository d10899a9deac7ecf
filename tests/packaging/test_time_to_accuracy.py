"""time_to_accuracy.py: the choice of rates, the statistics, resuming and the tables, on numbers."""

import importlib
import json
import math

import pytest
import scipy.stats

from tests.packaging.repository import ROOT
from tests.packaging.test_benchmarks import run_benchmark


@pytest.fixture
def program(monkeypatch):
    """Imports a program of benchmarks/."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module


def runs_of(rate, *epochs, most=10):
    """Runs that took so many epochs; None is one that did not get there."""
    return [
        {"rate": rate, "seed": 100 + i, "reached": e is not None, "epochs": e or most}
        for i, e in enumerate(epochs)
    ]


def test_the_rate_is_that_of_the_fewest_epochs_with_all_runs_that_get_there_first(program):
    statistics = program("accuracy_statistics")
    runs = runs_of(0.1, 8, 8) + runs_of(0.2, 1, None) + runs_of(0.4, 5, 6) + runs_of(0.8, 6, 5)
    assert statistics.best_rate(runs, 10) == 0.4  # not 0.2, which was lost once; the smaller of two


@pytest.mark.parametrize(
    ("best", "tried"),
    [
        (0.2, [0.1, 0.2, 0.4]),
        (0.1, [0.1, 0.2, 0.4, 0.05]),
        (0.025, [0.1, 0.2, 0.4, 0.05, 0.025, 0.0125]),
        (1.6, [0.1, 0.2, 0.4, 0.8, 1.6, 3.2]),
    ],
)
def test_a_grid_is_extended_until_the_best_rate_has_neighbours(program, best, tried):
    statistics = program("accuracy_statistics")
    found = []

    def run(rate, _):
        return runs_of(rate, 2 + round(abs(math.log2(rate / best))))

    assert statistics.search([0.1, 0.2, 0.4], run, 10, found) == best
    assert [each["rate"] for each in found] == tried
    assert not statistics.at_the_edge(found, best)


def test_a_search_ends_where_larger_rates_are_ever_better(program):
    statistics = program("accuracy_statistics")
    found = []
    rate = statistics.search([1.0, 2.0], lambda rate, _: runs_of(rate, 100 / rate), 1000, found)
    assert rate == 2.0 * 2**statistics.EXTENSIONS
    assert statistics.at_the_edge(found, rate)


def test_a_rate_is_given_up_at_twice_the_epochs_of_the_best(program):
    statistics = program("accuracy_statistics")
    given = []

    def run(rate, epochs):
        given.append(epochs)
        return runs_of(rate, {0.1: None, 0.2: 4, 0.4: 7}[rate])

    statistics.search([0.1, 0.2, 0.4], run, 10, [])
    assert given == [10, 10, 8]


@pytest.mark.parametrize("n", [5, 8, 11, 20])
def test_the_interval_has_the_median_as_often_as_it_says(program, n):
    low, high, sure = program("accuracy_statistics").interval([float(v) for v in range(n, 0, -1)])
    assert low + high == n + 1  # as far from both ends
    k = int(low) - 1
    below = scipy.stats.binom(n, 0.5).cdf
    assert sure == pytest.approx(1.0 - 2.0 * below(k))
    assert sure >= 0.9 > 1.0 - 2.0 * below(k + 1)  # and a narrower one does not


def test_few_values_have_the_widest_interval(program):
    statistics = program("accuracy_statistics")
    assert statistics.interval([3.0, 1.0]) == (1.0, 3.0, 0.5)
    assert statistics.interval([2.0]) == (2.0, 2.0, 0.0)


def test_a_run_that_did_not_get_there_is_later_than_any_other(program):
    statistics = program("accuracy_statistics")
    values = [statistics.value(run, "epochs") for run in runs_of(0.1, 4, None, 2, 3, None)]
    assert statistics.median(values) == 4.0
    assert statistics.median([*values, math.inf]) == math.inf
    assert statistics.interval(values)[1] == math.inf


def timed(**seconds):
    """A run for each seed; None did not get there."""
    return [
        {"seed": int(seed[1:]), "reached": s is not None, "seconds": s or 9.0, "cpu_seconds": 1.0}
        for seed, s in seconds.items()
    ]


def test_ratios_are_to_the_better_plain_fit_of_the_same_seed(program):
    statistics = program("accuracy_statistics")
    plain = [timed(s1=4.0, s2=3.0, s3=None), timed(s1=2.0, s2=6.0, s3=None)]
    ours = timed(s2=1.5, s1=4.0, s3=1.0, s4=1.0)
    assert statistics.ratios(ours, plain, "seconds") == [2.0, 0.5]
    assert statistics.ratios(timed(s1=None), plain, "seconds") == [0.0]


def entry(name, kind, group, rate, runs):
    spec = {"kind": kind, "target": 0.97, "workers": 2}
    search = runs_of(rate / 2, 9) + runs_of(rate, 5) + runs_of(rate * 2, 9)
    each = {"task": "digits", "group": group, "name": name, "spec": spec, "rate": rate}
    return {**each, "search": search, "runs": runs, "startup_seconds": [7.0]}


def with_epochs(runs, epochs):
    return [{**run, "epochs": epochs} for run in runs]


def test_the_table_says_who_did_not_get_there(program):
    tables = program("accuracy_tables")
    entries = [
        entry("plain fit", "keras", "threads", 0.4, with_epochs(timed(s1=2.0, s2=4.0), 5)),
        entry("ours", "downpour", "threads", 0.2, with_epochs(timed(s1=1.0, s2=None), 6)),
    ]
    (text,) = tables.all_tables({"contenders": entries})
    rows = [line for line in text.splitlines() if line.startswith(("| plain", "| ours"))]
    assert rows == [
        "| plain fit | 3.00 (2.00-4.00) | 1.00 (1.00-1.00) | 5 (5-5) | 1.00 (1.00-1.00) | "
        "1.00 (1.00-1.00) | 7.0 | 0.4 |  |",
        "| ours | never (1.00-never) | never (1.00-never) | never (6-never) | 1.00 (0.00-2.00) | "
        "0.50 (0.00-1.00) | 7.0 | 0.2 | 1 of 2 |",
    ]


def test_the_short_table_takes_our_best_and_with_a_straggler_is_beside_averaging(program):
    tables = program("accuracy_tables")

    def trained(name, kind, group, seconds, cpu_seconds):
        runs = [{**run, "cpu_seconds": cpu_seconds} for run in timed(s1=seconds)]
        return entry(name, kind, group, 0.4, with_epochs(runs, 5))

    entries = [
        trained("plain fit", "keras", "threads", 2.0, 3.0),
        trained("MirroredStrategy", "mirrored", "threads", 0.1, 0.1),
        trained("quick", "downpour", "threads", 1.0, 6.0),
        trained("sparing", "softsync", "threads", 4.0, 1.5),
        trained("waits", "averaging", "straggler", 8.0, 8.0),
        trained("waits not", "downpour", "straggler", 2.0, 4.0),
    ]
    beside = "plain `fit` at its best setting"

    def rows(shared):
        text = tables.in_short({"shared": shared, "contenders": entries})
        return [[c.strip() for c in line.split("|")[2:-1]] for line in text.splitlines()[2:]]

    assert rows(False)[0] == [beside, "quick", "2.00", "0.50", "1.00"]
    assert rows(True)[0] == [beside, "sparing", "0.50", "2.00", "1.00"]
    assert rows(True)[1][1:] == rows(False)[1][1:] == ["waits not", "4.00", "2.00", "1.00"]
    assert "straggler" in rows(True)[1][0]


def test_runs_that_are_there_are_not_done_again(program, tmp_path, monkeypatch):
    time_to_accuracy = program("time_to_accuracy")
    path = tmp_path / "results.json"
    asked = []

    def run_process(command, _timeout):
        spec = json.loads(command[-1])
        asked.append((spec["kind"], spec["rate"], spec["seeds"]))
        rate = spec["rate"] or 0.8
        measured = [
            {**timed(s1=1.0)[0], "seed": seed, "rate": rate, "epochs": 4} for seed in spec["seeds"]
        ]
        search = [] if spec["rate"] else runs_of(0.4, 9) + runs_of(0.8, 5) + runs_of(1.6, 9)
        return {"startup_seconds": 1.0, "rate": rate, "search": search, "runs": measured}

    monkeypatch.setattr(time_to_accuracy.runs, "run_process", run_process)
    monkeypatch.setattr(time_to_accuracy.signal, "signal", lambda *_: None)
    only = "^plain fit$|Mirrored"
    command = ["x", "--tasks", "digits", "--groups", "threads", "--only", only, "--json", str(path)]

    def run(*more):
        asked.clear()
        monkeypatch.setattr("sys.argv", [*command, *more])
        time_to_accuracy.main()
        return list(asked)

    assert run("--seeds", "2", "--minutes", "0") == []
    assert run("--seeds", "2") == [
        *(("keras", None, []), ("mirrored", None, [])),  # the searches, then seed by seed
        *(("keras", 0.8, [1]), ("mirrored", 0.8, [1])),
        *(("keras", 0.8, [2]), ("mirrored", 0.8, [2])),
    ]
    assert run("--seeds", "2") == []
    assert run("--seeds", "4", "--one_process") == [
        ("keras", 0.8, [3, 4]),
        ("mirrored", 0.8, [3, 4]),
    ]
    entries = json.loads(path.read_text())["contenders"]
    assert [[run["seed"] for run in each["runs"]] for each in entries] == [[1, 2, 3, 4]] * 2
    # Searches of their own files: their rates are taken, and what they measured is not.
    alone = [str(tmp_path / name) for name in ("plain.json", "mirrored.json")]
    command[-3:] = ["^plain fit$", "--json", alone[0]]
    assert run("--seeds", "1", "--one_process") == [("keras", None, [1])]
    command[-3:] = ["Mirrored", "--json", alone[1]]
    assert run("--seeds", "0") == [("mirrored", None, [])]
    command[-3:] = [only, "--json", str(tmp_path / "both.json")]
    both = [("keras", 0.8, [1]), ("mirrored", 0.8, [1])]
    assert run("--seeds", "1", "--one_process", "--searches", *alone) == both
    for each in json.loads((tmp_path / "both.json").read_text())["contenders"]:
        assert {one["rate"] for one in each["search"]} == {0.4, 0.8, 1.6} and each["searched"]
    assert run("--seeds", "1", "--searches", *alone) == []
    with pytest.raises(SystemExit, match="--searches: there is no file"):
        run("--searches", "elsewhere.json")
    for text in ("no JSON", "[]", "{}", '{"contenders": [{"search": [1]}]}'):
        (tmp_path / "other.json").write_text(text)
        with pytest.raises(SystemExit, match=r"other\.json is not what --json wrote"):
            run("--searches", str(tmp_path / "other.json"))
    command[-3] = "Mirored"
    with pytest.raises(SystemExit, match=r"--only Mirored: finds none of .*'plain fit'"):
        run()
    command[-3] = only
    command[-1] = str(path)
    # Other settings are other runs, and other searches.
    other = ("--seeds", "1", "--workers", "3", "--one_process", "--searches", *alone)
    assert run(*other)[0] == ("keras", None, [1])


def test_a_straggler_is_met_at_periods_of_one_on_one_task(program):
    contenders = program("time_to_accuracy").contenders
    names = set(contenders("processes", "digits"))
    assert set(contenders("straggler", "cnn")) == names
    more = {"averaging, every 1", "Downpour, every 1"}
    assert set(contenders("straggler", "digits")) == names | more
    assert len(contenders("threads", "cnn")) == len(names) + 3 + 1
    assert all(spec["slow"] for spec in contenders("straggler", "digits").values())


@pytest.mark.slow
def test_time_to_accuracy_prints_a_table(tmp_path):
    written = tmp_path / "results.json"
    arguments = ("--quick", "--groups", "threads", "--only", "plain fit$|Downpour, every 20")
    output = run_benchmark("time_to_accuracy.py", *arguments, "--json", str(written))
    assert "| plain fit |" in output and "| Downpour, every 20 |" in output
    for each in json.loads(written.read_text())["contenders"]:
        (run,) = each["runs"]
        *before, last = run["accuracies"]
        target = each["spec"]["target"]
        assert run["reached"] == (last >= target) and max(before, default=0.0) < target
        assert last > 0.9  # who does not get there is near
        assert run["epochs"] == len(run["accuracies"])
        assert 0.0 < run["cpu_seconds"] < 64 * run["seconds"]  # of no more cores than that
        assert run["rate"] == each["rate"] in {one["rate"] for one in each["search"]}
