"""On the simulator a resumed run is, bit for bit, the unbroken one with the same callback."""

import shutil

import keras
import numpy as np
import pytest

import tf_dsgd
from tests import helpers
from tests.conformance import registry

pytestmark = pytest.mark.medium

STEPS, EPOCHS, SAVE_EVERY = 20, 3, 14

# Besides those that the registry compiles.
OPTIMIZERS = {
    "adaptive_revision": lambda: tf_dsgd.optimizers.AdaptiveRevision(0.1, use_ema=True),
    # One of its variables Keras does not save.
    "nadam": lambda: keras.optimizers.Nadam(
        keras.optimizers.schedules.ExponentialDecay(0.05, 7, 0.5)
    ),
    "accumulated": lambda: keras.optimizers.Adam(0.02, gradient_accumulation_steps=2),
    "loss_scale": lambda: keras.optimizers.LossScaleOptimizer(
        keras.optimizers.Adam(0.02), dynamic_growth_steps=7
    ),
}
CASES = {
    **{
        name: (make, lambda name=name: registry.optimizer(name))
        for name, make in registry.CONFIGURATIONS.items()
    },
    **{
        name: (lambda cluster: tf_dsgd.DownpourStrategy(cluster, push_every=2), make)
        for name, make in OPTIMIZERS.items()
    },
    "averaging_changing_period": (
        lambda c: tf_dsgd.PeriodicAveragingStrategy(c, average_every=lambda n: 1 if n < 4 else 3),
        lambda: keras.optimizers.Adam(0.02),
    ),
    "update_nadam": (
        lambda c: tf_dsgd.DownpourStrategy(c, push_every=3, fetch_every=2, local_rule="optimizer"),
        lambda: keras.optimizers.Nadam(0.02),
    ),
}

# Among them each kind of thing that a checkpoint holds; the others are in the second tier.
FAST = {
    "downpour_3_5",
    "downpour_update",
    "softsync_bounded",
    "downpour_adaptive_revision_3_5",
    "averaging_changing_period",
    "elastic_momentum",
    "loss_scale",
}
MARKED = [
    pytest.param(case, marks=[] if case in FAST else pytest.mark.slow, id=case) for case in CASES
]

DELAYS = {
    "compute_seconds": tf_dsgd.LogNormal(1.0, 0.7),
    "network_seconds": tf_dsgd.Exponential(0.2),
    "seed": 5,
}


class Copies(keras.callbacks.Callback):
    """Keeps a copy of every checkpoint, as a process that ends there would leave it."""

    def __init__(self, source, target):
        super().__init__()
        self.source, self.target = source, target

    def on_train_batch_end(self, batch, logs=None):
        self._look()

    def on_epoch_end(self, epoch, logs=None):
        self._look()

    def _look(self):
        for path in self.source.glob("checkpoint-*"):
            if not (self.target / path.name).exists():
                shutil.copytree(path, self.target / path.name)


class Run:
    """A fresh strategy and model, trained with checkpoints, and all that is left of it."""

    def __init__(
        self, case, folder, resumed_from=None, steps_per_execution=1, order=None, **options
    ):
        make_strategy, make_optimizer = CASES[case]
        keras.utils.set_random_seed(3)
        cluster = tf_dsgd.SimulatedCluster(3, **(order or DELAYS))
        self.strategy = make_strategy(cluster)
        with self.strategy.scope():
            layers = keras.layers
            self.model = keras.Sequential(
                [
                    keras.Input((4,)),
                    layers.Dense(5, activation="relu"),
                    layers.BatchNormalization(),
                    layers.Dropout(0.3, seed=1),
                    helpers.WithTable() if case in registry.WITH_TABLE else layers.Dense(1),
                ]
            )
            settings = {"metrics": ["mae"], "steps_per_execution": steps_per_execution}
            self.model.compile(make_optimizer(), "mse", **settings)
        backup, self.copies = folder / "backup", folder / "copies"
        self.copies.mkdir(parents=True)
        if resumed_from is not None:
            shutil.copytree(resumed_from, backup / resumed_from.name)
        options = {"save_freq": SAVE_EVERY, "delete_checkpoint": False, **options}
        callback = tf_dsgd.callbacks.BackupAndRestore(backup, **options)
        x, y = helpers.regression(8 * STEPS, ids=False)
        self.history = self.model.fit(
            x,
            y,
            batch_size=8,
            epochs=EPOCHS,
            shuffle=False,
            verbose=0,
            callbacks=[callback, Copies(backup, self.copies)],
        ).history
        self.state = self.strategy.state(held=())

    def checkpoint(self, number):
        return self.copies / f"checkpoint-{number:08d}"


