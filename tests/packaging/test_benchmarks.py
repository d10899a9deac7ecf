"""The benchmarks run and report; what they measure on so few mini-batches says nothing."""

import json

import numpy as np
import pytest

from tests.optimizers import twins
from tests.packaging.repository import ROOT, run_python


def run_benchmark(name: str, *arguments: str, timeout: float = 240) -> str:
    result = run_python(str(ROOT / "benchmarks" / name), *arguments, timeout=timeout)
    assert result.returncode == 0, result.stderr
    return result.stdout


def contender(**spec) -> dict:
    return json.loads(run_benchmark("contenders.py", json.dumps(spec)).splitlines()[-1])


def test_every_mini_batch_counts_when_applied():
    result = contender(kind="downpour", period=3, examples=640, epochs=2)
    assert result["steps"] == 2 * 640 / 64
    assert result["steps_per_second"] == pytest.approx(result["steps"] / result["seconds"])


@pytest.mark.parametrize("model", ["embedding", "dense_embedding"])
def test_embeddings_train(model):
    result = contender(kind="downpour", model=model, rows=1000, examples=640, epochs=1)
    assert result["steps"] == 10
    assert result["parameter_bytes"] == 4 * (1000 * 64 + 64 * 10 + 10)


@pytest.mark.slow
def test_fit_throughput_prints_a_table(tmp_path):
    written = tmp_path / "results.json"
    output = run_benchmark(
        "fit_throughput.py",
        *("--groups", "periods", "--repetitions", "1", "--epochs", "1", "--examples", "1280"),
        *("--json", str(written)),
    )
    assert "| Downpour, periods of 20 |" in output
    (group,) = json.loads(written.read_text())["groups"]
    assert len(group["results"]) == 6


@pytest.mark.slow
def test_the_study_of_learning_shows_the_contrast():
    pytest.importorskip("sklearn")
    output = run_benchmark(
        "reproduce/softsync_learning.py",
        *("--epochs", "1", "--n", "30", "--rates", "0.1"),
    )
    table = [line.split(" | ") for line in output.splitlines() if line.startswith("| 30-")]
    fixed, scaled = (float(row[-1].rstrip(" |")) for row in table)
    assert fixed > 80.0 > scaled  # per cent; chance is 90


@pytest.mark.slow
def test_the_study_of_staleness_prints_a_table(tmp_path):
    written = tmp_path / "results.json"
    run_benchmark(
        "reproduce/softsync_staleness.py",
        *("--messages", "600", "--n", "15", "--json", str(written)),
    )
    equal, varying = json.loads(written.read_text())["results"]
    for result in (equal, varying):
        assert sum(result["counts"]) == result["messages"] == 600
        tau = range(len(result["counts"]))
        mean = sum(t * c for t, c in zip(tau, result["counts"], strict=True)) / 600
        assert result["mean"] == pytest.approx(mean)
    assert equal["max"] <= 30 < varying["max"]


@pytest.mark.slow
def test_the_study_of_delays_equals_a_twin(tmp_path, monkeypatch):
    """Its rates and seeds are trained side by side; here one of them, by itself, in NumPy."""
    written = tmp_path / "results.json"
    output = run_benchmark(
        "reproduce/delay_tolerance.py",
        *("--delays", "3", "--examples", "120", "--held_out", "30", "--features", "7"),
        *("--seeds", "5,6", "--methods", "AdaptiveRevision", "--no_xla", "--json", str(written)),
    )
    assert "| delay; held out at the end | AdaptiveRevision |" in output
    (result,) = json.loads(written.read_text())["results"]
    assert (result["updates"], result["staleness_p50"], result["staleness_max"]) == (120, 3, 3)
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks" / "reproduce"))
    import delay_tolerance

    for rate, seed in ((12, 0), (9, 1)):
        x, y, best = delay_tolerance.clicks(150, 7, 5 + seed)
        twin = twins.AdaptiveRevision(np.zeros(7), 1, result["rates"][rate])
        weights, sums, online = [], [], []
        for t in range(120):  # on what there was three updates ago
            weights.append(twin.w.copy())
            sums.append(twin.gbar.copy())
            w, seen = weights[max(t - 3, 0)], sums[max(t - 3, 0)]
            margin = x[t] @ w
            online.append(delay_tolerance.losses(margin, y[t]))
            gradient = (1 / (1 + np.exp(-margin)) - y[t]) * x[t]
            twin.update(gradient, slice(None), seen, 3)
        regret = np.mean(online) - best[:120].mean()
        held_out = np.mean(delay_tolerance.losses(x[120:] @ twin.w, y[120:]) - best[120:])
        assert result["regret"][rate][seed] == pytest.approx(regret, abs=1e-5)
        assert result["held_out"][rate][seed] == pytest.approx(held_out, abs=1e-4)


@pytest.mark.slow
def test_the_study_of_many_workers_makes_every_update(tmp_path):
    written = tmp_path / "results.json"
    output = run_benchmark(
        "reproduce/fasgd.py",
        *("--settings", "1:8,3:8", "--updates", "60", "--seeds", "1,2"),
        *("--methods", "SGD|SGD, alpha_0 / tau", "--json", str(written)),
    )
    assert "| SGD, at the end | SGD, alpha_0 / tau, at the end |" in output
    one, one_scaled, three, _ = json.loads(written.read_text())["results"]
    assert {one["updates"], three["updates"]} == {60}
    # Without staleness the two are the same, where their grids meet.
    fixed = dict(zip(one["rates"], one["final"], strict=True))
    shared = 0
    for rate, costs in zip(one_scaled["rates"], one_scaled["final"], strict=True):
        if rate in fixed:
            assert costs == pytest.approx(fixed[rate], rel=1e-4)
            shared += 1
    assert shared == 6
    assert three["mean_staleness"] == pytest.approx(2.0, abs=0.2)
    assert min(np.min(one["final"]), np.min(three["final"])) < np.log(10)  # of knowing nothing


