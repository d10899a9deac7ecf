"""The benchmarks run and report; what they measure on so few mini-batches says nothing."""

import json

import pytest

from tests.packaging.repository import ROOT, run_python, run_script


def run_benchmark(name: str, *arguments: str, timeout: float = 540) -> str:
    result = run_script(str(ROOT / "benchmarks" / name), *arguments, timeout=timeout)
    assert result.returncode == 0, result.stderr
    return result.stdout


def contender(**spec) -> dict:
    return json.loads(run_benchmark("contenders.py", json.dumps(spec)).splitlines()[-1])


def test_every_mini_batch_counts_when_applied():
    result = contender(kind="downpour", period=3, examples=640, epochs=2)
    assert result["steps"] == 2 * 640 / 64
    assert result["steps_per_second"] == pytest.approx(result["steps"] / result["seconds"])


@pytest.mark.slow
@pytest.mark.parametrize("model", ["embedding", "dense_embedding"])
def test_embeddings_train(model):
    result = contender(kind="downpour", model=model, rows=1000, examples=640, epochs=1)
    assert result["steps"] == 10
    assert result["parameter_bytes"] == 4 * (1000 * 64 + 64 * 10 + 10)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "compiled"), [("cnn", True), ("lstm", False), ("transformer", True)]
)
def test_models_train(model, compiled):
    result = contender(kind="downpour", model=model, examples=640, epochs=1, jit_compile=compiled)
    assert result["steps"] == 10
    weights = {
        "cnn": 32 * (27 + 1) + 64 * (9 * 32 + 1) + 10 * (6 * 6 * 64 + 1),
        "lstm": 4 * 64 * (64 + 64 + 1) + 10 * (64 + 1),
        "transformer": (4 + 8) * 64 * 64 + (4 + 5) * 64 + 4 * 64 + 10 * (64 + 1),
    }
    assert result["parameter_bytes"] == 4 * weights[model]


@pytest.mark.slow
def test_models_are_beside_the_best_plain_fit():
    output = run_benchmark(
        "fit_throughput.py",
        *("--groups", "models", "--repetitions", "1", "--epochs", "1", "--examples", "640"),
        *("--only", "^plain fit, steps_per_execution=20$|^two|periods of 1$"),
    )
    assert output.count("| Downpour, periods of 1 |") == 3
    assert output.count("| two processes of plain fit") == 3
    assert "| mini-batches/s | beside plain fit" in output


@pytest.mark.slow
def test_fit_throughput_prints_a_table(tmp_path):
    written = tmp_path / "results.json"
    output = run_benchmark(
        "fit_throughput.py",
        *("--groups", "periods", "--repetitions", "1", "--epochs", "1", "--examples", "1280"),
        *("--only", "periods of 1$", "--limit_seconds", "0.5", "--json", str(written)),
    )
    assert "| Downpour, periods of 1 |" in output
    assert "| of the limit | limit | CPU, ms/mini-batch |" in output
    (group,) = json.loads(written.read_text())["groups"]
    limits = {"bare steps, one process", "bare threads, locked pushes, periods of 1"}
    assert set(group["results"]) == {"plain fit", "Downpour, periods of 1"} | limits
    for (outcome,) in group["results"].values():
        (seconds,) = outcome["cpu_seconds"].values()
        assert 0 < seconds < 64 * outcome["seconds"]  # of no more cores than that


@pytest.mark.slow
def test_monitor_cost_prints_a_table():
    output = run_benchmark(
        "monitor_cost.py",
        *("--repetitions", "1", "--epochs", "1", "--examples", "1280", "--periods", "20"),
    )
    assert "| StalenessMonitor |" in output
    assert "| an empty callback |" in output


@pytest.mark.slow
def test_the_cost_of_the_ledger_prints_a_table():
    output = run_benchmark(
        "monitor_cost.py",
        *("--of", "ledger", "--repetitions", "1", "--epochs", "1", "--examples", "1280"),
        *("--periods", "20"),
    )
    assert "| without |" in output
    assert "| ledger and audits |" in output


@pytest.mark.slow
def test_loss_vs_seconds_prints_a_table():
    output = run_benchmark(
        "loss_vs_seconds.py",
        *("--tasks", "moderate", "--repetitions", "1", "--epochs", "2", "--examples", "1280"),
        *("--only", "periods of 20"),
    )
    assert "| plain fit |" in output and "| Downpour, 2 workers, periods of 20 |" in output


@pytest.mark.slow
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


@pytest.mark.slow
def test_mini_batches_of_a_cluster_count_when_applied():
    spec = {"kind": "downpour", "model": "lstm", "period": 3, "examples": 640, "epochs": 2}
    spec |= {"program": "cluster_contenders.py", "launch": ["--workers", "1", "--ps", "1"]}
    code = f"import json, runs; print(json.dumps(runs.run_contender('contenders.py', {spec})))"
    ran = run_python("-c", code, cwd=ROOT / "benchmarks")
    assert ran.returncode == 0, ran.stderr
    result = json.loads(ran.stdout.splitlines()[-1])
    assert (result["steps"], result["workers"]) == (2 * 640 / 64, 1)
    assert result["steps_per_second"] == pytest.approx(result["steps"] / result["seconds"])


