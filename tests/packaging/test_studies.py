"""The studies of `benchmarks/reproduce`: runs beside twins, beside Keras and beside one another."""

import argparse
import functools
import types

import keras
import numpy as np
import pytest

import tf_dsgd
from tests.optimizers import twins
from tests.packaging.repository import ROOT


@pytest.fixture
def reproduce(monkeypatch):
    """The programs of that directory can be imported, and what they import of the one above."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
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
    assert (strategy.steps, strategy.updates) == (24, 4)
    assert not np.array_equal(*task.order(8 * steps).T)
    for i, j in np.ndindex(len(rates), len(seeds)):
        batches = task.order(8 * steps)[:, j].reshape(4, workers, period, 8)
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
    assert strategy.updates == 16
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


def simulated(workers, seed):
    return tf_dsgd.SimulatedCluster(workers, compute_seconds=tf_dsgd.Exponential(1.0), seed=seed)


def quick(study, condition, seeds, rates, **sizes):
    """One call of a study's own function."""
    options = {name: small for name, (_, small) in study.options.items()} | sizes
    return study.run(condition, seeds, rates, argparse.Namespace(**options))


@pytest.mark.slow
def test_the_study_of_delays_equals_a_twin(reproduce):
    """Its rates and seeds are trained side by side; here one of them, by itself, in NumPy."""
    import delay_tolerance

    rates, condition = [0.25, 1.0], {"delay": 3, "method": "AdaptiveRevision"}
    sizes = {"examples": 120, "held_out": 30, "features": 7}
    result = quick(delay_tolerance.STUDY, condition, [5, 6], rates, **sizes)
    for i, j in np.ndindex(2, 2):
        x, y, best = delay_tolerance.clicks(150, 7, 5 + j)
        twin = twins.AdaptiveRevision(np.zeros(7), 1, rates[i])
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
        assert result["regret"][i][j] == pytest.approx(regret, abs=1e-5)
        assert result["held_out"][i][j] == pytest.approx(held_out, abs=1e-4)


STRATEGIES = {
    "Downpour": lambda c: tf_dsgd.DownpourStrategy(
        c, push_every=2, fetch_every=4, local_rule="none"
    ),
    "local": lambda c: tf_dsgd.DownpourStrategy(
        c, push_every=4, fetch_every=4, local_rule="optimizer"
    ),
    "softsync": lambda c: tf_dsgd.SoftsyncStrategy(c, gradients_per_update=2),
    "elastic": lambda c: tf_dsgd.ElasticAveragingStrategy(c, average_every=4),
}
CUSTOM = {
    "AdaptiveRevision": tf_dsgd.optimizers.AdaptiveRevision,
    "FASGD": tf_dsgd.optimizers.FASGD,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", [*STRATEGIES, *CUSTOM])
def test_a_seed_after_another_equals_an_ordinary_fit_with_its_delays(reproduce, name):
    """Nothing of the seed before is left: `fit` on the simulator knows of no other seed."""
    import seeded
    import teacher

    cluster = functools.partial(simulated, 3)
    optimizer = CUSTOM.get(name, functools.partial(keras.optimizers.SGD, momentum=0.9))
    make = STRATEGIES.get(name, STRATEGIES["Downpour"])
    if name in CUSTOM:
        make = functools.partial(tf_dsgd.DownpourStrategy, local_rule="none")
    updates, seeds = 24, [7, 8]
    trained, held = teacher.of_seeds(seeds, 8 * 16)  # and begins anew after 16 mini-batches
    layers = seeded.mlp([teacher.STUDENT, teacher.CLASSES])
    study = seeded.Seeds(make(cluster(7)), cluster, optimizer, [0.01, 0.05], layers, trained, 8)
    study.train(7, updates)
    study.train(8, updates)
    found = study.logits(held[8][0])[1]

    strategy = make(cluster(8))
    with strategy.scope():
        model = keras.Sequential(
            [keras.Input((32,)), keras.layers.Dense(64, "relu"), keras.layers.Dense(10)]
        )
        model.set_weights(first_weights(8))
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer(0.05), loss)
    x, y = (np.concatenate([part, part[: 8 * 8]]) for part in trained[8])
    model.fit(x, y, batch_size=8, shuffle=False, verbose=0)
    assert strategy.steps == updates
    np.testing.assert_allclose(found, model(held[8][0]), atol=2e-5)


