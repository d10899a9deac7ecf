"""Whose a backup_dir is, and folders that cannot be written."""

import errno
import gc
import json
import os
import subprocess
import sys

import keras
import pytest

import tf_dsgd
from tests import helpers
from tf_dsgd import console
from tf_dsgd.callbacks import checkpoint_files
from tf_dsgd.callbacks.checkpoint_files import Checkpoints

pytestmark = pytest.mark.medium

OWNER = """
import sys
from tf_dsgd.callbacks.checkpoint_files import Checkpoints
claimed = Checkpoints(sys.argv[1])
claimed.claim(0)
print("CLAIMED", flush=True)
sys.stdin.read()
"""


def train(folder, epochs=2, callbacks=(), **options):
    """The epochs that were trained; the first is the one that a checkpoint led to."""
    strategy = tf_dsgd.DownpourStrategy(tf_dsgd.LocalCluster(2))
    with strategy.scope():
        model = helpers.constant_gradient_model(keras.optimizers.SGD(1.0))
    options = {"delete_checkpoint": False} | options
    backup = tf_dsgd.callbacks.BackupAndRestore(folder, **options)
    seen = []
    noting = keras.callbacks.LambdaCallback(on_epoch_begin=lambda epoch, logs: seen.append(epoch))
    callbacks = [backup, noting, *callbacks]
    try:
        model.fit(*helpers.ones(8), batch_size=2, epochs=epochs, callbacks=callbacks, verbose=0)
    except OSError as error:
        return seen, error
    assert float(model.get_weights()[0][0, 0]) == -4.0 * epochs
    return seen


def train_plainly(folder):
    """Without a strategy, where the callback is Keras's but for the folder's claim."""
    model = helpers.constant_gradient_model(keras.optimizers.SGD(0.5))
    backup = tf_dsgd.callbacks.BackupAndRestore(folder)
    model.fit(*helpers.ones(8), batch_size=2, epochs=2, callbacks=[backup], verbose=0)


