"""What `PeriodicAveraging` does in one process: arguments, TF_CONFIG, and what a reset sets."""

from collections.abc import Mapping

import keras
import numpy as np
import pytest

import tf_dsgd
from tests import helpers
from tests.cluster import processes
from tf_dsgd import _tf
from tf_dsgd.spmd import collectives, exchange
from tf_dsgd.spmd.model_state import ModelState, number_of
from tf_dsgd.spmd.optimizers import optimizers_of
from tf_dsgd.transport import cluster_spec

PeriodicAveraging = tf_dsgd.callbacks.PeriodicAveraging


@pytest.fixture(autouse=True)
def _no_cluster(monkeypatch):
    monkeypatch.delenv("TF_CONFIG", raising=False)
    monkeypatch.setattr(collectives, "_group", None)


@pytest.fixture
def alone():
    """A group of one, which averages with itself."""
    config = processes.tf_config("worker", 0, worker=["127.0.0.1:1"])
    return collectives.Group(cluster_spec.from_tf_config(config, ps=False), 1.0)


def linear(optimizer, **compile_args):
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile(optimizer, "mse", **compile_args)
    return model


def test_a_strategys_cluster_is_refused(monkeypatch):
    config = processes.tf_config("worker", 0, worker=["127.0.0.1:1"], ps=["127.0.0.1:2"])
    monkeypatch.setenv("TF_CONFIG", config)
    with pytest.raises(ValueError, match=r"has ps tasks.*launch --spmd"):
        PeriodicAveraging()


def test_workers_that_are_left_out_are_refused(monkeypatch):
    config = processes.tf_config("worker", 2, worker={"0": "127.0.0.1:1", "2": "127.0.0.1:2"})
    monkeypatch.setenv("TF_CONFIG", config)
    with pytest.raises(ValueError, match=r"has the indices 0, 2\. Name all tasks"):
        PeriodicAveraging()


def test_another_cluster_in_the_same_process_is_refused(monkeypatch):
    for port in (1, 2):
        config = processes.tf_config("worker", 0, worker=[f"127.0.0.1:{port}"])
        monkeypatch.setenv("TF_CONFIG", config)
        if port == 1:
            assert PeriodicAveraging().num_workers == 1
    with pytest.raises(ValueError, match="TF_CONFIG has changed"):
        PeriodicAveraging()


def test_workers_are_numbered_with_the_chief_first(monkeypatch):
    jobs = {"chief": ["127.0.0.1:1"], "worker": ["127.0.0.1:2", "127.0.0.1:3"]}
    monkeypatch.setenv("TF_CONFIG", processes.tf_config("worker", 1, **jobs))
    callback = PeriodicAveraging()
    assert (callback.num_workers, callback.worker_index) == (3, 2)


@pytest.mark.parametrize("config", [None, processes.tf_config("worker", 0, worker=["h:1"])])
def test_alone_it_does_nothing_to_fit(monkeypatch, config):
    if config:
        monkeypatch.setenv("TF_CONFIG", config)
    x, y = helpers.regression(40, 3, ids=False)
    results = []
    for callbacks in ([], [PeriodicAveraging(2, optimizer_state="reset")]):
        model = linear(keras.optimizers.Adam(0.1), metrics=["mae"])
        options = {"batch_size": 4, "epochs": 2, "verbose": 0, "shuffle": False}
        history = model.fit(x, y, validation_split=0.2, callbacks=callbacks, **options).history
        results.append((history, [w.numpy() for w in model.weights]))
    callback = PeriodicAveraging()
    callback.start(model)
    callback.average(model)
    assert (callback.num_workers, callback.worker_index, callback.averages) == (1, 0, 0)
    assert results[0][0] == results[1][0]
    helpers.assert_close(results[0][1], results[1][1], 0.0)