def assert_equal(resumed, unbroken):
    """All that the strategy and the model hold, and every checkpoint that both wrote."""
    assert resumed.state.keys() == unbroken.state.keys()
    for name, value in resumed.state.items():
        np.testing.assert_array_equal(value, unbroken.state[name], err_msg=name)
    for mine, theirs in (
        (resumed.model.weights, unbroken.model.weights),
        (resumed.model.optimizer.variables, unbroken.model.optimizer.variables),
    ):
        for a, b in zip(mine, theirs, strict=True):
            np.testing.assert_array_equal(a.numpy(), b.numpy(), err_msg=a.path)
    # By their texts: the mean staleness of a worker that has sent nothing is NaN.
    seen = [
        repr((s.steps, s.updates, s.staleness(), s.ledger(), s.examples_per_step))
        for s in (resumed.strategy, unbroken.strategy)
    ]
    assert seen[0] == seen[1]
    for path in resumed.copies.iterdir():
        mine, theirs = (
            np.load(p / path.name / "strategy.npz") for p in (resumed.copies, unbroken.copies)
        )
        assert mine.keys() == theirs.keys()
        for name in mine:
            np.testing.assert_array_equal(mine[name], theirs[name], err_msg=f"{path.name} {name}")


def test_what_is_fast_is_a_case():
    assert set(CASES) > FAST


@pytest.mark.few(2)
@pytest.mark.parametrize("case", MARKED)
def test_resumed_is_unbroken(case, tmp_path):
    """From the middle of the second epoch, where all but the clock differs from a fresh start."""
    unbroken = Run(case, tmp_path / "unbroken")
    assert unbroken.strategy.steps == STEPS * EPOCHS
    assert len(list(unbroken.copies.iterdir())) == STEPS * EPOCHS // SAVE_EVERY
    resumed = Run(case, tmp_path / "resumed", unbroken.checkpoint(2))  # after 28 of 60
    assert len(list(resumed.copies.iterdir())) == 1 + 2
    assert_equal(resumed, unbroken)
    assert resumed.history["loss"] == unbroken.history["loss"][1:]
    assert resumed.history["mae"] == unbroken.history["mae"][1:]


@pytest.mark.slow
@pytest.mark.parametrize(
    "save_freq", [7, *(pytest.param(n, marks=pytest.mark.slow) for n in (20, "epoch"))]
)
def test_from_other_places(save_freq, tmp_path):
    """After the first mini-batch of an epoch, after the last ones, and at the end of an epoch."""
    case = "averaging_changing_period"  # which goes by the mini-batches since training began
    unbroken = Run(case, tmp_path / "unbroken", save_freq=save_freq)
    every = STEPS if save_freq == "epoch" else save_freq
    for number in {7: [3], 20: [1, 2], "epoch": [1]}[save_freq]:
        folder = tmp_path / str(number)
        resumed = Run(case, folder, unbroken.checkpoint(number), save_freq=save_freq)
        assert_equal(resumed, unbroken)
        before_the_end = save_freq != "epoch"
        epochs_done = (number * every - before_the_end) // STEPS
        assert resumed.history["loss"] == unbroken.history["loss"][epochs_done:]


@pytest.mark.slow
def test_several_steps_per_execution(tmp_path):
    """Checkpoints are at ends of executions; the last of an epoch of 20 has 4 instead of 8."""
    options = {"steps_per_execution": 8, "save_freq": 5}
    unbroken = Run("downpour_3_5", tmp_path / "unbroken", **options)
    copies = sorted(unbroken.copies.iterdir())
    positions = [np.load(path / "strategy.npz")["position"][0] for path in copies]
    assert positions == [8, 16, 20] * 3
    for number in (2, 6):
        resumed = Run("downpour_3_5", tmp_path / str(number), copies[number - 1], **options)
        assert_equal(resumed, unbroken)


