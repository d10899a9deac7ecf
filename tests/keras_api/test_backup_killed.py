"""Whenever the writer dies, the last checkpoint is there, whole; a run goes on from it."""

import json
import signal
import subprocess
import sys
import time

import keras
import numpy as np
import pytest

import tf_dsgd
from tests import helpers
from tf_dsgd import resuming
from tf_dsgd.callbacks.checkpoint_files import Checkpoints, read_arrays, write_arrays

pytestmark = pytest.mark.medium

KILLS = 12


def writers(*arguments):
    done = subprocess.run(
        [sys.executable, "-m", "tests.keras_api.writers", *map(str, arguments)],
        cwd=helpers.ROOT,
        env=helpers.python_env(),
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_writer_that_is_killed_at_random_moments(tmp_path):
    result = writers(tmp_path, "kill", 1, KILLS)
    found = result["found"]
    assert len(found) == KILLS
    assert found[0] >= 1 and np.all(np.diff(found) >= 1)  # never back, and each wrote some
    assert result["partial"] >= 2  # it did die while it wrote
    last = f"checkpoint-{found[-1]:08d}"
    assert last == max(result["left"])


def test_a_writer_that_ends_before_any_of_its_operations(tmp_path):
    """It ends with the second checkpoint, or with the third, and nothing between."""
    found = writers(tmp_path, "exit")
    assert len(found) > 15
    values = [before for before, _, _ in found]
    assert values == sorted(values) and values[0] == 2 and values[-1] == 3
    for before, after, names in found:
        assert after == before + 1
        assert names == [f"checkpoint-{int(names[0][-8:]):08d}"]  # nothing else is left


SCRIPT = """
import sys
import numpy as np
from tests.keras_api.test_backup_killed import train
strategy, model = train(sys.argv[1], say=True)
print("DONE", strategy.steps, repr([w.tolist() for w in model.get_weights()]), flush=True)
"""


def train(folder, say=False):
    keras.utils.set_random_seed(2)
    delays = tf_dsgd.Exponential(1.0)
    strategy = tf_dsgd.SoftsyncStrategy(
        tf_dsgd.SimulatedCluster(3, compute_seconds=delays, seed=1), gradients_per_update=2
    )
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.Adam(0.01), "mse")
    x, y = helpers.regression(240, ids=False)
    note = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: print("BATCH", batch, flush=True) if say else None
    )
    backup = tf_dsgd.callbacks.BackupAndRestore(folder, save_freq=2)
    settings = {"batch_size": 4, "epochs": 3, "shuffle": False, "verbose": 0}
    model.fit(x, y, callbacks=[backup, note], **settings)
    return strategy, model


@pytest.mark.slow
def test_a_run_that_is_killed_ends_where_an_unbroken_one_does(tmp_path):
    unbroken, model = train(tmp_path / "unbroken")
    for batches in (75, None):
        with subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(tmp_path / "broken")],
            cwd=helpers.ROOT,
            env=helpers.python_env(),
            stdout=subprocess.PIPE,
            text=True,
        ) as process:
            lines = []
            deadline = time.monotonic() + 90
            for line in process.stdout:
                lines.append(line)
                assert time.monotonic() < deadline, lines
                if len(lines) == batches:
                    process.send_signal(signal.SIGKILL)
                    break
            process.stdout.read()
        assert process.returncode == (0 if batches is None else -signal.SIGKILL)
    _, steps, weights = lines[-1].split(maxsplit=2)
    assert int(steps) == unbroken.steps == 180
    assert weights.strip() == repr([w.tolist() for w in model.get_weights()])
    assert lines[0].startswith("BATCH 0") and len(lines) - 1 == 120  # from the second epoch on


# -- the folder -----------------------------------------------------------------------------


def write(checkpoints, value):
    return checkpoints.write(
        {"value": value}, lambda folder: write_arrays(folder / "a.npz", {"a": np.array(value)})
    )


def test_an_error_while_writing_leaves_the_one_before(tmp_path):
    """As when the disk is full; what was written of the new one is gone."""
    checkpoints = Checkpoints(tmp_path)
    first = write(checkpoints, 1)

    def full(folder):
        (folder / "a.npz").write_bytes(b"half")
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match=r"no checkpoint could be written to .*: No space") as caught:
        checkpoints.write({}, full)
    assert resuming.ENDS_TRAINING in caught.value.__notes__  # no traceback before the sentence
    assert list(tmp_path.iterdir()) == [first]
    assert Checkpoints(tmp_path).newest().path == first
    assert write(checkpoints, 2).name == "checkpoint-00000002"


def test_what_is_of_others_stays(tmp_path):
    folder = tmp_path / "backup"
    checkpoints = Checkpoints(folder)
    write(checkpoints, 1)
    others = ["notes.txt", "checkpoint-final", "checkpoint-1", ".partial", "checkpoint.index"]
    for name in others:
        (folder / name).write_text("mine")
    (folder / ".partial-checkpoint-00000007").mkdir()
    (folder / ".partial-checkpoint-00000007" / "a.npz").write_text("half")
    write(checkpoints, 2)
    assert sorted(p.name for p in folder.iterdir()) == sorted([*others, "checkpoint-00000002"])
    checkpoints.delete()
    assert sorted(path.name for path in folder.iterdir()) == sorted(others)
    for name in others:
        (folder / name).unlink()
    checkpoints.delete()
    assert not folder.exists()


@pytest.mark.parametrize("keep", [1, 2])
def test_so_many_are_kept(keep, tmp_path):
    checkpoints = Checkpoints(tmp_path, keep)
    for value in range(1, 5):
        write(checkpoints, value)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == [f"checkpoint-{n:08d}" for n in range(5 - keep, 5)]
    again = Checkpoints(tmp_path, keep)
    newest = again.newest()
    assert newest.origin == {"value": 4}
    assert read_arrays(newest.path / "a.npz")["a"] == 4
    write(again, 5)
    assert len(list(tmp_path.iterdir())) == keep


def test_objects_are_not_written(tmp_path):
    with pytest.raises(ValueError, match="'texts' holds Python objects"):
        write_arrays(tmp_path / "a.npz", {"texts": np.array([b"a"], dtype=object)})