@pytest.mark.slow
def test_runs_that_were_cut_in_pieces_are_whole(reproduce):
    import seeded
    import side_by_side
    import teacher

    trained, held = teacher.of_seeds([3], 8 * 40)
    study = seeded.Seeds(
        tf_dsgd.DownpourStrategy(local_rule="none", fetch_every=3),
        lambda seed: tf_dsgd.SimulatedCluster(
            4, compute_seconds=tf_dsgd.Exponential(1.0), seed=seed
        ),
        keras.optimizers.Adam,
        [0.01],
        seeded.mlp([teacher.STUDENT, teacher.CLASSES]),
        trained,
        8,
    )
    study.train(3, 40)
    whole = study.logits(held[3][0])
    study.begin(3)
    parts = side_by_side.pieces(study.entries(3, study.timetable(3, 40)), 5)
    assert [sum(entry[1] == "push" for entry in part) for part in parts] == [8] * 5
    for part in parts:
        study.go(part)
    np.testing.assert_array_equal(whole, study.logits(held[3][0]))


@pytest.mark.slow
def test_one_worker_and_no_compensation_is_plain_whatever_the_method(reproduce):
    import delay_compensation
    import fasgd

    rates = [0.25, 1.0]
    one = {"workers": 1, "batch": 8}
    fixed = quick(fasgd.STUDY, {**one, "method": "SGD"}, [1, 2], rates)
    scaled = quick(fasgd.STUDY, {**one, "method": "SGD, alpha_0 / tau"}, [1, 2], rates)
    np.testing.assert_allclose(fixed["cost"], scaled["cost"], rtol=1e-4)
    plain = quick(delay_compensation.STUDY, {"workers": 4, "method": "SGD"}, [1], rates)
    none = {"workers": 4, "method": "DC-ASGD-c", "lambda": 0.0}
    compensated = quick(delay_compensation.STUDY, none, [1], rates)
    np.testing.assert_allclose(plain["loss"], compensated["loss"], rtol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("n", [1, 15])
def test_staleness_by_times_alone_is_what_training_counts(reproduce, n):
    import setting
    import softsync_staleness

    taus = softsync_staleness.staleness(n, "exponential", 0.05, 3, 400)
    cluster = setting.workers(tf_dsgd.Exponential(1.0), seed=3)
    strategy = setting.softsync(n, cluster, None)
    with strategy.scope():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False)])
        model.compile(keras.optimizers.SGD(0.0), "mse")
    x = np.ones((400, 1), "float32")
    model.fit(x, x, batch_size=1, verbose=0)
    counts = strategy.state()["staleness"]
    np.testing.assert_array_equal(np.bincount(taus, minlength=len(counts)), counts)


@pytest.mark.slow
def test_a_bound_of_nothing_is_bulk_synchrony(reproduce):
    """Of M exponential times the largest is sum 1 / k, k to M, in the mean: nobody passes that."""
    import staleness_bound

    seconds, workers = 60, staleness_bound.WORKERS
    done = {
        bound: quick(
            staleness_bound.STUDY,
            {"straggler": "no", "bound": bound},
            [1, 2],
            [0.1],
            seconds=seconds,
        )["batches"]
        for bound in (0, "none")
    }
    harmonic = sum(1 / k for k in range(1, workers + 1))
    assert np.mean(done[0]) == pytest.approx(workers * seconds / harmonic, rel=0.2)
    assert np.mean(done["none"]) == pytest.approx(workers * seconds, rel=0.1)


