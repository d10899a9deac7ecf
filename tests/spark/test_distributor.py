"""The chief, a ps and workers of a cluster, in one barrier stage of `local[4,2]`."""

import contextlib
import json
import os
import sys

import numpy as np
import psutil
import pytest

pytest.importorskip("pyspark", reason='pyspark is not installed: pip install "tf_dsgd[spark]"')

from pyspark import cloudpickle

import tf_dsgd.spark
from tests import helpers
from tf_dsgd.spark.session import check_java

cloudpickle.register_pickle_by_value(sys.modules[__name__])
pytestmark = [
    pytest.mark.slow,
    pytest.mark.alone,
    # Py4J and pyspark leave it to garbage collection to close theirs.
    pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning"),
]


def on_a_cluster(cluster=None, data=None, epochs=2):
    """Trains a linear model: (weights, loss of each epoch, steps, steps of each worker)."""
    import keras

    keras.utils.set_random_seed(1)
    strategy = tf_dsgd.DownpourStrategy(cluster, push_every=1, fetch_every=1)
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.05), "mse")
    if data is None:
        x = np.random.default_rng(0).normal(size=(64, 3)).astype("float32")
        arguments = {"x": x, "y": x.sum(axis=1), "batch_size": 8}
    else:
        arguments = {"x": strategy.distribute_datasets_from_function(data)}
    history = model.fit(**arguments, epochs=epochs, shuffle=False, verbose=0).history
    ledger = helpers.assert_ledger_balances(strategy)
    steps = [worker.steps for worker in ledger.workers]
    return model.get_weights(), history["loss"], strategy.steps, steps


def kill_ps():
    """Kills the ps of the cluster whose chief this process is."""
    config = json.loads(os.environ["TF_CONFIG"])
    config["task"]["type"] = "ps"
    killed = 0
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("TF_CONFIG") == json.dumps(config):
                process.kill()
                process.wait(timeout=10)
                killed += 1
    assert killed


def test_one_worker_is_one_of_a_local_cluster(spark, capsys):
    def train(text):
        print(text, flush=True)
        return on_a_cluster()

    got = tf_dsgd.spark.Distributor(1).run(train, "said by the chief")
    want = on_a_cluster(tf_dsgd.LocalCluster(1))
    for one, other in zip(got[0], want[0], strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)
    np.testing.assert_allclose(got[1], want[1], rtol=1e-6)
    assert got[2:] == want[2:] == (16, [16])
    assert "said by the chief\n" in capsys.readouterr().out


def test_workers_read_their_own_partitions_each_row_once(spark):
    """Three partitions of 0, 30 and 10 rows for two workers: batches of 8, the last ones smaller.

    Of the rows' sum of squares, and their number, the loss at rate 0 tells: it is a mean over rows.
    """
    rows = [(float(i), [float(i % 7), 1.0], i % 3) for i in range(40)]

    def place(index, part):
        del part
        return iter([[], rows[:30], rows[30:]][index])

    rdd = spark.sparkContext.parallelize(range(3), 3).mapPartitionsWithIndex(place)
    df = spark.createDataFrame(rdd, "a double, v array<float>, y int")
    data = tf_dsgd.spark.partitions(df, (["a", "v"], "y"), 8)

    def train(data):
        import keras

        strategy = tf_dsgd.DownpourStrategy()
        with strategy.scope():
            model = keras.Sequential(
                [keras.Input((3,)), keras.layers.Dense(1, kernel_initializer="ones")]
            )
            model.compile(keras.optimizers.SGD(0.0), "mse")
        dataset = strategy.distribute_datasets_from_function(data)
        losses = model.fit(dataset, epochs=2, shuffle=False, verbose=0).history["loss"]
        workers = strategy.ledger().workers
        return losses, [worker.steps for worker in workers], [place.rows for place in data.places]

    losses, steps, counts = tf_dsgd.spark.Distributor(2).run(train, data)
    want = np.mean([(a + sum(v) - y) ** 2 for a, v, y in rows])
    np.testing.assert_allclose(losses, [want, want], rtol=1e-5)
    assert counts == [10, 30]  # partitions 0 and 2 are worker 0's, partition 1 worker 1's
    assert steps == [2 * 2, 2 * 4]