def test_another_run_is_refused_and_named_until_it_is_gone(tmp_path):
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(tmp_path)],
        cwd=helpers.ROOT,
        env=helpers.python_env(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert owner.stdout.readline() == "CLAIMED\n"
        with pytest.raises(ValueError, match=rf"of another run .*process {owner.pid} on "):
            train(tmp_path)
        with pytest.raises(ValueError, match=rf"of another run .*process {owner.pid} on "):
            train_plainly(tmp_path)
    finally:
        owner.kill()  # a dead owner has no claim
        owner.wait(timeout=10)
        owner.stdin.close(), owner.stdout.close()
    train_plainly(tmp_path)
    assert train(tmp_path) == [0, 1]


def test_a_run_that_an_error_ended_leaves_the_folder_to_the_next(tmp_path):
    class Ends(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 1:
                raise RuntimeError("a test's")

    with pytest.raises(RuntimeError, match="a test's"):
        train(tmp_path, epochs=3, callbacks=[Ends()])
    assert train(tmp_path, epochs=3) == [1, 2]
    assert train(tmp_path, epochs=4) == [3]


def claimed_elsewhere(folder):
    """What another process says when it claims the folder."""
    ended = subprocess.run(
        [sys.executable, "-c", OWNER, str(folder)],
        cwd=helpers.ROOT,
        env=helpers.python_env(),
        input="",
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return ended.stdout + ended.stderr


@pytest.mark.slow
def test_a_callback_that_is_gone_has_no_claim(tmp_path):
    """Of a `fit` that an error ended: its callback is not told of any end."""
    left = Checkpoints(tmp_path)
    left.claim(0)
    assert "is the backup_dir of another run" in claimed_elsewhere(tmp_path)
    del left
    gc.collect()
    assert claimed_elsewhere(tmp_path).startswith("CLAIMED\n")


def test_a_checkpoint_that_is_refused_leaves_no_claim(tmp_path):
    train(tmp_path, epochs=1)
    (folder,) = tmp_path.glob("checkpoint-*")
    (folder / "manifest.json").write_text("{}")
    with pytest.raises(ValueError, match="manifest"):
        train(tmp_path)
    assert claimed_elsewhere(tmp_path).startswith("CLAIMED\n")


def test_a_folder_that_was_deleted_and_claimed_anew_stays_the_new_ones(tmp_path):
    folder = tmp_path / "backup"
    one, other = Checkpoints(folder), Checkpoints(folder)
    one.claim(0)
    (folder / ".owner").unlink()
    checkpoint_files._claimed.clear()  # as if the next were another process
    other.claim(0)
    one.release()
    assert (folder / ".owner").exists()
    other.release()


def test_a_fork_has_no_claim_of_its_parents(tmp_path):
    one = Checkpoints(tmp_path)
    one.claim(0)
    pid = os.fork()
    if not pid:
        try:
            one.release()  # nothing: the claim is not this process's
        finally:
            os._exit(0 if (tmp_path / ".owner").exists() else 1)
    assert os.waitpid(pid, 0)[1] == 0
    assert "is the backup_dir of another run" in claimed_elsewhere(tmp_path)
    one.release()


def test_who_ends_gives_the_folder_back(tmp_path):
    one, other = Checkpoints(tmp_path), Checkpoints(tmp_path)
    one.claim(0)
    one.release()
    other.claim(0)
    other.delete()
    other.release()
    assert not tmp_path.exists()


def test_a_folder_that_is_a_symbolic_link(tmp_path):
    there = tmp_path / "there"
    there.mkdir()
    (tmp_path / "link").symlink_to(there)
    assert train(tmp_path / "link", epochs=2) == [0, 1]
    assert train(there, epochs=3) == [2]
    assert train(tmp_path / "link", epochs=4, delete_checkpoint=True) == [3]
    assert (tmp_path / "link").is_symlink()


def test_a_folder_that_cannot_be_made_is_noticed_before_anything_is_trained(tmp_path):
    (tmp_path / "file").touch()
    seen, error = train(tmp_path / "file" / "backup")
    assert seen == []
    assert "no checkpoint can be written to" in str(error)
    assert console.NOTHING_TRAINED in error.__notes__  # so that a script ends in a line


def test_too_little_space_is_noticed_before_anything_is_trained(tmp_path, monkeypatch):
    """For a small model, too, whose checkpoint is mostly what is beside the weights."""
    train(tmp_path / "one", epochs=1)
    files = [path for path in (tmp_path / "one").rglob("*") if path.is_file()]
    taken = sum(file.stat().st_size for file in files)
    usage = type("Usage", (), {"free": taken})
    monkeypatch.setattr(checkpoint_files.shutil, "disk_usage", lambda _: usage)
    seen, error = train(tmp_path / "other")
    assert seen == [] and error.errno == errno.ENOSPC
    assert "are left" in str(error)
    usage.free = 3 * taken
    assert train(tmp_path / "other", epochs=1) == [0]


@pytest.mark.few(1)
@pytest.mark.parametrize("on_error", ["stop", "warn"])
def test_a_disk_that_is_full_later(tmp_path, monkeypatch, capsys, on_error):
    assert train(tmp_path, epochs=1) == [0]
    write = checkpoint_files.Checkpoints._write
    calls = []

    def fails(self, origin, fill):
        calls.append(origin)
        if len(calls) == 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if len(calls) == 2:  # as h5py says it
            raise OSError(
                "Unable to synchronously create file (file write failed: time = Wed Nov 25\n, "
                f"filename = 'x', errno = {errno.ENOSPC}, error message = 'No space', offset = 0)"
            )
        return write(self, origin, fill)

    monkeypatch.setattr(checkpoint_files.Checkpoints, "_write", fails)
    found = train(tmp_path, epochs=4, on_error=on_error)
    said = capsys.readouterr().err
    if on_error == "stop":
        seen, error = found
        assert seen == [1] and "No space left on device" in str(error)
        monkeypatch.undo()
        assert train(tmp_path, epochs=3) == [1, 2]  # from the one before
    else:
        assert found == [1, 2, 3]
        assert said.count("No space left on device. Training goes on") == 2
        monkeypatch.undo()
        assert train(tmp_path, epochs=5) == [4]


@pytest.mark.parametrize("delete_checkpoint", [False, True])
def test_weights_that_are_not_finite_take_no_checkpoints_place(tmp_path, capsys, delete_checkpoint):
    class Breaks(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 2:
                kernel = self.model.trainable_weights[0]
                kernel.assign(kernel * float("nan"))

    with pytest.raises(AssertionError):  # as the weights are at the end
        train(tmp_path, epochs=4, callbacks=[Breaks()], delete_checkpoint=delete_checkpoint)
    assert capsys.readouterr().err.count("is not finite: no checkpoint is written") == 1
    assert train(tmp_path, epochs=3) == [2]


def test_a_wrong_choice():
    with pytest.raises(ValueError, match=r'on_error must be "stop" or "warn". Received: \'go\''):
        tf_dsgd.callbacks.BackupAndRestore("folder", on_error="go")


@pytest.mark.parametrize("name", ["../outside", "..", "", "nul\0x"])
def test_a_name_that_leads_out_of_the_folder_is_refused(tmp_path, name):
    train(tmp_path, epochs=1)
    (folder,) = tmp_path.glob("checkpoint-*")
    (tmp_path / "outside").write_text("{}")
    content = json.loads((folder / "manifest.json").read_text())
    content.pop("digest")
    content["files"][name] = checkpoint_files._measure(tmp_path / "outside")
    content["digest"] = checkpoint_files._digest(content)
    (folder / "manifest.json").write_text(checkpoint_files._text(content))
    with pytest.raises(ValueError, match="names a file outside of its folder"):
        train(tmp_path, epochs=2)
