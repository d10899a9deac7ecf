"""`PeriodicAveraging` in two processes, against one process, NumPy, or averages made by hand."""

import pickle

import keras
import numpy as np
import pytest

from tests import helpers
from tests.cluster import processes
from tests.cluster import spmd_models as models

pytestmark = [pytest.mark.slow, pytest.mark.beside_others]

SCRIPT = str(processes.helpers.ROOT / "tests/cluster/scripts/averaging.py")


@pytest.fixture(scope="module")
def outcome(tmp_path_factory):
    """What both workers wrote down, by way."""
    return run(tmp_path_factory.mktemp("averaging"), 2)


def run(folder, number, *ways, script=SCRIPT):
    launch = ("-m", "tf_dsgd.launch", "--workers", str(number), "--spmd", "--prefix_chief")
    with processes.started(*launch, script, str(folder), *ways) as process:
        code, _ = process.wait(240.0)
    assert code == 0, process.text[-6000:]
    found = {}
    for path in sorted(folder.glob("*.pickle")):
        found.setdefault(path.name.split(".")[0], []).append(pickle.loads(path.read_bytes()))
    return found


def twins(make, examples=28, epochs=1, period=3, parts=None):
    """Two models trained in turns in this process, and averaged by NumPy."""
    pair = [make(0), make(1)]
    for model in pair:
        model.set_weights(pair[0].get_weights())
    data = parts or [models.data(worker, examples) for worker in (0, 1)]
    steps = examples // models.BATCH
    step, due = 0, period(0) if callable(period) else period
    for _ in range(epochs):
        for k in range(steps):
            rows = slice(models.BATCH * k, models.BATCH * (k + 1))
            for model, (x, y) in zip(pair, data, strict=True):
                model.train_on_batch(x[rows], y[rows])
            step += 1
            if step >= due or k == steps - 1:
                yield step, pair
                due = step + (period(step) if callable(period) else period)


def mean_weights(pair):
    for together in zip(*(model.weights for model in pair), strict=True):
        mean = np.mean([w.numpy() for w in together], axis=0)
        for weight in together:
            weight.assign(mean)


def check_collectives(workers):
    given = [[np.asarray(x, np.float64) for x in worker["arrays"]] for worker in workers]
    hows = ["mean", "sum", "mean", "mean", "sum", "first", "first", "mean", "mean"]
    ways = {"mean": lambda a: np.mean(a, 0), "sum": lambda a: np.sum(a, 0), "first": lambda a: a[0]}
    want = [ways[how](each) for how, each in zip(hows, zip(*given, strict=True), strict=True)]
    tolerances = [1e-6, 1e-12, 1e-3, 1e-2, 0, 0, 0, 1e-6, 0]
    first = workers[0]
    for worker in workers:
        results = zip(worker["exchanged"], want, worker["arrays"], tolerances, strict=True)
        for got, expected, array, tolerance in results:
            assert got.dtype == array.dtype and got.shape == array.shape
            np.testing.assert_allclose(
                got.astype(np.float64), expected, rtol=tolerance, atol=tolerance
            )
        for got, same in zip(worker["exchanged"], first["exchanged"], strict=True):
            assert got.tobytes() == same.tobytes()  # bit for bit
        for got, expected in zip(worker["copied"], first["arrays"], strict=True):
            assert got.dtype == expected.dtype
            np.testing.assert_array_equal(got, expected)
        assert worker["met"].tolist() == [[k, 5] for k in range(len(workers))]
        assert worker["texts"] == ["ä" * (1 + 20 * k) for k in range(len(workers))]


def test_sums_means_and_copies_of_every_type(outcome):
    check_collectives(outcome["collective"])


def test_three_workers_which_add_up_a_part_each(tmp_path):
    outcome = run(tmp_path, 3, "collective", "averages_of_many")
    check_collectives(outcome["collective"])
    for worker in outcome["averages_of_many"]:
        # In each of 50 rounds worker k adds k + 1 to weights of which all then have the mean.
        np.testing.assert_array_equal(worker["weights"], np.full(9000, 50 * 2.0, "float32"))


