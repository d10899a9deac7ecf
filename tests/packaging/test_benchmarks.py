"""The benchmarks run and report; what they measure on so few mini-batches says nothing."""

import functools
import json

import keras
import numpy as np
import pytest

import tf_dsgd
from tests.optimizers import twins
from tests.packaging.repository import ROOT, run_script


def run_benchmark(name: str, *arguments: str, timeout: float = 240) -> str:
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


@pytest.fixture
def reproduce(monkeypatch):
    """The programs of that directory can be imported."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks" / "reproduce"))


def logits_of(x, weights):
    a, b, c, d = weights
    return np.maximum(x @ a + b, 0.0) @ c + d


def gradients_of(x, y, weights):
    """Of the mean cross-entropy of 32-64-10 (relu)."""
    a, b, c, _ = weights
    hidden = np.maximum(x @ a + b, 0.0)
    p = np.exp(logits_of(x, weights))
    p /= p.sum(1, keepdims=True)
    p[np.arange(len(y)), y] -= 1.0
    p /= len(y)
    back = (p @ c.T) * (hidden > 0)
    return [x.T @ back, back.sum(0), hidden.T @ p, p.sum(0)]


def first_weights(seed):
    """As side_by_side.py draws them."""

    def glorot(inputs, outputs):
        limit = np.sqrt(6 / (inputs + outputs))
        return np.random.default_rng([seed, inputs, outputs]).uniform(
            -limit, limit, (inputs, outputs)
        )

    return [glorot(32, 64), np.zeros(64), glorot(64, 10), np.zeros(10)]


def averaged_by_numpy(x, y, batches, first, rate):
    """SGD of momentum 0.9 on workers that average both; `batches` `[meetings, workers, steps, k]`.

    The rate falls to a tenth at half and again at three quarters of the mini-batches.
    """
    meetings, workers, period, _ = batches.shape
    steps = meetings * workers * period
    state = [*first, *(np.zeros_like(part) for part in first)]
    for meeting in range(meetings):
        ends = [[part.copy() for part in state] for _ in range(workers)]
        for worker, k in np.ndindex(workers, period):
            done = (meeting * period + k) * workers  # by all, when each has done as many
            now = rate * 0.1 ** ((done >= steps // 2) + (done >= steps * 3 // 4))
            rows = batches[meeting, worker, k]
            weights, velocity = ends[worker][:4], ends[worker][4:]
            gradients = gradients_of(x[rows], y[rows], weights)
            for w, v, g in zip(weights, velocity, gradients, strict=True):
                v[:] = 0.9 * v - now * g
                w += v
        state = [np.mean(same, 0) for same in zip(*ends, strict=True)]
    return state[:4]


@pytest.mark.slow
def test_the_studies_of_averaging_equal_a_twin(reproduce):
    """Of every rate and seed trained side by side, one after the other."""
    import teacher

    seeds, rates, workers, period, steps = [3, 8], [0.05, 0.2], 2, 3, 24
    task = teacher.Task(seeds)
    strategy = tf_dsgd.PeriodicAveragingStrategy(teacher.simulated(workers), average_every=period)
    momentum = functools.partial(keras.optimizers.SGD, momentum=0.9)
    result = teacher.train(strategy, momentum, rates, task, 8, steps)
    assert (result["steps"], result["updates"]) == (24, 4)
    batches = task.order(8 * steps).reshape(4, workers, period, 8)
    for i, j in np.ndindex(len(rates), len(seeds)):
        x, y, held = task.x[:, j], task.y[:, j], task.y_held[:, j]
        weights = averaged_by_numpy(x, y, batches, first_weights(seeds[j]), rates[i])
        logits = logits_of(task.x_held[:, j], weights)
        logs = logits - np.log(np.exp(logits).sum(1, keepdims=True))
        loss = -0.9 * logs[np.arange(len(held)), held].mean() - 0.1 * logs.mean()
        assert result["loss"][i][j] == pytest.approx(loss, rel=1e-4)
        assert result["error"][i][j] == pytest.approx(
            100 * np.mean(logits.argmax(1) != held), abs=0.05
        )


@pytest.mark.slow
def test_averaging_at_every_step_equals_keras_on_the_joint_batch(reproduce):
    import teacher

    task = teacher.Task([1, 2])
    strategy = tf_dsgd.PeriodicAveragingStrategy(teacher.simulated(4), average_every=1)
    together = teacher.train(strategy, keras.optimizers.SGD, [0.1, 0.5], task, 8, 64)
    joint = teacher.train(None, keras.optimizers.SGD, [0.1, 0.5], task, 32, 16)
    assert together["updates"] == joint["updates"] == 16
    np.testing.assert_allclose(together["loss"], joint["loss"], rtol=1e-4)


AVERAGING = {
    "BMUF": ("averaging", {"outer_optimizer": tf_dsgd.optimizers.BlockMomentum()}, "SGD"),
    "DiLoCo": ("averaging", {"outer_optimizer": keras.optimizers.SGD(0.7, 0.9, True)}, "AdamW"),
    "reset": ("averaging", {"optimizer_state": "reset"}, "Adam"),
    "EAMSGD": ("elastic", {}, functools.partial(keras.optimizers.SGD, momentum=0.9, nesterov=True)),
    "Downpour": ("downpour", {}, "SGD"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", AVERAGING)
def test_runs_side_by_side_are_those_of_an_ordinary_model(reproduce, name):
    import teacher

    kind, options, optimizer = AVERAGING[name]
    optimizer = getattr(keras.optimizers, optimizer) if isinstance(optimizer, str) else optimizer
    seeds, rates, steps = [2, 5], [0.02, 0.05], 32

    def strategy():
        cluster = teacher.simulated(2, tf_dsgd.Exponential(1.0))
        if kind == "downpour":
            return tf_dsgd.DownpourStrategy(
                cluster, push_every=4, fetch_every=4, local_rule="optimizer"
            )
        if kind == "elastic":
            return tf_dsgd.ElasticAveragingStrategy(cluster, average_every=4)
        return tf_dsgd.PeriodicAveragingStrategy(cluster, average_every=4, **options)

    result = teacher.train(strategy(), optimizer, rates, teacher.Task(seeds), 8, steps)
    alone, rate = teacher.Task(seeds[1:]), rates[1]
    with strategy().scope():
        model = keras.Sequential(
            [keras.Input((32,)), keras.layers.Dense(64, "relu"), keras.layers.Dense(10)]
        )
        model.set_weights(first_weights(seeds[1]))
        fall = [rate, 0.1 * rate, 0.01 * rate]
        schedule = keras.optimizers.schedules.PiecewiseConstantDecay([15, 23], fall)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer(schedule), loss)
    data = alone.batches(8, steps).map(lambda x, y: (x[:, 0], y[:, 0]))
    model.fit(data, shuffle=False, verbose=0)
    judged = teacher.judge(np.array(model(alone.x_held[:, 0]))[None, None], alone.y_held.T)
    assert result["loss"][1][1] == pytest.approx(judged["loss"][0][0], rel=1e-4)


def test_a_rate_is_never_chosen_by_the_seed_it_is_judged_by(reproduce):
    import teacher

    # Seed 0 alone would take the first rate; the others take the second for it. Without seed 1
    # the first is best (0 + 3 against 4 + 1), without seed 2 the second is.
    errors = [[0.0, 9.0, 3.0], [4.0, 2.0, 1.0]]
    assert teacher.chosen(errors).tolist() == [4.0, 9.0, 1.0]


SMALL = ("--steps", "128", "--seeds", "1,2")
STUDIES = {
    "averaging_period.py": (
        *("--periods", "1,4", "--workers", "4", "--parts", "accuracy,time", "--repetitions", "1"),
        *("--examples", "1280"),
    ),
    "averaging_policies.py": ("--periods", "4", "--workers", "4", "--optimizers", "Adam"),
    "bmuf.py": ("--workers", "2", "--period", "8"),
    "diloco.py": ("--periods", "8", "--workers", "4"),
    "elastic.py": ("--periods", "1,4", "--workers", "2"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", STUDIES)
def test_a_study_of_averaging_prints_its_tables(name, tmp_path):
    written = tmp_path / "results.json"
    output = run_benchmark(f"reproduce/{name}", *SMALL, *STUDIES[name], "--json", str(written))
    results = json.loads(written.read_text())["results"]
    learnt = [r for r in results if "error" in r]
    # A strategy's mini-batches are all workers' together; plain Keras's are larger or fewer.
    assert {r["steps"] for r in learnt if r.get("period", True)} == {128}
    for r in learnt:
        assert np.shape(r["error"]) == np.shape(r["loss"]) == (len(r["rates"]), 2)
        assert np.min(r["error"]) < 80.0  # per cent; chance is 90
    for text in {
        "averaging_period.py": ["| one worker |", "| plain fit |", "| 4 | 8 |"],
        "averaging_policies.py": ["| Adam | 4 | reset |"],
        "bmuf.py": ["| 2 | BMUF, Nesterov | 8 |"],
        "diloco.py": ["| synchronous |  | 32 |", "| DiLoCo | 8 | 4 |"],
        "elastic.py": ["| 2 | 4 |"],
    }[name]:
        assert text in output


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
    spec = {"kind": "downpour", "period": 3, "examples": 640, "epochs": 2}
    program = str(ROOT / "benchmarks" / "cluster_contenders.py")
    launched = run_script(
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
    assert "| bare all_reduce, 3 tensors |" in output
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
        *("--groups", "peers,averaging,workers,large,overlap"),
        *("--repetitions", "1", "--epochs", "1"),
        *("--examples", "1280", "--counts", "2", "--steps", "50"),
        *("--parameters", "100000", "--variables", "10", "--torch_python", "no/such/python"),
        *("--only", "periods of 1,.*workers read files$|no ps", "--limit_seconds", "0.5"),
        timeout=840,  # eight clusters, one after the other
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
    assert "| 20 | 2 |" in output
    assert "of bare assign_add |" in output
    assert "| overlapping |" in output


@pytest.mark.slow
def test_the_study_of_moving_statistics_compares_them_with_a_serial_pass(tmp_path):
    written = tmp_path / "results.json"
    output = run_benchmark(
        "reproduce/batch_norm.py", "--workers", "2", "--epochs", "1", "--json", str(written)
    )
    assert "| averaging every 5 | 2 |" in output
    results = json.loads(written.read_text())["results"]
    assert len(results) == 6 and {r["workers"] for r in results} == {1, 2}
    assert all(r["own"] == pytest.approx(r["serial"], rel=0.1) for r in results), results


@pytest.mark.slow
def test_sandblaster_prints_a_table():
    output = run_benchmark(
        *("sandblaster.py", "--repetitions", "1", "--problems", "digits"),
        *("--iterations", "40", "--only", "Sandblaster, 2"),
    )
    assert "| Sandblaster, 2 threads |" in output and "| SciPy, 1 of BLAS |" in output


@pytest.mark.slow
def test_the_study_of_sandblaster_has_the_same_iterates_with_ten_times_as_many_replicas(tmp_path):
    written = tmp_path / "results.json"
    output = run_benchmark(
        "reproduce/sandblaster.py",
        *("--methods", "L-BFGS", "--seeds", "1", "--iterations", "2", "--json", str(written)),
    )
    assert "| Sandblaster, L-BFGS | 160 |" in output
    few, many = json.loads(written.read_text())["results"]
    (_, few_errors), (_, many_errors) = (zip(*each["curve"], strict=True) for each in (few, many))
    assert few_errors == pytest.approx(many_errors, abs=0.2)  # sums of float32 in other orders
    assert few["curve"][-1][0] > 5 * many["curve"][-1][0]