@pytest.mark.slow
def test_convolution_and_recurrence_side_by_side_are_those_of_keras(reproduce):
    import side_by_side

    x = np.random.default_rng(0).standard_normal((2, 5, 64)).astype("float32")  # seeds, batch
    convolution = side_by_side.Convolution(3, [1, 2], side=8, filters=4)
    found = convolution(x[None])
    layer = keras.layers.Conv2D(4, 3, activation="relu")
    layer.build((None, 8, 8, 1))
    layer.set_weights([np.reshape(convolution.dense.kernel[2, 1], (3, 3, 1, 4)), np.zeros(4)])
    expected = np.reshape(layer(x[1].reshape(5, 8, 8, 1)), (5, -1))
    np.testing.assert_allclose(found[2, 1], expected, atol=1e-5)

    recurrent = side_by_side.Recurrent(3, [1, 2], steps=8, units=6)
    found = recurrent(x[None])
    layer = keras.layers.SimpleRNN(6)
    layer.build((None, 8, 8))
    weights = [recurrent.of_input.kernel[2, 1], recurrent.of_state.kernel[2, 1], np.zeros(6)]
    layer.set_weights(weights)
    np.testing.assert_allclose(found[2, 1], layer(x[1].reshape(5, 8, 8)), atol=1e-5)