@pytest.mark.slow
def test_the_study_of_momentum_finds_it(tmp_path):
    written = tmp_path / "results.json"
    run_benchmark(
        "reproduce/implicit_momentum.py",
        *("--workers", "1,3", "--times", "exponential", "--repetitions", "80"),
        *("--json", str(written)),
    )
    for result in json.loads(written.read_text())["results"]:
        share = 1 / result["workers"]
        assert result["momentum_error"] < 0.1
        assert abs(result["momentum"] - (1 - share)) < 5 * result["momentum_error"]
        assert abs(result["rate"] - 0.1 * share) < 5 * result["rate_error"]


@pytest.mark.slow
def test_the_study_of_compensation_without_any_is_plain(tmp_path):
    written = tmp_path / "results.json"
    output = run_benchmark(
        "reproduce/delay_compensation.py",
        *("--workers", "2", "--updates", "60", "--seeds", "1,2,3", "--tuning", "1", "--lam", "0"),
        *("--json", str(written)),
    )
    assert "| 1 | sequential SGD |" in output
    _, plain, constant, adaptive = json.loads(written.read_text())["results"]
    assert plain["updates"] == 60
    assert np.all(np.array(plain["error"]) > 10.0)  # per cent, after so few updates
    for result in (constant, adaptive):  # lambda is 0
        np.testing.assert_allclose(result["loss"], plain["loss"], rtol=1e-3)


@pytest.mark.slow
def test_monitor_cost_prints_a_table():
    output = run_benchmark(
        "monitor_cost.py",
        *("--repetitions", "1", "--epochs", "1", "--examples", "1280", "--periods", "20"),
    )
    assert "| StalenessMonitor |" in output
    assert "| an empty callback |" in output


@pytest.mark.slow
def test_loss_vs_seconds_prints_a_table():
    output = run_benchmark(
        "loss_vs_seconds.py",
        *("--tasks", "moderate", "--repetitions", "1", "--epochs", "2", "--examples", "1280"),
    )
    assert "| Downpour, 2 workers, periods of 20 |" in output


def test_server_rules_prints_a_table(tmp_path):
    written = tmp_path / "results.json"
    output = run_benchmark(
        "server_rules.py",
        *("--parameters", "10000", "--repetitions", "2", "--calls", "2", "--json", str(written)),
    )
    assert "| AdaptiveRevision |" in output
    (group,) = json.loads(written.read_text())["groups"]
    assert {len(v) for times in group["results"].values() for v in times.values()} == {2}
    assert all(x > 0 for times in group["results"].values() for v in times.values() for x in v)


def test_mini_batches_of_a_cluster_count_when_applied():
    spec = {"kind": "downpour", "period": 3, "examples": 640, "epochs": 2}
    program = str(ROOT / "benchmarks" / "cluster_contenders.py")
    launched = run_python(
        *("-m", "tf_dsgd.launch", "--workers", "1", "--ps", "1", program, json.dumps(spec)),
    )
    assert launched.returncode == 0, launched.stderr
    result = json.loads(launched.stdout.splitlines()[-1])
    assert (result["steps"], result["workers"]) == (2 * 640 / 64, 1)
    assert result["steps_per_second"] == pytest.approx(result["steps"] / result["seconds"])


@pytest.mark.slow
def test_simulator_rate_prints_a_table():
    output = run_benchmark(
        "simulator_rate.py", "--repetitions", "1", "--updates", "40", "--workers", "3"
    )
    assert "| fit, steps_per_execution=10 |" in output and "| study driver, XLA |" in output


@pytest.mark.slow
@pytest.mark.alone
def test_spmd_averaging_prints_tables(tmp_path):
    written = tmp_path / "results.json"
    output = run_benchmark(
        "spmd_averaging.py",
        *("--repetitions", "1", "--epochs", "1", "--examples", "1280"),
        *("--parameters", "3000", "--variables", "3", "--json", str(written)),
    )
    assert "| averaging every 20 |" in output
    assert "its Python was not given (--tf_keras_python)" in output
    assert "| bare all_reduce, 3 tensors |" in output
    fit, large = (group["results"] for group in json.loads(written.read_text())["groups"])
    # 20 mini-batches: an average at 20 or, with periods of 200, at the end of the epoch.
    assert fit["averaging every 20"][0]["averages"] == 1
    assert fit["two that train alone"][0]["averages"] == 0
    assert large["average(model)"][0]["seconds"] > 0


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.timeout(900)
def test_cluster_throughput_prints_tables_and_says_who_is_left_out():
    output = run_benchmark(
        "cluster_throughput.py",
        *("--groups", "peers,averaging,workers,large,overlap"),
        *("--repetitions", "1", "--epochs", "1"),
        *("--examples", "1280", "--counts", "1,2", "--steps", "50"),
        *("--parameters", "100000", "--variables", "10", "--torch_python", "no/such/python"),
        *("--only", "workers read files$"),
        timeout=840,  # a dozen clusters, one after the other
    )
    assert "| Downpour, periods of 20, steps_per_execution=20, workers read files |" in output
    assert "| Downpour, periods of 20 |" not in output
    assert "| averaging every 20, no ps: the workers hold the weights |" in output
    assert "PyTorch DDP, gloo: no/such/python cannot be started" in output
    assert "steps_per_execution=20: its Python was not given (--tf_keras_python)" in output
    assert "| 20 | 2 |" in output
    assert "of bare assign_add |" in output
    assert "| overlapping |" in output