OPTIMIZERS = {
    "momentum": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
    "adam": lambda: keras.optimizers.Adam(0.1),
    "nadam": lambda: keras.optimizers.Nadam(0.1),  # it keeps a product that begins at 1
    "adagrad": lambda: keras.optimizers.Adagrad(0.1, initial_accumulator_value=0.3),
    "ftrl": lambda: keras.optimizers.Ftrl(0.1, initial_accumulator_value=0.2),
    "lion": lambda: keras.optimizers.Lion(0.1),
    "scaled": lambda: keras.optimizers.LossScaleOptimizer(
        keras.optimizers.Adam(0.1), initial_scale=8.0, dynamic_growth_steps=2
    ),
    "delayed": lambda: tf_dsgd.optimizers.AdaptiveRevision(0.1),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_after_a_reset_an_optimizer_goes_on_as_a_new_one(alone, name):
    """The next steps equal those of an optimizer that was just made, on the same weights."""
    x, y = helpers.regression(24, 3, ids=False)
    used, fresh = linear(OPTIMIZERS[name]()), linear(OPTIMIZERS[name]())
    for each in (used, fresh):
        each.optimizer.build(each.trainable_variables)
    used.fit(x, y, batch_size=4, verbose=0)
    state = ModelState(used, used.optimizer, "reset", alone)
    state.offer()
    state.average()
    fresh.set_weights(used.get_weights())
    scale = getattr(used.optimizer, "dynamic_scale", None)
    if scale is not None:
        assert float(scale) == 8.0 * 2**3  # doubled every 2 steps, and not reset
    for model in (used, fresh):
        model.fit(x, y, batch_size=4, verbose=0, shuffle=False)
    helpers.assert_close(used.get_weights(), fresh.get_weights(), 1e-6)
    assert int(used.optimizer.iterations) == 6
    state.end_steps()
    assert int(used.optimizer.iterations) == 12
    state.begin_steps()
    assert int(used.optimizer.iterations) == 0


def test_a_schedule_goes_on_over_a_reset(alone):
    schedule = keras.optimizers.schedules.ExponentialDecay(0.5, 1, 0.5)
    model = linear(keras.optimizers.SGD(schedule))
    state = ModelState(model, model.optimizer, "reset", alone)
    assert state.retrace()
    assert not state.retrace()
    x, y = helpers.regression(4, 3, ids=False)
    for step in range(7):
        assert float(model.optimizer.learning_rate) == pytest.approx(0.5 * 0.5**step)
        kernel = model.weights[0].numpy()
        error = x @ kernel + model.weights[1].numpy() - y
        model.train_on_batch(x, y)
        slope = 2 * x.T @ error / 4
        want = kernel - 0.5 * 0.5**step * slope
        np.testing.assert_allclose(model.weights[0].numpy(), want, rtol=1e-5, atol=1e-6)
        if step in (1, 2, 5):
            state.offer()
            state.average()
            assert int(model.optimizer.iterations) == 0


def test_a_reset_does_not_break_an_accumulation_of_gradients(alone):
    """Of three mini-batches; the reset comes after the fourth, and the sixth makes the update."""
    x, y = helpers.regression(24, 3, ids=False)
    pair = []
    for policy in ("reset", None):
        model = linear(keras.optimizers.SGD(0.1, gradient_accumulation_steps=3))
        model.optimizer.build(model.trainable_variables)
        state = policy and ModelState(model, model.optimizer, policy, alone)
        for k in range(6):
            model.train_on_batch(x[4 * k : 4 * k + 4], y[4 * k : 4 * k + 4])
            if state and k == 3:
                state.offer()
                state.average()
        pair.append(model.get_weights())
    helpers.assert_close(pair[0], pair[1], 1e-7)


@pytest.mark.parametrize(
    ("optimizer", "words"),
    [
        (lambda: keras.optimizers.Adam(use_ema=True), "does not go with use_ema=True of Adam"),
        (
            lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(use_ema=True)),
            "use_ema=True of SGD",
        ),
        (
            lambda: keras.optimizers.MultiOptimizer(lambda variable: keras.optimizers.SGD()),
            "does not work with MultiOptimizer",
        ),
        (lambda: NoConfig(0.1), "make another NoConfig from its get_config(), which fails"),
    ],
)
def test_a_reset_that_cannot_be_right_is_refused(alone, optimizer, words):
    model = linear(optimizer())
    with pytest.raises(ValueError) as caught:
        ModelState(model, model.optimizer, "reset", alone)
    assert words in str(caught.value)
    assert '"average" or "local"' in str(caught.value)


class NoConfig(keras.optimizers.SGD):
    """Its constructor has an argument that its configuration lacks."""

    def __init__(self, rate, **options):
        super().__init__(rate)

    def get_config(self):
        return {}


