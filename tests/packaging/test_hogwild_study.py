"""`benchmarks/reproduce/hogwild.py`: its data, and its contenders beside one another."""

import argparse

import numpy as np
import pytest

from tests.packaging.repository import ROOT


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
    problem = hogwild.logistic(0.00016, 60, 1)
    threads, other = hogwild.Threads(problem, 1, "none"), hogwild.ScikitLearn(problem)
    for contender in (threads, other):
        contender.train(*problem.part(0, 60))()
    assert other.loss() == pytest.approx(threads.loss(), abs=1e-6)
    zero = problem.loss([np.zeros((47_000, 1), "float32")])
    assert zero == pytest.approx(np.log(2))
    assert abs(threads.loss() - zero) > 1e-3


@pytest.mark.slow
def test_all_contenders_of_a_seed_train_on_the_same(hogwild):
    """One rate, one loss: what is compared is the time alone."""
    options = argparse.Namespace(steps=20, repetitions=1)
    found = {}
    for contender in (hogwild.ONE, *hogwild.LOCKS, hogwild.SKLEARN):
        condition = {"problem": "logistic", "density": 0.0016, "contender": contender}
        assert condition in hogwild.STUDY.conditions
        found[contender] = hogwild.run(condition, [1], [1.0], options)
    assert hogwild.measured.cache_info().misses == 1  # in one process, in turn
    losses = {name: values["loss"][0][0] for name, values in found.items()}
    assert losses[hogwild.SKLEARN] == pytest.approx(losses[hogwild.ONE], abs=1e-5)
    assert losses == pytest.approx(dict.fromkeys(losses, losses[hogwild.ONE]), abs=2e-3)
    assert abs(losses[hogwild.ONE] - np.log(2)) > 1e-4  # it was trained
    for name, values in found.items():
        assert values["ms"][0][0] > 0 and values["cpu_ms"][0][0] > 0
        if name not in hogwild.LOCKS:
            assert values["staleness"] == [[0.0]]