def test_averaging_every_step_is_synchronous_sgd(outcome):
    """The joint mini-batch's gradient is the mean of the workers'; so are its logs."""
    model = models.curved(keras.optimizers.SGD(0.05))
    x, y = models.joint([models.data(worker, 28) for worker in (0, 1)])
    validation = [
        np.concatenate(p) for p in zip(*(models.data(w, 20, 1) for w in (0, 1)), strict=True)
    ]
    history = model.fit(
        *(x, y, 2 * models.BATCH, 3, 0), shuffle=False, validation_data=tuple(validation)
    ).history
    for worker in outcome["every_step"]:
        helpers.assert_close(worker["weights"], [w.numpy() for w in model.weights], 1e-6)
        assert list(worker["history"]) == list(history)
        for name, values in history.items():
            helpers.assert_close(worker["history"][name], values, 2e-6, name)
            # A callback after ours acts on the same numbers as History.
            assert [logs[name] for logs in worker["seen"]] == worker["history"][name]
    first, second = outcome["every_step"]
    assert first["history"] == second["history"]
    for a, b in zip(first["weights"], second["weights"], strict=True):
        np.testing.assert_array_equal(a, b)


def test_equal_data_is_one_process(outcome):
    model = models.curved(keras.optimizers.Adam(0.02))
    x, y = models.data(0, 28)
    history = model.fit(x, y, models.BATCH, 2, 0, shuffle=False).history
    averaged = models.curved(models.ema())
    averaged.fit(x, y, models.BATCH, 2, 0, shuffle=False)
    for worker in outcome["equal_data"]:
        for policy in ("average", "local"):
            got = worker[policy]
            helpers.assert_close(got["weights"], [w.numpy() for w in model.weights], 1e-6, policy)
            helpers.assert_close(got["history"]["loss"], history["loss"], 1e-6)
        helpers.assert_close(worker["scaled"]["weights"], [w.numpy() for w in model.weights], 1e-5)
        helpers.assert_close(worker["ema"]["weights"], [w.numpy() for w in averaged.weights], 1e-6)
        assert worker["scaled"]["scale"] == 4.0 * 2**2  # doubled at 5 and 10 of 14 steps


class Linear:
    """A worker's linear model, its gradient, Adam and Adagrad by hand in NumPy."""

    def __init__(self, worker, initial):
        self.x, self.y = (a.astype(np.float64) for a in models.data(worker, 28))
        self.w = [np.array(v, np.float64) for v in initial]

    def gradient(self, k):
        rows = slice(models.BATCH * k, models.BATCH * (k + 1))
        error = self.x[rows] @ self.w[0] + self.w[1] - self.y[rows]
        slope = 2 * error / models.BATCH
        return [self.x[rows].T @ slope, slope.sum(0)]


class Adam(Linear):
    def reset(self):
        self.t = 0
        self.slots = [np.zeros_like(w) for w in self.w for _ in "mv"]

    def step(self, k, step):
        self.t += 1
        rate = 0.2 if step <= 4 else 0.1 if step <= 9 else 0.05
        for i, g in enumerate(self.gradient(k)):
            m, v = self.slots[2 * i : 2 * i + 2]
            m += 0.1 * (g - m)
            v += 0.001 * (g * g - v)
            # Keras adds epsilon to the root of the uncorrected second moment.
            corrected = rate * np.sqrt(1 - 0.999**self.t) / (1 - 0.9**self.t)
            self.w[i] = self.w[i] - corrected * m / (np.sqrt(v) + 1e-3)


class Adagrad(Linear):
    def reset(self):
        self.slots = [np.full_like(w, 0.1) for w in self.w]

    def step(self, k, step):
        for i, g in enumerate(self.gradient(k)):
            self.slots[i] += g * g
            self.w[i] = self.w[i] - 0.3 * g / np.sqrt(self.slots[i] + 1e-7)