@pytest.mark.parametrize("policy", ["average", "local"])
def test_what_is_averaged_of_an_optimizer(alone, policy):
    """The arrays that go to the group, by policy; the averages of weights (EMA) always do."""
    optimizer = keras.optimizers.Adam(0.1, use_ema=True, gradient_accumulation_steps=2)
    model = linear(optimizer)
    state = ModelState(model, optimizer, policy, alone)
    paths = [v.path.split("/")[-1] for v in state._averaged]
    counts = {
        kind: sum(name.endswith(kind) for name in paths)
        for kind in ("_average", "_momentum", "_velocity", "_gradient_accumulator")
    }
    two = 2 if policy == "average" else 0
    assert counts == {
        "_average": 2,
        "_momentum": two,
        "_velocity": two,
        "_gradient_accumulator": two,
    }
    assert ("iteration" in paths) == (policy == "average")
    assert "learning_rate" not in paths


class Pretended:
    """A group as one of its processes sees it, where what the others say is known beforehand."""

    size = 3

    def __init__(self, rank, first=None, rows=None):
        self.rank, self._first, self._rows = rank, first, rows
        self.made = {}

    def broadcast(self, arrays):
        return list(arrays) if self._first is None else self._first

    def meet(self, *numbers):
        rows = [numbers] * self.size if self._rows is None else list(self._rows)
        rows[self.rank] = numbers
        return np.array(rows, np.int64)


RATES = {
    "plain": lambda rate, **options: keras.optimizers.SGD(rate, **options),
    "scaled": lambda rate, **options: keras.optimizers.LossScaleOptimizer(
        keras.optimizers.SGD(rate, **options)
    ),
    "several": lambda rate, **options: keras.optimizers.MultiOptimizer(
        keras.optimizers.OptimizerMap(
            keras.optimizers.Adam(rate), {".*kernel": keras.optimizers.SGD(rate, **options)}
        )
    ),
}


@pytest.mark.parametrize("name", RATES)
def test_another_learning_rate_is_copied_and_not_compared(name):
    """Wherever it stands in the optimizer."""
    first, other, unlike = (
        linear(RATES[name](rate, momentum=momentum))
        for rate, momentum in ((0.5, 0.0), (0.25, 0.0), (0.5, 0.5))
    )
    told = ModelState(first, None, "average", Pretended(0))
    variables = [*first.weights, *told._optimizers[0].variables()]
    state = ModelState(other, None, "average", Pretended(1, [v.numpy() for v in variables]))
    assert state.describe() == told.describe()
    assert state.describe() != ModelState(unlike, None, "average", Pretended(1)).describe()
    state.copy_first()
    rates = [v for kind, v in _tf.optimizer_variables(other.optimizer) if kind == "rate"]
    assert {float(v) for v in rates} - {0.0} == {0.5}  # 0: of what has others in it


class Archive(Mapping):
    """As `numpy.load` gives one: each value is read as it is asked for."""

    def __getitem__(self, key):
        raise AssertionError("was read")

    def __iter__(self):
        return iter(["array"])

    def __len__(self):
        return 1


def test_optimizers_are_found_by_the_attributes_that_a_model_has_now():
    model, make = linear("sgd"), keras.optimizers.SGD
    model.gone = make()
    model.gone = None
    model.archive = Archive()
    model.one, model.several = make(), {"a": [make(), (make(),)]}
    model.pair = (make(), 1)
    assert sorted(where for where, _ in optimizers_of(model)) == [
        "",
        "one",
        "pair[0]",
        "several['a'][0]",
        "several['a'][1][0]",
    ]


class Warm(keras.optimizers.schedules.LearningRateSchedule):
    """A schedule whose configuration has a rate, and a name that means something."""

    def __init__(self, learning_rate, name="linear"):
        self.learning_rate, self.name = learning_rate, name

    def __call__(self, step):
        return self.learning_rate

    def get_config(self):
        return {"learning_rate": self.learning_rate, "name": self.name}


@pytest.mark.parametrize("other", [Warm(0.25), Warm(0.5, "cosine")])
def test_a_schedule_of_ones_own_is_compared_whole(other):
    """Nothing of it is copied."""
    told, same, unlike = (
        ModelState(linear(keras.optimizers.SGD(schedule)), None, "average", Pretended(0)).describe()
        for schedule in (Warm(0.5), Warm(0.5), other)
    )
    assert told == same
    assert told != unlike


