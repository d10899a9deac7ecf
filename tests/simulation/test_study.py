"""The study driver: one loop in the graph, equal to the simulator on the same schedule."""

import dataclasses

import keras
import numpy as np
import pytest

import tf_dsgd
from tests.contract import sketches
from tf_dsgd.algorithm import Algorithm
from tf_dsgd.algorithms.averaging import SendWeights, Together, WeightedMean
from tf_dsgd.algorithms.downpour import AccrueGradient, CompiledOptimizer, Periods
from tf_dsgd.simulation.study import Study, timetable
from tf_dsgd.strategies.base import DistributedStrategy

pytestmark = pytest.mark.medium

BATCH, BATCHES, WORKERS = 4, 90, 4


def make_model(optimizer, dropout=0.0):
    keras.utils.set_random_seed(9)
    model = keras.Sequential(
        [
            keras.Input((6,)),
            keras.layers.Dense(8, "tanh"),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(dropout),
            keras.layers.Dense(1),
        ]
    )
    model.compile(optimizer(), "mse", metrics=["mae"])
    return model


def data():
    random = np.random.default_rng(2)
    x = random.standard_normal((BATCH * BATCHES, 6)).astype("float32")
    return x, np.sin(x.sum(1, keepdims=True))


def cluster():
    return tf_dsgd.SimulatedCluster(
        WORKERS,
        compute_seconds=tf_dsgd.Exponential(1.0),
        network_seconds=[0.0, 0.3, 0.0, 0.1],
        seed=4,
    )


def simulated(algorithm, optimizer, dropout):
    x, y = data()
    strategy = DistributedStrategy(cluster(), algorithm)
    with strategy.scope():
        model = make_model(optimizer, dropout)
    model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)
    return strategy, model


def downpour(push_every=1, fetch_every=1, **options):
    local = AccrueGradient(push_every=push_every, fetch_every=fetch_every)
    return Algorithm(local, Periods(push_every, fetch_every, **options), CompiledOptimizer())


OPTIMIZERS = {
    "momentum": lambda: keras.optimizers.SGD(0.002, momentum=0.9),
    "adam": lambda: keras.optimizers.Adam(0.01),
}
ALGORITHMS = {
    "downpour": downpour(),
    "downpour_3_2": downpour(3, 2),
    "downpour_4_4_bounded": downpour(4, 4, max_staleness=1),
    "softsync": sketches.softsync(4),  # 90 batches: two are left for the drain
    "revision": sketches.adaptive_revision(0.05),
    "averaging": Algorithm(SendWeights("average"), Together(4, 4), WeightedMean()),
    "averaging_local": Algorithm(SendWeights("local"), Together(4, 4), WeightedMean()),
}


# XLA takes some seconds to compile a loop, so that it is tried on two of the rules.
CASES = [("downpour", "adam", True), ("downpour_3_2", "adam", False)]
CASES += [(name, "momentum", False) for name in ("averaging", "revision")]
CASES += [
    pytest.param(*case, marks=pytest.mark.slow)
    for case in [*((name, "momentum", False) for name in ALGORITHMS), ("softsync", "adam", True)]
    if case not in CASES
]


@pytest.mark.few(1)
@pytest.mark.parametrize(("algorithm", "optimizer", "jit"), CASES)
def test_equal_to_the_simulator(algorithm, optimizer, jit):
    """Bit for bit, dropout included; compiled by XLA, up to rounding, and without dropout."""
    rules, make = ALGORITHMS[algorithm], OPTIMIZERS[optimizer]
    dropout = 0.0 if jit else 0.3
    strategy, model = simulated(rules, make, dropout)
    x, y = data()
    study = Study(rules, WORKERS, lambda: make_model(make, dropout), x, y, BATCH, jit_compile=jit)
    study.run(timetable(cluster(), rules.exchange, BATCHES))
    assert study.strategy.updates == strategy.updates
    assert study.strategy.staleness() == strategy.staleness()
    assert study.strategy.ledger() == strategy.ledger()
    for a, b in zip(study.model.get_weights(), model.get_weights(), strict=True):
        assert np.all(np.isfinite(a))
        if jit:
            np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4)
        else:
            np.testing.assert_array_equal(a, b)
    mine, theirs = study.model.get_metrics_result(), model.get_metrics_result()
    assert float(mine["mae"]) == pytest.approx(float(theirs["mae"]), rel=1e-3 if jit else 1e-6)


@pytest.mark.parametrize("codec", [tf_dsgd.compression.EFSign(), tf_dsgd.compression.QSGD(4)])
def test_what_each_worker_holds_back_is_known(codec):
    rules, make = dataclasses.replace(downpour(3, 2), codec=codec), OPTIMIZERS["momentum"]
    strategy, _ = simulated(rules, make, 0.0)
    study = Study(rules, WORKERS, lambda: make_model(make), *data(), BATCH, jit_compile=False)
    study.run(timetable(cluster(), rules.exchange, BATCHES))
    norms = study.strategy.residual()
    np.testing.assert_allclose(norms, strategy.residual(), rtol=1e-6)
    assert len(set(norms)) == (WORKERS if codec.held_back else 1)