@pytest.mark.parametrize("policy", ["average", "local", "reset"])
@pytest.mark.parametrize(("name", "twin"), [("adam", Adam), ("adagrad", Adagrad)])
def test_policies_equal_their_twins(outcome, name, twin, policy):
    initial = [w.numpy() for w in models.linear("sgd").weights]
    pair = [twin(0, initial), twin(1, initial)]
    for worker in pair:
        worker.reset()
    for step in range(1, 15):
        for worker in pair:
            worker.step((step - 1) % 7, step - 1)
        if step in (3, 6, 7, 10, 13, 14):  # every 3 steps, and at both epochs' ends
            lists = ["w", "slots"] if policy == "average" else ["w"]
            for kind in lists:
                means = [np.mean(p, 0) for p in zip(*(getattr(w, kind) for w in pair), strict=True)]
                for worker in pair:
                    setattr(worker, kind, [mean.copy() for mean in means])
            if policy == "reset":
                for worker in pair:
                    worker.reset()
    for got, worker in zip(outcome["policies"], pair, strict=True):
        got = got[name, policy]
        helpers.assert_close(got["weights"], worker.w, 2e-5, "weights")
        by_shape = sorted(map(repr, (np.shape(s) for s in worker.slots)))
        assert sorted(repr(s.shape) for s in got["slots"]) == by_shape
        total = sum(float(np.sum(np.abs(s))) for s in worker.slots)
        assert sum(float(np.sum(np.abs(s))) for s in got["slots"]) == pytest.approx(total, rel=1e-4)
        assert got["iterations"] == [7, 14]
        assert got["averages"] == 6


@pytest.mark.parametrize("policy", ["average", "local", "reset"])
def test_each_optimizer_of_a_model_has_its_state_averaged(outcome, policy):
    """One makes its first step between two averages, and the compiled one never does."""
    for _, pair in twins(lambda _: models.two_parts()):
        mean_weights(pair)
        for together in zip(*(models.slots_of(model) for model in pair), strict=True):
            mean = np.mean([v.numpy() for v in together], axis=0)
            for slot in together if policy == "average" else ():
                slot.assign(mean)
        for optimizer in (o for m in pair for o in m.optimizers["parts"]):
            if policy == "reset":
                optimizer.iterations.assign(0)
                for slot in optimizer.variables[2:]:
                    slot.assign(np.zeros(slot.shape))
    for got, model in zip(outcome["several_optimizers"], pair, strict=True):
        helpers.assert_close(got[policy]["weights"], [w.numpy() for w in model.weights], 2e-5)
        want = [v.numpy() for v in models.slots_of(model)]
        helpers.assert_close(got[policy]["slots"], want, 2e-5)
        if policy == "average":
            assert got[policy]["averaged"] == [False, True, True]


def test_policies_differ(outcome):
    for name in models.OPTIMIZERS:
        kernels = [
            outcome["policies"][0][name, policy]["weights"][0]
            for policy in ("average", "local", "reset")
        ]
        for a, b in ((0, 1), (1, 2), (0, 2)):
            assert np.abs(kernels[a] - kernels[b]).max() > 1e-4, (name, a, b)


def test_moving_statistics_are_averaged_and_integers_are_the_first_workers(outcome):
    for _, pair in twins(models.normalised, period=4):
        floats = [[w for w in model.weights if w.dtype == "float32"] for model in pair]
        for together in zip(*floats, strict=True):
            mean = np.mean([w.numpy() for w in together], axis=0)
            for weight in together:
                weight.assign(mean)
    want = [w.numpy() for w in pair[0].weights]
    for got in outcome["statistics"]:
        assert [w.dtype for w in got["weights"]] == [w.dtype for w in want]
        helpers.assert_close(got["weights"], want, 1e-5)
        (calls,) = [w for w in got["weights"] if w.dtype == np.int32]
        assert calls.tolist() == [7, 7]  # worker 0 began at 0, worker 1 at 10