STUDIES = {
    "averaging_period": {"period": 4},
    "averaging_policies": {"optimizer": "Adam", "period": 4, "state": "reset"},
    "bmuf": {"workers": 4, "period": 8, "method": "BMUF, Nesterov"},
    "diloco": {"period": 4, "method": "DiLoCo"},
    "downpour_adagrad": {"task": "convolution", "workers": 16, "optimizer": "Adagrad"},
    "elastic": {"workers": 4, "period": 4, "method": "EAMSGD"},
    "explicit_momentum": {"workers": 4, "momentum": 0.6},
    "softsync_learning": {"n": 15, "scaling": "alpha_0 / tau"},
    "warm_start": {"optimizer": "SGD", "warm_start": 300},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", STUDIES)
def test_a_study_learns(reproduce, name):
    study = __import__(name).STUDY
    condition = STUDIES[name]
    assert study.name == name and condition in list(study.conditions)
    low, high = study.grid(condition)
    rates = [2.0 ** ((low + high) // 2), 2.0 ** (high - 2)]
    found = quick(study, condition, [1, 2], rates)
    for values in found.values():
        assert np.shape(values) == (2, 2) and np.isfinite(values).all()
    assert np.min(found["error"]) < 85.0  # per cent; chance is 90


@pytest.mark.slow
def test_the_study_of_momentum_finds_it(reproduce):
    """With three workers, which the page has not: two thirds, at a third of the rate."""
    import implicit_momentum

    condition = {"mini-batch": "exponential", "workers": 3}
    options = argparse.Namespace(repetitions=20)
    found = implicit_momentum.run(condition, [1, 2, 3, 4, 5], [1.0], options)
    for name, expected, most in (("momentum", 2 / 3, 0.1), ("rate_measured", 0.1 / 3, 0.01)):
        (values,) = found[name]
        error = np.std(values, ddof=1) / 5**0.5
        assert error < most / 3
        assert abs(np.mean(values) - expected) < 4.6 * error  # t of 4 at 99 %


@pytest.mark.slow
def test_seconds_are_measured_beside_plain_fit(reproduce):
    study = __import__("averaging_seconds").STUDY
    for condition in ({"workers": "plain", "period": 0}, {"workers": "two", "period": 4}):
        assert condition in list(study.conditions)
        found = quick(study, condition, [1, 2], [1.0])
        assert set(found) == {"seconds", "cpu_seconds"}
        for ((first, second),) in found.values():
            assert 0 < first < 60 and 0 < second < 60 and first != second


def test_what_averages_wait_for_is_the_last_of_the_workers(reproduce):
    """The committed seconds of BMUF, by order statistics that are drawn in NumPy."""
    import bmuf_seconds
    import pages

    results = pages.results_of(pages.read("bmuf_seconds"))
    random = np.random.default_rng(0)
    draw = {
        "log-normal": lambda shape: random.lognormal(-(0.3**2) / 2, 0.3, shape),
        "exponential": lambda shape: random.exponential(1.0, shape),
    }
    compared = 0
    for condition in results.conditions():
        workers, period, time = (condition[name] for name in ("workers", "period", "time"))
        if workers == 1:
            continue
        messages = random.exponential(bmuf_seconds.MESSAGE_SECONDS, (2, 4000, workers)).sum(0)
        last = (draw[time]((4000, workers, period)).sum(-1) + messages).max(-1)
        seconds = results.judged(condition, "worker_seconds", results.seeds(condition))
        np.testing.assert_allclose(seconds.mean(), last.mean() / period, rtol=0.03)
        compared += 1
    assert compared == 24


SYSTEMS = {
    "a3c": {"workers": 2},
    "bmuf_seconds": {"workers": 4, "period": 8, "time": "exponential"},
    "half_sync": {"way": "half-synchronous"},
    "hogwild": {"problem": "completion", "density": 0.016, "contender": "round-robin"},
    "strom": {"codec": "Threshold 0.064", "link": 100},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SYSTEMS)
def test_a_study_of_a_system_runs(reproduce, name):
    study = __import__(name).STUDY
    assert study.name == name and SYSTEMS[name] in list(study.conditions)
    rate = 2.0 ** study.grid(SYSTEMS[name])[1]
    found = quick(study, SYSTEMS[name], [1], [rate])
    assert study.chosen_by in found
    for values in found.values():
        assert np.shape(values) == (1, 1) and np.isfinite(values).all()
    if name == "strom":
        assert found["bytes"][0][0] < 307_240 / 20


@pytest.mark.slow
def test_sandblaster_has_the_same_iterates_with_ten_times_as_many_replicas(reproduce):
    import sandblaster_seconds as sandblaster

    few = sandblaster.errors("L-BFGS", 16, 1.0, 1, 60).seen[:2]
    many = sandblaster.errors("L-BFGS", 160, 1.0, 1, 9).seen[:2]
    (late, few_errors), (early, many_errors) = (zip(*each, strict=True) for each in (few, many))
    assert few_errors == pytest.approx(many_errors, abs=0.2)  # sums of float32 in other orders
    assert late[-1] > 5 * early[-1]


def test_of_sandblaster_no_error_below_that_at_which_runs_end_is_compared(reproduce, monkeypatch):
    import sandblaster_seconds as sandblaster

    seen = {1: [(30.0, 40.0), (70.0, 25.1)], 2: [(30.0, 27.0), (70.0, 25.5)]}
    monkeypatch.setattr(
        sandblaster, "errors", lambda *given: types.SimpleNamespace(seen=seen[given[3]])
    )

    def found(until):
        condition = {"method": "Adagrad", "replicas": 16, "until": until}
        options = types.SimpleNamespace(per_cent=100)
        return sandblaster.run(condition, [1, 2], [0.1], options)["error"]

    assert found(20) == [[90.0, 90.0]]  # nothing was judged yet: chance
    assert found(40) == [[40.0, 27.0]]
    assert found(80) == [[26.0, 26.0]]  # both had ended, so neither is ahead


def test_every_cell_of_a_claim_is_a_condition_of_its_study(reproduce):
    """So that a claim cannot wait for what nobody runs."""
    import claims
    import evidence

    for claim in claims.CLAIMS:
        study = __import__(claim.study).STUDY
        tuned = {
            evidence.key({k: v for k, v in c.items() if k not in study.tuned})
            for c in study.conditions
        }
        assert claim.cells
        for cell in claim.cells:
            for side in (cell.a, cell.b, *(cell.beside or ()), cell.at):
                if isinstance(side, dict):
                    given = side in list(study.conditions)  # what is tuned among it
                    assert given or evidence.key(side) in tuned, (claim.name, side)
