"""On executors that are processes of their own, and are killed."""

import os
import pathlib
import threading
import time

import numpy as np
import psutil

import tf_dsgd.spark
from tf_dsgd.spark import barrier_task

EXECUTOR = "CoarseGrainedExecutorBackend"  # Spark's class that an executor's Java runs


def executor_of(process):
    """The executor that has started a process, perhaps by way of others."""
    (found,) = [each for each in process.parents() if EXECUTOR in " ".join(each.cmdline())]
    return found


def test_deepdist_gives_the_same_with_an_executor_killed(executors, tmp_path):
    """12 points in 12 partitions; the executor of the seventh is killed, with all its tasks."""
    mark, model = str(tmp_path / "killed"), {"sum": np.zeros(2)}
    points = [np.array([float(i), 2.0 * i]) for i in range(12)]

    def dies_before(index, part):
        yield from part
        if index == 6 and not pathlib.Path(mark).exists():
            executor = executor_of(psutil.Process())
            pathlib.Path(mark).write_text(str(executor.pid))
            executor.kill()

    def add(model, update):
        model["sum"] += update

    data = executors.sparkContext.parallelize(points, 12).mapPartitionsWithIndex(dies_before)
    with tf_dsgd.spark.DeepDist(model) as d:
        counts = d.train(data, lambda model, rows: sum(rows), add)
    np.testing.assert_array_equal(model["sum"], [66.0, 132.0])  # 0 + ... + 11, and twice that
    assert (counts.updates, counts.empty) == (12, 0)
    assert not psutil.pid_exists(int(pathlib.Path(mark).read_text()))


def executors_that_run(spark):
    """Processes of this session's executors, once both are there: three tasks at once need them."""
    spark.sparkContext.parallelize([], 3).barrier().mapPartitions(lambda _: []).collect()
    named = {EXECUTOR, spark.sparkContext.applicationId}
    return {
        process.pid
        for process in psutil.process_iter(["cmdline"])
        if all(any(name in word for word in process.info["cmdline"] or ()) for name in named)
    }


def test_a_task_killed_at_the_start_leaves_the_executors_alone(executors, tmp_path, monkeypatch):
    """The last one, while the others wait for it. The stage is started again."""
    mark, write = tmp_path / "killed", barrier_task.write

    def killed_once(records, keys, folder):
        from pyspark import BarrierTaskContext

        task = BarrierTaskContext.get().partitionId()
        (tmp_path / f"task {task}").touch()
        if task == 2 and not mark.exists():
            until = time.monotonic() + 60.0
            while len(list(tmp_path.iterdir())) < 3 and time.monotonic() < until:
                threading.Event().wait(0.1)
            threading.Event().wait(0.5)  # else they may not wait yet, and the test tells less
            mark.touch()
            os.kill(os.getpid(), 9)
        return write(records, keys, folder)

    monkeypatch.setattr(barrier_task, "write", killed_once)
    before = executors_that_run(executors)
    assert tf_dsgd.spark.Distributor(1).run(os.getppid) > 0
    assert mark.exists()
    assert executors_that_run(executors) == before
    assert len(before) == 2


SCRIPT = """
import json, os, pathlib, sys, threading
import keras, numpy as np, psutil
import tf_dsgd
from tests.spark.test_executors import executor_of

folder = pathlib.Path(sys.argv[1])
with open(folder / "starts", "a") as file:
    print(os.getpid(), file=file)
start = len((folder / "starts").read_text().split())

def process_of_ps():
    config = json.loads(os.environ["TF_CONFIG"])
    config["task"]["type"] = "ps"
    for process in psutil.process_iter(["environ"]):
        if (process.info["environ"] or {}).get("TF_CONFIG") == json.dumps(config):
            return process

class Kills(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        with open(folder / "epochs", "a") as file:
            print(start, epoch, file=file)
        if (start, epoch) == (1, 1):
            process_of_ps().kill()
        if (start, epoch) == (2, 3):
            executor_of(psutil.Process()).kill()
            threading.Event().wait(60)  # to be ended with it
            sys.exit("This process has outlived its executor.")

x = np.ones((32, 3), "float32")
strategy = tf_dsgd.DownpourStrategy()
with strategy.scope():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
backup = tf_dsgd.callbacks.BackupAndRestore(str(folder / "backup"))
model.fit(x, x[:, 0], batch_size=8, epochs=6, verbose=0, callbacks=[backup, Kills()])
ledger = strategy.ledger()
print("steps", strategy.steps, sum(worker.steps for worker in ledger.workers), flush=True)
"""


def test_a_script_goes_on_from_its_backup_after_a_ps_and_an_executor_were_killed(
    executors, tmp_path, capsys
):
    """Spark starts the stage again, twice. Each epoch is done once: 6 of 32 rows, 8 at a time.

    It has three attempts, so no loss costs another one, as that of an executor by its own Java.
    """

    def lines(name):
        return (tmp_path / name).read_text().splitlines()

    del executors
    (tmp_path / "script.py").write_text(SCRIPT)
    assert tf_dsgd.spark.Distributor(1).run(tmp_path / "script.py", tmp_path) is None
    epochs = [tuple(map(int, line.split())) for line in lines("epochs")]
    assert epochs == [(1, 0), (1, 1), (2, 2), (2, 3), (3, 4), (3, 5)]
    processes = [int(line) for line in lines("starts")]
    assert len(processes) == 3
    assert not any(map(psutil.pid_exists, processes))
    assert "steps 24 24\n" in capsys.readouterr().out
