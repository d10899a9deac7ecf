"""limits.py and accounts.py run and report; their arithmetic is in `test_processor_time.py`."""

import json

import pytest

from tests.packaging.test_benchmarks import run_benchmark


@pytest.mark.slow
@pytest.mark.parametrize(
    "only", ["steps, two", "locked pushes", "a call a step", "exchange, periods of 20"]
)
def test_limits_prints_a_table(tmp_path, only):
    written = tmp_path / "results.json"
    output = run_benchmark(
        "limits.py",
        *("--only", only, "--repeats", "1", "--seconds", "0.5", "--model", "deep"),
        *("--json", str(written)),
    )
    assert "TF_ENABLE_ONEDNN_OPTS=1" in output
    assert "CPU" in output and "| mini-batches/s | of bare " in output
    (group,) = json.loads(written.read_text())["groups"]
    roles = {"bare steps, two threads": {"chief"}, "bare steps, two processes": {"workers"}}
    for name, (outcome,) in group["results"].items():
        several = {"chief", "ps", "workers"} if "exchange" in name else {"chief"}
        assert set(outcome["cpu_seconds"]) == roles.get(name, several)
        assert outcome["steps"] > 0 and sum(outcome["cpu_seconds"].values()) > 0
        assert outcome["spec"]["kind"] in ("steps", "processes", "pushes", "exchange")


@pytest.mark.slow
def test_accounts_prints_where_the_time_goes(tmp_path):
    written = tmp_path / "results.json"
    output = run_benchmark(
        "accounts.py",
        *("--kinds", "threads", "--turns", "1", "--epochs", "2", "--examples", "1280"),
        *("--seconds", "0.5", "--json", str(written)),
    )
    lines = {
        cells[1].strip(): float(cells[2])
        for cells in (line.split("|") for line in output.splitlines())
        if len(cells) == 4 and cells[2].strip(" -.").replace(".", "").isdigit()
    }
    parts = ("step", "accrual", "metrics", "exchange", "input", "Python", "TensorFlow")
    assert sum(lines[part] for part in parts) == pytest.approx(lines["sum"], abs=0.05)
    assert lines["in all"] - lines["sum"] == pytest.approx(lines["not accounted for"], abs=0.02)
    assert min(lines[whole] for whole in ("step", "Python", "sum", "in all", "chief")) > 0
    assert lines["chief"] == lines["in all"]
    by_threads = sum(value for line, value in lines.items() if line.startswith("chief: "))
    assert by_threads == pytest.approx(lines["chief"], abs=0.05)
    (pair,) = json.loads(written.read_text())["kinds"]["threads"]
    ((turn,),) = pair["turns"].values()
    assert {outcome["steps"] for outcome in turn.values()} == {2 * 1280 // 64}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("group", "only"),
    [
        ("threads", "periods of 20"),
        ("threads", "periods of 1, a call a step, fit's dataset"),
        ("processes", "periods of 20"),
        ("processes", "periods of 1, 20 steps a call, workers read files"),
    ],
)
def test_own_loops_print_a_table_beside_ours(tmp_path, group, only):
    written = tmp_path / "results.json"
    output = run_benchmark(
        "own_loops.py",
        *("--groups", group, "--only", f"^(own loop, two {group}|Downpour), {only}$"),
        *("--repetitions", "1", "--seconds", "0.5", "--epochs", "1", "--examples", "2560"),
        *("--json", str(written)),
    )
    assert "\n|  | of TensorFlow alone | of the own loop |" in output
    (written_group,) = json.loads(written.read_text())["groups"]
    results = written_group["results"]
    (loop,) = results[f"own loop, two {group}, {only}"]
    roles = {"threads": {"chief"}, "processes": {"chief", "ps", "workers"}}
    assert set(loop["cpu_seconds"]) == roles[group]
    # All but one kind of loop take twenty mini-batches a call.
    assert loop["steps"] > 0
    assert "a call a step" in only or loop["steps"] % 20 == 0
    assert 0.5 < loop["loss"] < 5.0  # ten classes by chance: 2.3
    if only == "periods of 20":
        (ours,) = results["Downpour, periods of 20"]
        assert ours["steps"] == 2560 // 64
