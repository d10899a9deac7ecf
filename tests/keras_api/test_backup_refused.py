"""What is torn, of another run or of another form is refused by name, and changes nothing."""

import hashlib
import json
import shutil
import zipfile

import keras
import numpy as np
import pytest

import tf_dsgd
from tests import helpers

FILES = ["latest.weights.h5", "training_metadata.json", "strategy.npz", "manifest.json"]


def make(workers=2, width=3, optimizer=keras.optimizers.Adam, strategy=None, name="out"):
    cluster = tf_dsgd.SimulatedCluster(workers, compute_seconds=1.0, seed=0)
    with (strategy or tf_dsgd.DownpourStrategy)(cluster).scope():
        layers = [keras.Input((width,)), keras.layers.Dense(1, name=name)]
        model = keras.Sequential(layers)
        model.compile(optimizer(0.05), "mse")
    return model


def fit(model, backup, epochs=2, **options):
    callback = tf_dsgd.callbacks.BackupAndRestore(backup, delete_checkpoint=False, **options)
    x, y = np.ones((16, model.input_shape[1]), "float32"), np.ones((16, 1), "float32")
    model.fit(x, y, batch_size=4, epochs=epochs, verbose=0, callbacks=[callback])
    return callback


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """The last two checkpoints of two epochs, number 1 and 2."""
    folder = tmp_path_factory.mktemp("written") / "backup"
    fit(make(), folder, double_checkpoint=True)
    assert sorted(path.name for path in folder.iterdir()) == [
        "checkpoint-00000001",
        "checkpoint-00000002",
    ]
    return folder


@pytest.fixture(scope="module")
def model():
    """A model that all those checkpoints are refused for; it is looked at, and not trained."""
    made = make()
    with made.distribute_strategy.scope():
        made.optimizer.build(made.trainable_variables)
    return made


@pytest.fixture
def backup(written, tmp_path):
    """The second of those checkpoints alone, to be spoilt."""
    folder = tmp_path / "backup"
    shutil.copytree(written / "checkpoint-00000002", folder / "checkpoint-00000002")
    return folder


def everything(model):
    strategy = model.distribute_strategy
    return strategy.state(held=()) | {"epoch": model._initial_epoch or 0}


def begin(model, backup, **options):
    callback = tf_dsgd.callbacks.BackupAndRestore(backup, **options)
    callback.set_model(model)
    callback.on_train_begin()


def assert_refused(model, backup, *words):
    before = everything(model)
    with pytest.raises(ValueError) as caught:
        begin(model, backup)
    for word in map(str, words):
        assert word in str(caught.value), word
    after = everything(model)
    for name, value in before.items():
        np.testing.assert_array_equal(after[name], value, err_msg=name)
    return str(caught.value)