def test_constants_are_made_again_of_the_first_workers_weights(outcome):
    """So all train, validate and end as one process with worker 0's constants does."""
    model = models.adapted(0)
    x, y = models.data(0, 28)
    model.train_on_batch(x[:4], y[:4])
    x, y = models.joint([models.data(worker, 28) for worker in (0, 1)])
    history = model.fit(
        *(x, y, 2 * models.BATCH, 1, 0), shuffle=False, validation_data=models.data(0, 8, seed=1)
    ).history
    mean = keras.ops.convert_to_numpy(model.layers[0].layers[0].mean)
    for worker in outcome["constants"]:
        for got in worker["means"]:
            np.testing.assert_array_equal(got, mean)
        helpers.assert_close(worker["weights"], [w.numpy() for w in model.weights], 1e-5)
        for name, values in history.items():
            helpers.assert_close(worker["history"][name], values, 1e-5, name)


def test_random_states_become_different_where_a_seed_made_them_equal(outcome):
    first, second = (o["seeds"] for o in outcome["statistics"])
    assert len(first[0]) == 1
    np.testing.assert_array_equal(first[0], second[0])
    assert first[1][0][0] == first[0][0][0]  # worker 0's seed stays
    assert second[1][0][0] != first[1][0][0]
    assert second[1][0][1] == first[1][0][1]  # how often it was drawn from


def test_the_period_may_depend_on_the_step(outcome):
    def period(step):
        return 1 if step < 2 else 4

    for _, pair in twins(lambda _: models.linear("sgd"), 48, period=period):
        mean_weights(pair)
    for got in outcome["callable_period"]:
        # Tried as it is given; averages at 1, 2, 6, 10, and at the end of the epoch, 12.
        assert got["asked"] == [0, 0, 1, 2, 6, 10]
        assert got["averages"] == 5


def test_the_callable_periods_weights(outcome):
    def period(step):
        return 1 if step < 2 else 4

    make = lambda _: models.linear(keras.optimizers.SGD(0.05))  # noqa: E731
    for _, pair in twins(make, 48, period=period):
        mean_weights(pair)
    for got in outcome["callable_period"]:
        helpers.assert_close(got["weights"], [w.numpy() for w in pair[0].weights], 1e-5)


def test_what_is_due_within_an_execution_is_done_at_its_end(outcome):
    make = lambda _: models.linear(keras.optimizers.SGD(0.05))  # noqa: E731
    for _, pair in twins(make, 64, period=4):
        mean_weights(pair)
    for got in outcome["several_steps_at_once"]:
        assert got["averages"] == 4
        helpers.assert_close(got["weights"], [w.numpy() for w in pair[0].weights], 1e-5)


def test_an_execution_that_comes_to_the_end_of_the_data_counts_its_mini_batches(outcome):
    """What is due after 3 is done at 4; after 7, the end of the epoch, which Keras calls 8."""
    for got in outcome["incomplete_executions"]:
        # Tried as it is given. "endless" really has eight in an epoch.
        for name in ("arrays", "overflows", "unknown length"):
            assert got[name] == [0, 0, 4, 7, 11], name
        assert got["endless"] == [0, 0, 4, 8, 12]
        kind, text = got["unequal"]
        assert kind == "ValueError"
        assert "averages, step 7 (epoch 0); worker 1" in text
        assert "end of an epoch's training, step 5 (epoch 0)" in text


def test_a_loop_of_ones_own(outcome):
    first, second = outcome["own_loop"]
    begun = [w.numpy() for w in models.linear("sgd").weights]
    for worker in (first, second):
        helpers.assert_close(worker["first"], begun, 0.0)
        local = zip(first["local"], second["local"], strict=True)
        helpers.assert_close(worker["mean"], [(a + b) / 2 for a, b in local], 1e-6)
        others = zip(first["other"][0], second["other"][0], strict=True)
        helpers.assert_close(worker["other"][1], [(a + b) / 2 for a, b in others], 1e-6)
        helpers.assert_close(worker["slots"], first["slots"], 0.0)
    assert np.abs(first["local"][0] - second["local"][0]).max() > 1e-3
    assert np.abs(first["other"][0][0] - second["other"][0][0]).max() > 1e-3


def test_numbers_that_are_no_metrics_are_averaged(outcome):
    for worker in outcome["other_logs"]:
        assert worker["history"]["odd"] == [0.5]  # 0 on worker 0, 1 on worker 1