def test_what_train_raises_ends_all_and_is_raised_here(spark):
    def train():
        raise KeyError("of train")

    with pytest.raises(KeyError, match="of train") as caught:
        tf_dsgd.spark.Distributor(1).run(train)
    assert "In the chief of the training" in "".join(caught.value.__notes__)


def test_after_a_killed_ps_training_goes_on_from_its_backup(spark, tmp_path):
    """Spark starts the stage again; epochs that a checkpoint has are not done twice."""

    def train(folder):
        import keras

        with open(f"{folder}/starts", "a") as file:
            file.write("once\n")

        class KillsThePS(keras.callbacks.Callback):
            def on_epoch_end(self, epoch, logs=None):
                with open(f"{folder}/epochs", "a") as file:
                    file.write(f"{epoch} ")
                if epoch == 2 and not os.path.exists(f"{folder}/killed"):
                    with open(f"{folder}/killed", "w"):
                        pass
                    kill_ps()

        x = np.ones((32, 3), "float32")
        strategy = tf_dsgd.DownpourStrategy()
        with strategy.scope():
            model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
            model.compile("sgd", "mse")
        backup = tf_dsgd.callbacks.BackupAndRestore(f"{folder}/backup")
        model.fit(x, x[:, 0], batch_size=8, epochs=5, verbose=0, callbacks=[backup, KillsThePS()])
        return strategy.steps

    steps = tf_dsgd.spark.Distributor(1).run(train, str(tmp_path))
    epochs = [int(word) for word in (tmp_path / "epochs").read_text().split()]
    assert (tmp_path / "starts").read_text().count("once") == 2
    assert epochs[:3] == [0, 1, 2] and epochs[-1] == 4
    assert steps == 5 * 4
    assert len(epochs) <= 6  # at most the epoch in which the ps was lost is done again


def test_local_mode_starts_the_same_cluster_without_a_job(capfd):
    got = tf_dsgd.spark.Distributor(2, local_mode=True).run(on_a_cluster)
    assert got[2] == sum(got[3]) == 16


def test_bad_input_is_refused_by_name(spark, monkeypatch):
    Distributor, partitions = tf_dsgd.spark.Distributor, tf_dsgd.spark.partitions
    with pytest.raises(ValueError, match=r"num_workers must be an integer of at least 1.*: 0"):
        Distributor(0)
    with pytest.raises(ValueError, match=r"takes 6 slots of Spark.*local\[4,2\] has 4"):
        Distributor(4).run(print)
    with pytest.raises(TypeError, match="train must be a function or a script's path"):
        Distributor(1).run(3)
    with pytest.raises(ValueError, match=r"no script here at '/nowhere\.py'"):
        Distributor(1).run("/nowhere.py")
    df = spark.createDataFrame([("b", [1.0]), ("c", [1.0, 2.0])], "a string, v array<float>")
    with pytest.raises(ValueError, match=r"has no column 'z'. It has: \['a', 'v'\]"):
        partitions(df, ("z", "a"), 8)
    with pytest.raises(ValueError, match="Column 'a' is of string, which is no number"):
        partitions(df, ("a",), 8)
    with pytest.raises(ValueError, match=r"Column 'v' must hold arrays of one length.*1 to 2"):
        partitions(df, ("v",), 8)
    with pytest.raises(ValueError, match="batch_size must be an integer of at least 1"):
        partitions(df, ("v",), 0)
    monkeypatch.setenv("JAVA_HOME", "/nowhere")
    with pytest.raises(RuntimeError, match="Spark needs Java 17 or later, and JAVA_HOME"):
        check_java()
