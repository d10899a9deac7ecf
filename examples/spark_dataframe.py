"""Trains on a DataFrame: its rows go to the workers, and not by way of the driver.

    pip install "tf_dsgd[spark]"
    python examples/spark_dataframe.py

Makes a Parquet file, reads it as a DataFrame, and trains a small network on it three times: by
plain Keras `fit` on rows that were collected, on a `LocalCluster`, and by
`tf_dsgd.spark.Distributor`. Says how well, and how many rows a second of training; for Spark also
the seconds that all of it took, of which starting processes and moving rows are most.
"""

import argparse
import os
import sys
import tempfile
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("PYSPARK_PYTHON", sys.executable)  # the executors' Python has tf_dsgd, too

import keras
import numpy as np
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

import tf_dsgd
import tf_dsgd.spark

COLUMNS, BATCH_SIZE, WORKERS = [f"x{n}" for n in range(8)], 64, 2


def make_file(spark, path: str, rows: int) -> None:
    """Rows whose label says whether their point lies within a ball, with a tenth of the noise."""
    columns = [F.randn(seed=n).alias(name) for n, name in enumerate(COLUMNS)]
    df = spark.range(rows, numPartitions=2 * WORKERS).select(*columns, F.rand(100).alias("noise"))
    distance = sum(F.col(name) * F.col(name) for name in COLUMNS)
    label = (distance + F.col("noise") < 7.8).cast("float").alias("label")
    df.select(*[F.col(name).cast("float") for name in COLUMNS], label).write.parquet(path)


class Clock(keras.callbacks.Callback):
    """Notes the seconds of every epoch."""

    def __init__(self):
        super().__init__()
        self.seconds = []

    def on_epoch_begin(self, epoch, logs=None):
        self._start = time.perf_counter()

    def on_epoch_end(self, epoch, logs=None):
        self.seconds.append(time.perf_counter() - self._start)


def train(data, epochs: int, strategy=None, cluster: bool = False) -> tuple[float, list[float]]:
    """Gives the accuracy in the last epoch, and the seconds of all but the first one."""
    if cluster:  # TF_CONFIG says which
        strategy = tf_dsgd.DownpourStrategy(push_every=5, fetch_every=5)
        data = strategy.distribute_datasets_from_function(data)
    keras.utils.set_random_seed(1)
    with strategy.scope() if strategy else keras.name_scope("plain"):
        model = keras.Sequential(
            [
                keras.Input((len(COLUMNS),)),
                keras.layers.Dense(64, "relu"),
                keras.layers.Dense(1, "sigmoid"),
            ]
        )
        model.compile("adam", "binary_crossentropy", metrics=["accuracy"], steps_per_execution=20)
    clock = Clock()
    arguments = {"x": data} if cluster else {"x": data[0], "y": data[1], "batch_size": BATCH_SIZE}
    history = model.fit(**arguments, epochs=epochs, shuffle=False, verbose=0, callbacks=[clock])
    return history.history["accuracy"][-1], clock.seconds[1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=40_000)
    parser.add_argument("--epochs", type=int, default=5, help="at least 2")
    options = parser.parse_args()
    if options.rows < 1 or options.epochs < 2:
        parser.error("--rows must be at least 1, and --epochs at least 2: the first one traces")

    spark = SparkSession.builder.master(f"local[{WORKERS + 2}]").getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "rows.parquet")
        make_file(spark, path, options.rows)
        df = spark.read.parquet(path)

        collected = df.toPandas().to_numpy("float32")
        here = collected[:, :-1], collected[:, -1]
        results = {"plain fit": train(here, options.epochs)}
        local = tf_dsgd.DownpourStrategy(tf_dsgd.LocalCluster(WORKERS), push_every=5, fetch_every=5)
        results["LocalCluster"] = train(here, options.epochs, local)

        start = time.perf_counter()
        data = tf_dsgd.spark.partitions(df, (COLUMNS, "label"), BATCH_SIZE, shuffle_rows=10_000)
        distributor = tf_dsgd.spark.Distributor(WORKERS)
        results["Distributor"] = distributor.run(train, data, options.epochs, None, True)
        whole = time.perf_counter() - start
    spark.stop()

    for name, (accuracy, seconds) in results.items():
        speed = options.rows * len(seconds) / np.sum(seconds)
        print(f"{name:<13} accuracy {accuracy:.4f}   rows/s {speed:>9,.0f}")
    print(f"Distributor: {whole:.1f} s in all, {np.sum(results['Distributor'][1]):.1f} s in epochs")


if __name__ == "__main__":
    main()