def turns(seed):
    """Workers in random order, each message of two mini-batches; fetches at most four apart."""
    random = np.random.default_rng(seed)
    left, entries = [0, 0, 0], []
    for batch in range(0, STEPS * EPOCHS, 2):
        worker = int(random.integers(3))
        if not left[worker] or random.uniform() < 0.3:
            entries.append((worker, "fetch"))
            left[worker] = 2
        entries.append((worker, "push", (batch, batch + 1)))
        left[worker] -= 1
    return {"schedule": entries}


@pytest.fixture(scope="module")
def scheduled(tmp_path_factory):
    """A run by a schedule, which no test changes."""
    return Run("downpour_3_5", tmp_path_factory.mktemp("unbroken"), order=turns(seed=1))


def test_a_schedule_goes_on(scheduled, tmp_path):
    """A worker may still have what it fetched before the checkpoint, and needs no fetch then."""
    resumed = Run("downpour_3_5", tmp_path / "on", scheduled.checkpoint(2), order=turns(seed=1))
    assert_equal(resumed, scheduled)
    assert resumed.history["loss"] == scheduled.history["loss"][1:]


@pytest.mark.parametrize(
    "other", [turns(seed=2), {"schedule": turns(seed=1)["schedule"][:15]}], ids=["other", "shorter"]
)
def test_another_schedule_is_refused(scheduled, other, tmp_path):
    with pytest.raises(ValueError, match="Resume with the same schedule"):
        Run("downpour_3_5", tmp_path / "on", scheduled.checkpoint(2), order=other)


@pytest.mark.parametrize(
    ("case", "save_freq"),
    [
        *(pytest.param("averaging", n, marks=pytest.mark.slow) for n in (5, 7)),
        ("downpour_bounded", 3),
    ],
)
def test_stragglers_go_on(case, save_freq, tmp_path):
    """What they have under way is not in the checkpoint; it is refused at the same moment."""
    slow = tf_dsgd.LogNormal(9.0, 0.5)
    order = {**DELAYS, "compute_seconds": [1.0, slow, 1.3], "late_after_seconds": 1.0}
    unbroken = Run(case, tmp_path / "unbroken", order=order, save_freq=save_freq)
    assert unbroken.strategy.ledger().reasons["repeated"] > 0
    copies = sorted(unbroken.copies.iterdir())
    refused = [np.load(path / "strategy.npz")["late_work"][:, 4] for path in copies]
    under_way = [n for n, times in enumerate(refused) if not np.isnan(times).all()]
    assert under_way
    for number in (under_way[0], under_way[-1]):
        resumed = Run(
            case, tmp_path / str(number), copies[number], order=order, save_freq=save_freq
        )
        assert_equal(resumed, unbroken)


# Counters, what is collected on shards, workers' weights, and a scalar of each shard's own.
SHARDED = {"downpour_3_5", "softsync_bounded", "elastic_momentum", "nadam"}


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=[] if case in SHARDED else pytest.mark.long)
        for case in CASES
        # Peers have no shards; a shard that trains nothing could not adapt a loss scale.
        if case not in ("peers", "loss_scale")
    ],
)
def test_a_backup_goes_on_with_another_number_of_shards(case, tmp_path):
    """What a shard does hangs on its own weights: five, of which one has none, do what one does."""
    runs = [Run(case, tmp_path / "five", order={**DELAYS, "num_shards": 5})]
    for n in (1, 3):
        begun = runs[0].checkpoint(2)
        order = {**DELAYS, "num_shards": n}
        runs.append(Run(case, tmp_path / str(n), resumed_from=begun, order=order))
        assert len(runs[-1].strategy.ledger().shards) == n
    for values in zip(*(_seen_outside(run) for run in runs), strict=True):
        for value in values[1:]:
            np.testing.assert_array_equal(value, values[0])


def _seen_outside(run):
    optimizer, strategy = run.model.optimizer, run.strategy
    for variable in (*run.model.weights, *optimizer.variables):
        if len(variable.shape):  # of a scalar one sees the first shard's, which may train nothing
            yield variable.numpy()
    for worker in strategy.ledger().workers:
        yield np.array([worker.steps, worker.sent, worker.applied, worker.refused])
    for shard in strategy.ledger().shards:
        assert shard.workers == strategy.ledger().shards[0].workers
    yield np.array([strategy.steps, strategy.updates])
    yield np.array(repr(strategy.staleness()))
    yield np.array([run.history[name][-1] for name in ("loss", "mae")])
