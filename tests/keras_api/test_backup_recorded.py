"""Trained on threads, or played from the record of that, broken off and resumed: the same bits.

Threads give other numbers in each run. So the order of what they did is recorded, and played to
where the run is broken off, in the middle of an epoch; a fresh strategy plays on from the
checkpoint that is left. The unbroken run is that on threads itself.
"""

import keras
import numpy as np
import pytest

import tf_dsgd
from tests import helpers
from tests.conformance import registry
from tests.keras_api.test_backup_resume import STEPS

EPOCHS, SAVE_EVERY = 2, 7
BROKEN_AT = (1, 12)  # epoch and mini-batch
SAVED_AT = 28  # mini-batches of the checkpoint before

# Whose workers keep something of their own between messages, whose shards do; the others are in
# the second tier.
FAST = {
    "downpour_adaptive_revision_3_5",
    "averaging_diloco",
}


class Run:
    """A fresh strategy and model, with checkpoints in a folder.

    Args:
        case: a configuration's name.
        cluster: where.
        folder: of the checkpoints.
    """

    def __init__(self, case, cluster, folder):
        keras.utils.set_random_seed(3)
        self.strategy = registry.CONFIGURATIONS[case](cluster)
        layers = keras.layers
        with self.strategy.scope():
            self.model = keras.Sequential(
                [
                    keras.Input((4,)),
                    layers.Dense(5, activation="relu"),
                    layers.BatchNormalization(),
                    layers.Dropout(0.3, seed=1),
                    layers.Dense(1),
                ]
            )
            self.model.compile(registry.optimizer(case), "mse", metrics=["mae"])
        self.backup = tf_dsgd.callbacks.BackupAndRestore(
            folder, save_freq=SAVE_EVERY, delete_checkpoint=False
        )

    def fit(self, *callbacks):
        x, y = helpers.regression(8 * STEPS, ids=False)
        data = {"x": x, "y": y, "batch_size": 8, "epochs": EPOCHS, "shuffle": False, "verbose": 0}
        return self.model.fit(**data, callbacks=[self.backup, *callbacks]).history

    def to_its_end(self):
        """Records it, and takes all that is left."""
        with self.strategy.recording() as self.schedule:
            self.history = self.fit()
        self.state = self.strategy.state(held=())
        return self


def assert_equal(resumed, unbroken):
    """Weights, slots, statistics, what workers have of their own, staleness and all counts."""
    of_a_schedule = {"schedule", "since_fetch"}
    assert resumed.state.keys() - of_a_schedule == unbroken.state.keys()
    for name, value in unbroken.state.items():
        np.testing.assert_array_equal(resumed.state[name], value, err_msg=name)
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


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=[] if case in FAST else pytest.mark.slow)
        for case in registry.CONFIGURATIONS
        if case not in registry.WITH_TABLE  # which no recording takes
    ],
)
def test_resumed_is_what_threads_did(case, tmp_path):
    unbroken = Run(case, tf_dsgd.LocalCluster(2), tmp_path / "threads").to_its_end()
    assert unbroken.strategy.steps == STEPS * EPOCHS

    def play():
        cluster = tf_dsgd.SimulatedCluster(2, schedule=unbroken.schedule)
        return Run(case, cluster, tmp_path / "backup")

    broken = play()
    with pytest.raises(helpers.Broken):
        broken.fit(helpers.break_off(*BROKEN_AT))
    resumed = play().to_its_end()
    assert_equal(resumed, unbroken)
    played = [batches for _, action, *batches in resumed.schedule if action == "step"]
    assert sum(len(batches) for (batches,) in played) == STEPS * EPOCHS - SAVED_AT
    np.testing.assert_allclose(resumed.history["mae"], unbroken.history["mae"][1:], rtol=1e-6)