def signed(folder):
    """Gives a checkpoint that was changed a manifest that says so: the file is as someone wrote it.

    As documented: digests of files, and that of the manifest without its own.
    """
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text())
    for name in manifest["files"]:
        data = (folder / name).read_bytes()
        manifest["files"][name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    sign(path, manifest)


def sign(path, manifest):
    manifest.pop("digest", None)
    text = json.dumps(manifest, indent=1, sort_keys=True) + "\n"
    digest = hashlib.sha256(text.encode()).hexdigest()
    text = json.dumps({**manifest, "digest": digest}, indent=1, sort_keys=True) + "\n"
    path.write_text(text)


def test_what_is_whole_is_taken(backup):
    """So that the others are refused for what was done to them; and a signed one is whole."""
    folder = backup / "checkpoint-00000002"
    manifest = (folder / "manifest.json").read_bytes()
    signed(folder)
    assert (folder / "manifest.json").read_bytes() == manifest
    model = make()
    begin(model, backup)
    assert model.distribute_strategy.steps == 8
    assert int(model.optimizer.iterations) == 8
    assert model._initial_epoch == 2


@pytest.mark.parametrize("place", [0.0, 0.3, 0.999])
@pytest.mark.parametrize("name", FILES)
def test_a_truncated_file(name, place, model, backup):
    path = backup / "checkpoint-00000002" / name
    data = path.read_bytes()
    path.write_bytes(data[: int(place * len(data))])
    assert_refused(model, backup, path, "torn", "delete", "double_checkpoint")


@pytest.mark.parametrize("name", FILES)
def test_a_flipped_bit(name, model, backup):
    """Anywhere: at ten places, of which the first and the last byte are two."""
    path = backup / "checkpoint-00000002" / name
    data = path.read_bytes()
    rng = np.random.default_rng(len(name))
    for place in [0, len(data) - 1, *rng.integers(0, len(data), 8)]:
        changed = bytearray(data)
        changed[place] ^= 1 << int(rng.integers(8))
        path.write_bytes(changed)
        assert_refused(model, backup, path, "torn")


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file(name, model, backup):
    path = backup / "checkpoint-00000002" / name
    path.unlink()
    assert_refused(model, backup, path, "No such file")


@pytest.mark.parametrize("name", FILES)
def test_a_file_of_the_checkpoint_before(name, model, backup, written):
    path = backup / "checkpoint-00000002" / name
    shutil.copy(written / "checkpoint-00000001" / name, path)
    assert_refused(model, backup, path, "torn")


def test_double_checkpoint_takes_the_one_before(written, tmp_path, caplog):
    """And the torn one, not the good one, is deleted once there is another."""
    backup = tmp_path / "backup"
    shutil.copytree(written, backup)
    torn = backup / "checkpoint-00000002" / "strategy.npz"
    torn.write_bytes(torn.read_bytes()[:-7])
    model = make()
    with caplog.at_level("WARNING", "absl"):
        fit(model, backup, epochs=2, double_checkpoint=True)
    assert str(torn) in caplog.text and "Taking the one before" in caplog.text
    assert model.distribute_strategy.steps == 8
    assert sorted(path.name[-1] for path in backup.iterdir()) == ["1", "3"]


def test_double_checkpoint_with_both_torn(written, tmp_path, model):
    backup = tmp_path / "backup"
    shutil.copytree(written, backup)
    for number in (1, 2):
        (backup / f"checkpoint-0000000{number}" / "latest.weights.h5").write_bytes(b"")
    with pytest.raises(ValueError, match=r"checkpoint-00000001/latest\.weights\.h5 has 0 bytes"):
        begin(model, backup, double_checkpoint=True)


OTHERS = {
    "model": ({"width": 4}, "out/kernel [3, 1] float32 there, and"),
    "layer": ({"name": "other"}, "out/kernel [3, 1] float32 there, and"),
    "optimizer": ({"optimizer": keras.optimizers.RMSprop}, "Adam there, and RMSprop here"),
    "slots": (
        {"optimizer": lambda rate: keras.optimizers.Adam(rate, amsgrad=True)},
        "optimizer variables: 6 there, and 8 here",
    ),
    "strategy": (
        {"strategy": tf_dsgd.PeriodicAveragingStrategy},
        "DownpourStrategy there, and PeriodicAveragingStrategy here",
    ),
    "workers": ({"workers": 3}, "number of workers: 2 there, and 3 here"),
}


@pytest.mark.parametrize("other", OTHERS)
def test_of_another_run(other, backup):
    options, words = OTHERS[other]
    assert_refused(make(**options), backup, "checkpoint-00000002/manifest.json", words)


def test_settings_may_be_others(backup):
    """Periods, the local rule and the rate: the run goes on, at the rate of the checkpoint."""

    def strategy(cluster):
        return tf_dsgd.DownpourStrategy(cluster, push_every=3, local_rule="optimizer")

    model = make(strategy=strategy, optimizer=lambda rate: keras.optimizers.Adam(10 * rate))
    fit(model, backup, epochs=3)
    assert model.distribute_strategy.steps == 12
    assert float(model.optimizer.learning_rate) == np.float32(0.05)


class Cracker:
    """Unpickled it would be seen."""

    def __reduce__(self):
        return (pytest.fail, ("it was unpickled",))


@pytest.mark.parametrize("how", ["object array", "bare pickle"])
def test_pickled_objects(how, model, backup):
    folder = backup / "checkpoint-00000002"
    path = folder / "strategy.npz"
    bad = np.array([Cracker()], dtype=object)
    if how == "object array":
        with np.load(path) as arrays:
            np.savez(path, **{**arrays, "version": bad})
    else:
        np.save(folder / "bad.npy", bad, allow_pickle=True)
        (folder / "bad.npy").rename(path)
    signed(folder)
    assert_refused(model, backup, path, "plain arrays")


def rewritten(path, change):
    with np.load(path) as arrays:
        changed = dict(arrays)
    change(changed)
    np.savez(path, **changed)
    signed(path.parent)


CHANGES = {
    "no number of examples": (lambda a: a.pop("examples"), "examples"),
    "not a number of examples": (lambda a: a.update(examples=np.full(2, np.nan)), "examples"),
    "a long position": (lambda a: a.update(position=np.zeros(3, np.int64)), "position"),
    "a missing array": (lambda a: a.pop("counters"), "'counters'"),
    "another shape": (lambda a: a.update(staleness=np.zeros(3, np.int64)), "staleness is (3,)"),
    "another type": (lambda a: a.update(version=np.zeros([], "float32")), "version is () float32"),
    "the clock of others": (lambda a: a.update(delays=np.zeros((3, 6), "uint64")), "delays is"),
    "another variable": (lambda a: a.update(optimizer_0_0=np.zeros(2, "int64")), "optimizer_0_0"),
    "no position": (lambda a: a.pop("position"), "'position'"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_whole_state_that_does_not_fit(change, model, backup):
    path = backup / "checkpoint-00000002" / "strategy.npz"
    rewritten(path, CHANGES[change][0])
    assert_refused(model, backup, path, CHANGES[change][1])


@pytest.mark.parametrize(
    "change", [{"files": []}, {"files": {"a": 3}}, {"origin": "mine"}, {"format": "1"}]
)
def test_a_manifest_of_other_kinds(change, model, backup):
    path = backup / "checkpoint-00000002" / "manifest.json"
    sign(path, {**json.loads(path.read_text()), **change})
    assert_refused(model, backup, path, "is no manifest of a checkpoint")


@pytest.mark.parametrize("name", FILES)
def test_a_manifest_without_a_file(name, model, backup):
    """What it does not know was not looked at either."""
    path = backup / "checkpoint-00000002" / "manifest.json"
    manifest = json.loads(path.read_text())
    if name == "manifest.json":
        manifest["files"] = {}
    else:
        del manifest["files"][name]
    sign(path, manifest)
    assert_refused(model, backup, path, "does not name")


@pytest.mark.parametrize("text", ["[]", '{"epoch": -1, "batch": 3}', '{"epoch": 1}', "{"])
def test_no_place_in_training(text, model, backup):
    path = next((backup / "checkpoint-00000002").glob("*metadata*"))
    path.write_text(text)
    signed(path.parent)
    assert_refused(model, backup, path)


@pytest.mark.parametrize("weights", [[1, 2, 3], [["a"]], [[1, [2], "float32"]], 3])
def test_a_manifest_of_other_weights(weights, model, backup):
    path = backup / "checkpoint-00000002" / "manifest.json"
    manifest = json.loads(path.read_text())
    sign(path, {**manifest, "origin": {**manifest["origin"], "weights": weights}})
    assert_refused(model, backup, path, "its weights: ")


def test_a_whole_file_of_weights_that_is_none(model, backup):
    path = backup / "checkpoint-00000002" / "latest.weights.h5"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("weights", "none")
    signed(path.parent)
    assert_refused(model, backup, path)


@pytest.mark.parametrize(("difference", "age"), [(-1, "older"), (1, "newer")])
def test_another_format(difference, age, model, backup):
    path = backup / "checkpoint-00000002" / "manifest.json"
    manifest = json.loads(path.read_text())
    number = manifest["format"] + difference
    sign(path, {**manifest, "format": number, "tf_dsgd": "7.8.9"})
    assert_refused(model, backup, path, f"{age} format, {number}", "7.8.9", tf_dsgd.__version__)


@pytest.mark.parametrize("name", ["latest.weights.h5", "strategy.npz", "latest.weights.h5.bkp"])
def test_the_form_of_keras_and_of_earlier_versions(name, model, tmp_path):
    (tmp_path / name).write_bytes(b"whatever")
    assert_refused(model, tmp_path, tmp_path / name, "older form", "model.load_weights")
    assert (tmp_path / name).read_bytes() == b"whatever"


def test_what_keras_wrote(model, tmp_path):
    """Not by its name alone: that of a run with Keras's own callback, which the error names."""
    other = make()
    callback = keras.callbacks.BackupAndRestore(tmp_path, delete_checkpoint=False)
    x, y = helpers.ones(8)
    other.fit(x, y, verbose=0, callbacks=[callback])
    assert_refused(model, tmp_path, tmp_path / "latest.weights.h5", "keras.callbacks")


def test_without_a_strategy_it_is_that_of_keras(backup, tmp_path):
    def plain():
        made = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        made.compile("sgd", "mse")
        return made

    with pytest.raises(ValueError, match=r"checkpoint-00000002 was written under a tf_dsgd"):
        fit(plain(), backup)
    assert (backup / "checkpoint-00000002").is_dir()
    fit(plain(), tmp_path / "keras")
    names = sorted(path.name for path in (tmp_path / "keras").iterdir())
    assert names == ["latest.weights.h5", "training_metadata.json"]


def test_the_folder_must_be_one(model):
    with pytest.raises(ValueError, match="folder of a file system"):
        begin(model, "gs://bucket/backup")


def test_without_a_strategy_too_an_earlier_callbacks_error_leaves_no_epoch_behind(tmp_path):
    """It raises as the resumed epoch begins; the next fit has a folder without a checkpoint."""
    x, y = helpers.ones(8)
    model = helpers.constant_gradient_model(keras.optimizers.SGD(1.0))
    seen = []

    def fit(epochs, name, broken):
        def note(epoch, logs):
            seen.append(epoch)
            if broken:
                raise RuntimeError("broken")

        earlier = keras.callbacks.LambdaCallback(on_epoch_begin=note)
        backup = tf_dsgd.callbacks.BackupAndRestore(tmp_path / name, delete_checkpoint=False)
        model.fit(x, y, batch_size=4, epochs=epochs, callbacks=[earlier, backup], verbose=0)

    fit(2, "resumed", broken=False)
    with pytest.raises(RuntimeError, match="broken"):
        fit(3, "resumed", broken=True)
    fit(1, "other", broken=False)
    assert seen == [0, 1, 2, 0]