@pytest.mark.slow
def test_simulator_rate_prints_a_table():
    output = run_benchmark(
        "simulator_rate.py", "--repetitions", "1", "--updates", "40", "--workers", "3"
    )
    assert "| fit, steps_per_execution=10 |" in output and "| study driver, XLA |" in output


@pytest.mark.slow
def test_spmd_averaging_prints_tables(tmp_path):
    written = tmp_path / "results.json"
    output = run_benchmark(
        "spmd_averaging.py",
        *("--repetitions", "1", "--epochs", "1", "--examples", "1280"),
        *("--parameters", "3000", "--variables", "3", "--json", str(written)),
        *("--only", "every 20$", "--limit_seconds", "0.5"),
    )
    assert "| averaging every 20 |" in output
    assert "| of the limit: bare steps, two processes | CPU, ms/mini-batch |" in output
    assert "its Python was not given (--tf_keras_python)" in output
    assert "| bare all_reduce, a tensor a variable |" in output
    fit, large = (group["results"] for group in json.loads(written.read_text())["groups"])
    assert "averaging every 200" not in fit
    # 20 mini-batches: an average at 20, which is the end of the epoch.
    assert fit["averaging every 20"][0]["averages"] == 1
    assert fit["two that train alone"][0]["averages"] == 0
    assert large["average(model)"][0]["seconds"] > 0


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_cluster_throughput_prints_tables_and_says_who_is_left_out():
    output = run_benchmark(
        "cluster_throughput.py",
        *("--groups", "peers,averaging,large,overlap"),
        *("--repetitions", "1", "--epochs", "1"),
        *("--examples", "1280", "--parameters", "100000"),
        *("--variables", "10", "--torch_python", "no/such/python"),
        *("--only", "periods of 1,.*workers read files$|no ps", "--limit_seconds", "0.5"),
        timeout=840,  # seven clusters, one after the other
    )
    assert "| Downpour, periods of 1, steps_per_execution=20, workers read files |" in output
    assert "| Downpour, periods of 1 |" not in output
    assert "| Downpour, periods of 20" not in output
    assert "| bare steps, two processes |" in output
    assert "| bare exchange, periods of 1, 20 steps a call |" in output
    chief, ps, workers = (f"CPU of {role}, ms/mini-batch" for role in ("chief", "ps", "workers"))
    assert f"| of the limit | limit | {chief} | {ps} | {workers} |" in output
    assert "| averaging every 20, no ps: the workers hold the weights |" in output
    assert "PyTorch DDP, gloo: no/such/python cannot be started" in output
    assert "steps_per_execution=20: its Python was not given (--tf_keras_python)" in output
    assert "of bare assign_add |" in output
    assert "| overlapping |" in output


@pytest.mark.slow
def test_the_study_of_moving_statistics_compares_them_with_a_serial_pass(tmp_path):
    written = tmp_path / "results.json"
    output = run_benchmark(
        *("reproduce/batch_norm.py", "--quick", "--seeds", "1"),
        *("--only", '^{"way": "(plain fit|averaging every 5)"', "--results", str(written)),
    )
    assert "| averaging every 5 | 16 |" in output
    groups = json.loads(written.read_text())["runs"]
    assert [each["condition"]["workers"] for each in groups] == [1, 4, 16]
    for values in (each["values"] for each in groups):
        (own,), (serial,), (lag,) = (values[name] for name in ("own", "serial", "lag"))
        assert own == pytest.approx(serial, rel=0.1)
        assert lag == pytest.approx(100.0 * (own / serial - 1.0), abs=0.01)


@pytest.mark.slow
def test_sandblaster_prints_a_table(tmp_path):
    written = tmp_path / "results.json"
    output = run_benchmark(
        *("sandblaster.py", "--repetitions", "1", "--problems", "digits"),
        *("--iterations", "40", "--only", "Sandblaster, 2", "--json", str(written)),
    )
    assert "| Sandblaster, 2 threads |" in output and "| SciPy, 1 of BLAS |" in output


@pytest.mark.slow
def test_how_costs_grow_prints_tables(tmp_path):
    written = tmp_path / "results.json"
    output = run_benchmark(
        "growth.py",
        *("--workers", "1,2", "--variables", "4", "--weights", "1", "--steps", "40"),
        *("--repetitions", "1", "--json", str(written)),
    )
    for title in ("| periods of | workers |", "| periods of | variables |", "| MB | fetch, MB/s |"):
        assert title in output
    assert "| 20 | 2 |" in output
    groups = {
        group["name"]: group["results"] for group in json.loads(written.read_text())["groups"]
    }
    assert {name: list(results) for name, results in groups.items()} == {
        "workers": ["1", "2"],
        "variables": ["4"],
        "weights": ["1"],
    }
    (run,) = groups["variables"]["4"]
    assert run["workers"] == 2 and run["periods"]["20"]["steps"] == 2 * 40
    (run,) = groups["weights"]["1"]
    assert run["variables"] == 6 and abs(run["bytes"] - 1e6) < 1e4
