"""`benchmarks/reproduce/hogwild.py`: its data, its contenders beside one another, its tables."""

import json

import numpy as np
import pytest

from tests.packaging.repository import ROOT
from tests.packaging.test_benchmarks import run_benchmark


@pytest.fixture
def hogwild(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks" / "reproduce"))
    import hogwild

    return hogwild


def test_columns_are_drawn_by_zipf_without_repetition(hogwild):
    found = hogwild.zipf_columns(np.random.default_rng(0), 400, 75)
    assert found.shape == (400, 75) and found.min() >= 0 and found.max() < 47_000
    assert all(len(set(row)) == 75 for row in found.tolist())
    # One of 75 draws is c with probability 75 / ((c + 1) H), H = sum 1 / c = 11.3, as long as
    # that is small: without repetition the first columns are in nearly every example.
    shares = [(found == c).any(1).mean() for c in (0, 99, 199)]
    assert shares[0] > 0.95
    expected = 75 / 11.3 / np.array([100, 200])
    np.testing.assert_allclose(shares[1:], expected, atol=0.05)


def test_one_thread_makes_the_steps_of_scikit_learn(hogwild):
    """A loss computed from another library's weights, after 60 steps."""
    problem = hogwild.logistic(0.00016, 60)
    threads, other = hogwild.Threads(problem, 1, "none"), hogwild.ScikitLearn(problem)
    for contender in (threads, other):
        contender.train(*problem.part(0, 60))()
    assert other.loss() == pytest.approx(threads.loss(), abs=1e-6)
    zero = problem.loss([np.zeros((47_000, 1), "float32")])
    assert zero == pytest.approx(np.log(2))
    assert abs(threads.loss() - zero) > 1e-3


def result(hogwild, name="logistic"):
    speeds = {hogwild.ONE: [100.0, 50.0], "Hogwild!, 2": [200.0, 50.0]}
    speeds |= {"AIG, 2": [100.0, 5.0], "round-robin, 2": [150.0, 60.0]}
    return {
        "problem": name,
        "density": 0.0016,
        "steps_per_second": speeds,
        "cpu_ms": {each: [1.0, 3.0] for each in speeds},
        "loss": dict.fromkeys(speeds, 0.5),
        "staleness": dict.fromkeys(speeds, 0.25),
    }


def test_ratios_are_of_one_repetition(hogwild):
    report = hogwild.report([result(hogwild)])
    assert "| Hogwild!, 2 threads | 125 | 1.50 (1.00-2.00) |  | 2.00 (1.00-3.00) |" in report
    assert "| AIG, 2 threads | 52 | 0.55 (0.10-1.00) | 0.30 (0.10-0.50) |" in report


def test_what_is_on_the_page_is_what_was_measured(hogwild):
    measured = json.loads(
        (ROOT / "benchmarks" / "reproduce" / "results" / "hogwild.json").read_text()
    )
    page = (ROOT / "docs" / "reproduced.md").read_text()
    for line in hogwild.report(measured["results"]).splitlines():
        assert line in page


@pytest.mark.slow
def test_the_study_runs_and_reports(tmp_path):
    written = tmp_path / "results.json"
    output = run_benchmark("reproduce/hogwild.py", "--quick", "--json", str(written))
    assert "| completion | 1.6 % | round-robin, 2 threads |" in output
    logistic, completion = json.loads(written.read_text())["results"]
    assert set(logistic["loss"]) - set(completion["loss"]) == {"scikit-learn"}
    losses = logistic["loss"]
    assert losses["scikit-learn"] == pytest.approx(losses["one thread"], abs=1e-5)
    assert max(losses.values()) < np.log(2)