def test_an_optimizer_that_counts_on_is_averaged_once_it_is_built(alone):
    """Its count was set by hand, so that a schedule goes on."""
    model = linear("sgd")
    model.other = keras.optimizers.Adam(0.1)
    model.other.iterations.assign(5)
    state = ModelState(model, None, "average", alone)
    state.copy_first()
    for built in (False, True):
        if built:
            model.other.build(model.trainable_variables)
        state.offer()
        state.average()
        averaged = {id(v) for v in state._averaged}
        assert [id(v) in averaged for v in model.other.variables[2:]] == [True] * 4 * built


@pytest.mark.parametrize("scaled", [False, True])
def test_the_parts_of_an_optimizer_are_not_the_models_own_whether_it_is_built_or_not(scaled):
    """A `MultiOptimizer` with a callable knows its parts once it is built."""

    def make(built):
        model = linear("sgd")
        model.parts = {"kernel": keras.optimizers.SGD(0.5), "bias": keras.optimizers.Adam(0.1)}

        def part_of(variable):
            return model.parts[variable.name]

        optimizer = keras.optimizers.MultiOptimizer(part_of)
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer) if scaled else optimizer
        model.compile(optimizer, "mse")
        if built:
            optimizer.build(model.trainable_variables)
        return model

    fresh, used = (ModelState(make(built), None, "average", Pretended(0)) for built in (0, 1))
    assert [type(each.optimizer) for each in fresh._optimizers] == [
        keras.optimizers.LossScaleOptimizer if scaled else keras.optimizers.MultiOptimizer
    ]
    assert fresh.describe() == used.describe()


@pytest.mark.parametrize(
    ("seeds", "changed"),
    [
        ([[1, 2], [1, 2], [1, 2]], [[], [0, 1], [0, 1]]),
        ([[1, 2], [1, 3], [4, 2]], [[], [0], [1]]),  # one of two differs
        ([[1, 2], [3, 4], [3, 5]], [[], [], [0]]),  # equal to one that is not the first
        ([[1, 2], [3, 4], [5, 6]], [[], [], []]),
    ],
)
def test_each_random_state_that_equals_another_workers_is_changed(seeds, changed):
    """Of two layers with dropout, in three workers."""
    layers = [keras.layers.Dropout(0.5), keras.layers.Dense(1), keras.layers.Dropout(0.5)]
    model = keras.Sequential([keras.Input((3,)), *layers])
    states = [layer.seed_generator.state for layer in (layers[0], layers[2])]

    rows, after = [], []
    for mine in seeds:
        rows.append([number_of(np.array([seed, 7], states[0].dtype)) for seed in mine])
    for rank, mine in enumerate(seeds):
        for variable, seed in zip(states, mine, strict=True):
            variable.assign([seed, 7])
        group = Pretended(rank, rows=rows)
        ModelState(model, None, "average", group).copy_first()
        after.append([v.numpy().tolist() for v in states])
    for rank, found in enumerate(after):
        assert [k for k in (0, 1) if found[k][0] != seeds[rank][k]] == changed[rank]
        assert [count for _, count in found] == [7, 7]
    for k in (0, 1):
        assert len({found[k][0] for found in after}) == 3


def test_a_model_without_weights_is_refused(monkeypatch):
    config = processes.tf_config("worker", 0, worker=["127.0.0.1:1", "127.0.0.1:2"])
    monkeypatch.setenv("TF_CONFIG", config)
    with pytest.raises(ValueError, match="which is not built"):
        PeriodicAveraging().start(keras.Sequential([keras.layers.Dense(1)]))


def test_a_model_under_a_strategy_is_refused(monkeypatch):
    with tf_dsgd.DownpourStrategy(tf_dsgd.LocalCluster(2)).scope():
        model = linear("sgd")
    config = processes.tf_config("worker", 0, worker=["127.0.0.1:1", "127.0.0.1:2"])
    monkeypatch.setenv("TF_CONFIG", config)
    with pytest.raises(ValueError, match=r"under: DownpourStrategy\.$"):
        PeriodicAveraging().start(model)


def test_integers_have_no_mean(alone):
    with pytest.raises(ValueError, match='"mean" is for floating-point arrays'):
        exchange.exchange(alone, [exchange.Spec((2,), np.int32, "mean")])
