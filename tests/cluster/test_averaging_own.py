"""`PeriodicAveraging` in two processes: what users write themselves, and fits that go wrong."""

import numpy as np
import pytest

from tests.cluster import processes
from tests.cluster import spmd_models as models
from tests.cluster.test_averaging import run

pytestmark = [pytest.mark.slow, pytest.mark.beside_others]

SCRIPT = str(processes.helpers.ROOT / "tests/cluster/scripts/averaging_own.py")


@pytest.fixture(scope="module")
def outcome(tmp_path_factory):
    """What both workers wrote down, by way."""
    return run(tmp_path_factory.mktemp("averaging_own"), 2, script=SCRIPT)


def test_a_worker_that_has_no_epoch_left_ends_training_in_all(outcome):
    first, second = outcome["no_epoch_left"]
    assert first["errors"]["one"] == second["errors"]["one"]
    kind, text = first["errors"]["one"]
    assert kind == "ValueError"
    assert "begins to train, step 0 (epoch 0); worker 1" in text
    assert "step 0 (epoch 2). All must begin at the same epoch. Backups" in text
    assert second["left"] == ["one"]


def test_workers_that_all_have_no_epoch_left_end_as_in_one_process(outcome):
    for worker in outcome["no_epoch_left"]:
        assert worker["epochs"] == 0
        assert "all" not in worker["left"]


def test_a_fit_without_epochs_is_compared_with_the_others(outcome):
    for worker in outcome["no_epoch_left"]:
        kind, text = worker["errors"]["epochs"]
        assert kind == "ValueError"
        assert '"epochs 0"' in text and '"epochs 2"' in text


def test_after_unequal_backups_the_next_fit_begins_where_it_is_told(outcome):
    for (kind, text), epochs in outcome["after_unequal_backups"]:
        assert kind == "ValueError"
        assert "All must begin at the same epoch" in text
        assert epochs == 3


@pytest.mark.parametrize("length", ["known", "unknown"])
@pytest.mark.parametrize("name", ["optimizer", "class", "instance"])
def test_steps_without_an_update_are_counted_by_all(outcome, name, length):
    """As Keras counts them, where the number is not known beforehand: two executions are 8."""
    epoch = 7 if length == "known" else 8
    for worker in outcome["steps_left_out"]:
        error, asked, iterations = worker[name, length]
        assert error is None
        assert asked == [0, 0, 4, epoch, epoch + 4]
        assert iterations == 14  # worker 0's, which all copy at an average


def test_each_metric_that_a_step_returns_is_that_of_all_data(outcome):
    """Also beside numbers of its own, and if a metric's result is a dict."""
    want, local_loss = {}, []
    for prefix, sizes, seed in (("", (28, 25), 0), ("val_", (20, 18), 1)):
        parts = [models.data(worker, size, seed) for worker, size in enumerate(sizes)]
        model = models.linear("sgd")
        model.compile("sgd", "mse", metrics=["mae", models.Targets()])
        if not prefix:
            local_loss = [
                model.evaluate(*part, verbose=0, return_dict=True)["loss"] for part in parts
            ]
        data = [np.concatenate(arrays) for arrays in zip(*parts, strict=True)]
        results = model.evaluate(*data, verbose=0, return_dict=True)
        want |= {prefix + name: value for name, value in results.items()}
    assert (want["examples"], want["val_examples"]) == (53, 38)
    for worker in outcome["logs_of_metrics_and_more"]:
        assert worker["Sequential"] == pytest.approx(want, rel=1e-5)
        assert worker["More"] == pytest.approx(want | {"more": 0.5, "val_more": 1.0}, rel=1e-5)
        own_loss = {"loss": (local_loss[0] + 7.0) / 2, "more": 1.0}
        assert worker["OwnLoss"] == pytest.approx(want | own_loss, rel=1e-5)