def test_a_loss_that_a_step_returns_itself_is_averaged(outcome):
    """And that of the other kind of step is the loss over all data, as metrics have it."""
    trained, validated = (
        [np.concatenate(p) for p in zip(*(models.data(w, n, s) for w, n in sizes), strict=True)]
        for s, sizes in ((0, [(0, 28), (1, 28)]), (1, [(0, 20), (1, 28)]))
    )
    model = models.linear("sgd")
    losses = {
        name: model.evaluate(*data, verbose=0, return_dict=True)["loss"]
        for name, data in (("trained", trained), ("validated", validated))
    }
    for worker in outcome["own_steps"]:
        own = worker["OwnSteps"]
        assert (own["loss"], own["odd"]) == ([1.5], [0.5])
        assert own["val_loss"] == pytest.approx([losses["validated"]], rel=1e-5)
        assert worker["OwnTestStep"]["loss"] == pytest.approx([losses["trained"]], rel=1e-5)
        assert worker["OwnTestStep"]["val_loss"] == [10.5]


def test_early_stopping_stops_all_at_once(outcome):
    assert [o["epochs"] for o in outcome["stopping"]] == [2, 2]
    assert [o["steps"] for o in outcome["stopping"]] == [14, 14]


@pytest.mark.parametrize(
    ("what", "words"),
    [
        # 7 steps against 5, averages at 2, 4, 6; Keras knows the number beforehand.
        ("steps", ["worker 0 at 127", '"mini-batches an epoch 7"', '"mini-batches an epoch 5"']),
        (
            "unknown steps",
            [
                "worker 0 at 127",
                "averages, step 6 (epoch 0); worker 1 at 127",
                "is at the end of an epoch's training, step 5 (epoch 0)",
                "same number of mini-batches",
                "stops one worker alone does that, too, as TerminateOnNaN",
            ],
        ),
        ("weights", ["kernel (3, 1) float32", "kernel (3, 2) float32", "same script"]),
        ("optimizer", ["optimizer SGD", '"momentum": 0.0', '"momentum": 0.5']),
        ("average_every", ['"average_every 2"', '"average_every 3"']),
        (
            "epochs",
            [
                "begins to train, step 0 (epoch 0); worker 1",
                "step 0 (epoch 1). All must begin at the same epoch. Backups of different epochs",
                "BackupAndRestore with a folder of its own, and copy one worker's folder over",
            ],
        ),
        ("validation", ["epoch's validation, step 7", "end of an epoch, step 7"]),
        ("metrics", ['"metrics loss"', '"metrics loss, mae"']),
        ("metrics' names", ['"metrics loss, mse"', '"metrics loss, mae"']),
        ("loss", ['"loss mse"', '"loss MeanAbsoluteError"']),
        ("average", ["is in average(model)", "begins to train"]),
        ("start", ["is in average(model); worker 1", "begins to train. Each"]),
    ],
)
def test_differences_are_named_by_all(outcome, what, words):
    first, second = (o["errors"][what] for o in outcome["differences"])
    assert first[0] == second[0] == "ValueError"
    assert first[1] == second[1]
    for word in words:
        assert word in first[1], first[1]


def test_training_goes_on_after_such_an_error(outcome):
    first, second = outcome["differences"]
    helpers.assert_close(first["weights"], second["weights"], 0.0)
    for worker in (first, second):
        np.testing.assert_array_equal(worker["fresh"], np.full((7, 2), 0.5))


def test_a_checkpoint_that_worker_0_loads_reaches_all(outcome):
    first, second = outcome["saved"]
    for worker in (first, second):
        helpers.assert_close(worker["after"], first["before"], 0.0)
    # Its slots, which are its own under "local", were not equal before.
    assert any(
        np.abs(a - b).max() > 1e-6 for a, b in zip(first["before"], second["before"], strict=True)
    )


@pytest.mark.parametrize("policy", ["average", "reset", "changing period"])
def test_a_run_that_is_resumed_equals_one_that_was_not_ended(outcome, policy):
    for worker in outcome["resumed"]:
        whole, shorter, resumed = worker[policy]
        helpers.assert_close(resumed, whole, 1e-6)
        assert np.abs(shorter[0] - whole[0]).max() > 1e-3