def test_a_timetable_is_what_the_simulator_does():
    rules = downpour(3, 2)
    strategy = DistributedStrategy(cluster(), rules)
    with strategy.scope():
        model = make_model(OPTIMIZERS["adam"])
    x, y = data()
    with strategy.recording() as schedule:
        model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)
    unversioned = [e[:2] if e[1] == "fetch" else e for e in schedule]
    assert timetable(cluster(), rules.exchange, BATCHES) == unversioned


def test_a_timetable_until_a_second():
    exchange = downpour().exchange
    whole = timetable(cluster(), exchange, 40)
    assert len(whole.seconds) == len(whole) and whole.seconds == sorted(whole.seconds)
    middle = whole.seconds[len(whole) // 2]
    part = whole.until(middle)
    assert part == whole[: len(part)] and part.seconds[-1] == middle < whole.seconds[len(part)]
    assert whole.until(-1.0) == [] and whole.until(1e9) == whole


@pytest.mark.parametrize("kind", ["downpour", "averaging"])
def test_a_study_begun_anew_is_a_new_one(kind):
    """Whatever ran before, and with the first weights that it is given."""
    averaging = Algorithm(SendWeights("average"), Together(4, 4), WeightedMean())
    algorithm = downpour(2, 3) if kind == "downpour" else averaging
    schedule = timetable(cluster(), algorithm.exchange, 36)
    x, y = data()

    def study(scale):
        made = Study(
            algorithm, WORKERS, lambda: make_model(keras.optimizers.Adam), x, y, BATCH, False
        )
        made.begin_anew(
            lambda: made.model.set_weights([scale * w for w in made.model.get_weights()])
        )
        return made

    used, new = study(1.0), study(0.5)
    used.run(schedule[: len(schedule) // 2])
    used.begin_anew(lambda: used.model.set_weights([0.5 * w for w in used.model.get_weights()]))
    for each in (used, new):
        each.run(schedule)
    for a, b in zip(used.model.get_weights(), new.model.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)
    assert (used.strategy.steps, used.strategy.updates) == (
        new.strategy.steps,
        new.strategy.updates,
    )
    late = Study(algorithm, WORKERS, lambda: make_model(keras.optimizers.Adam), x, y, BATCH, False)
    late.run([])
    with pytest.raises(RuntimeError, match="before the first run, too"):
        late.begin_anew()


def test_what_a_study_cannot_do_is_refused():
    x, y = data()
    make = OPTIMIZERS["momentum"]
    study = Study(downpour(), WORKERS, lambda: make_model(make), x, y, BATCH)
    with pytest.raises(ValueError, match="cannot flush"):
        study.run([(0, "fetch"), (0, "push"), (0, "flush")])
    with pytest.raises(RuntimeError, match=r"Study\.run"):
        study.model.fit(x, y, batch_size=BATCH, verbose=0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"algorithm": "downpour"}, "algorithm must be .*'downpour'"),
        ({"num_workers": 0}, "num_workers must be .*0"),
        ({"batch_size": 0}, "batch_size must be .*0"),
        ({"batch_size": 1.5}, "batch_size must be .*1.5"),
        ({"batch_size": 1000}, "at least batch_size of them.*1000"),
        ({"y": np.zeros((3, 1))}, "as many examples.*360 and 3"),
        ({"make_model": 5}, "make_model must be a function.*5"),
        ({"make_model": lambda: None}, "make_model must be .*None"),
        ({"make_model": lambda: keras.Sequential([keras.layers.Dense(1)])}, "a compiled"),
    ],
)
def test_wrong_arguments_of_a_study(changes, message):
    x, y = data()
    arguments = {"algorithm": downpour(), "num_workers": 2, "x": x, "y": y, "batch_size": BATCH}
    arguments["make_model"] = lambda: make_model(OPTIMIZERS["adam"])
    with pytest.raises((ValueError, TypeError), match=message):
        Study(**{**arguments, **changes})


def test_wrong_arguments_of_a_timetable():
    with pytest.raises(TypeError, match=r"SimulatedCluster.*LocalCluster"):
        timetable(tf_dsgd.LocalCluster(2), Periods(), 8)
    with pytest.raises(ValueError, match=r"num_batches must be .*0"):
        timetable(cluster(), Periods(), 0)
    with pytest.raises(TypeError, match=r"exchange must be .*5"):
        timetable(cluster(), 5, 8)
    schedule = [(0, "fetch"), (0, "push", (0,))]
    for option, value, words in (
        ("network_bytes_per_second", 1e6, "leave network_bytes_per_second out"),
        ("faults", [tf_dsgd.faults.fail_at(1, 2)], "leave faults and late_after_seconds out"),
        ("late_after_seconds", 2.0, "leave faults and late_after_seconds out"),
        ("schedule", schedule, r"give its schedule to Study\.run"),
    ):
        with pytest.raises(ValueError, match=words):
            timetable(tf_dsgd.SimulatedCluster(2, **{option: value}), Periods(), 8)
