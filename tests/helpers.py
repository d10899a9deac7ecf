"""Models, data, layers and metrics that several tests use, none of which knows tf_dsgd's inside."""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_dsgd

ROOT = Path(__file__).resolve().parents[1]


ON_CLUSTER = bool(os.environ.get("TF_CONFIG"))
"""Whether tests run as the chief of a cluster that `tf_dsgd.launch` started."""


def ps_tasks():
    """How many ps tasks the cluster has of which this process is the chief."""
    return len(json.loads(os.environ["TF_CONFIG"])["cluster"].get("ps", ()))


def workers(number):
    """A cluster of that many workers: threads, or the processes beside this one."""
    if not ON_CLUSTER:
        return tf_dsgd.LocalCluster(number)
    there = len(json.loads(os.environ["TF_CONFIG"])["cluster"]["worker"])
    if there != number:
        pytest.skip(f"needs {number} workers, and this cluster has {there}")
    return tf_dsgd.TFCluster()


def engines(**made):
    """The engines that a test runs on, by name; on a cluster, nothing but that."""
    return {"cluster": tf_dsgd.TFCluster} if ON_CLUSTER else made


class Ids:
    """Sample ids noted by any thread, one array for each batch."""

    def __init__(self):
        self._mutex = threading.Lock()
        self._noted = []

    def after(self, batch):
        """`batch`, once the first column was noted."""
        return identity_after(lambda values: self._add(values[:, 0]), batch)

    def _add(self, ids):
        with self._mutex:
            self._noted.append(np.asarray(ids).astype(np.int64).ravel())

    def take_batches(self):
        """The ids noted since the last call."""
        with self._mutex:
            noted, self._noted = self._noted, []
        return noted

    def take(self):
        """The ids noted since the last call, sorted."""
        noted = self.take_batches()
        return np.sort(np.concatenate(noted)) if noted else np.zeros(0, np.int64)


class IdsInFile(Ids):
    """Sample ids noted by worker processes of this machine, which append lines to a file."""

    def __init__(self):
        super().__init__()
        handle, self._path = tempfile.mkstemp(prefix="tf_dsgd_ids_")
        os.close(handle)
        weakref.finalize(self, os.unlink, self._path)
        self._seen = 0

    def after(self, batch):
        line = tf.strings.reduce_join(tf.strings.as_string(batch[:, 0]), separator=" ")
        note = tf.print(line, output_stream=f"file://{self._path}")
        with tf.control_dependencies([note]):
            return tf.identity(batch)

    def take_batches(self):
        with open(self._path) as file:
            lines = file.read().splitlines()
        lines, self._seen = lines[self._seen :], len(lines)
        return [np.array(line.split(), np.float64).astype(np.int64) for line in lines]


class RecordIds(keras.layers.Layer):
    """Takes the first column of its input off, as sample ids, and notes those trained on."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.supports_jit = False
        self.ids = IdsInFile() if ON_CLUSTER else Ids()

    def call(self, inputs, training=False):
        if training:
            inputs = self.ids.after(inputs)
        return inputs[:, 1:]

    def compute_output_shape(self, input_shape):
        return (*input_shape[:-1], input_shape[-1] - 1)


class WithTable(keras.layers.Layer):
    """A linear layer, and a number from a table for the first column's part of the line."""

    ROWS = 11

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.dense = keras.layers.Dense(1, kernel_initializer="zeros")
        self.table = keras.layers.Embedding(self.ROWS, 1, "zeros", name="table")

    def build(self, input_shape):
        self.dense.build(input_shape)
        self.table.build()

    def call(self, inputs):
        part = keras.ops.clip(keras.ops.floor(2.0 * inputs[:, 0]) + 5.0, 0.0, self.ROWS - 1.0)
        return self.dense(inputs) + self.table(keras.ops.cast(part, "int32"))

    def compute_output_shape(self, input_shape):
        return (*input_shape[:-1], 1)


class Sleep(keras.layers.Layer):
    """Waits while training, as a slow layer would, without holding Python's lock."""

    def __init__(self, seconds, **kwargs):
        super().__init__(**kwargs)
        self.supports_jit = False
        self.seconds = seconds

    def call(self, inputs, training=False):
        if not training:
            return inputs
        seconds = self.seconds
        if ON_CLUSTER:  # no Python function of this process can be called there
            with tf.control_dependencies([sleep_in_graph(seconds)]):
                return tf.identity(inputs)
        return identity_after(lambda batch: time.sleep(seconds), inputs)

    def compute_output_shape(self, input_shape):
        return input_shape


def sleep_in_graph(seconds):
    """An operation that takes this long: the one element of a dataset that sleeps before it."""
    source = tf.raw_ops.TensorDataset(components=[tf.constant(0)], output_shapes=[[]])
    types = {"output_types": [tf.int32], "output_shapes": [[]]}
    slow = tf.raw_ops.SleepDataset(
        input_dataset=source, sleep_microseconds=tf.constant(int(seconds * 1e6), tf.int64), **types
    )
    # Whether there is a second element is asked, too: not of the one that sleeps.
    one = tf.raw_ops.TakeDataset(input_dataset=slow, count=tf.constant(1, tf.int64), **types)
    return tf.raw_ops.DatasetToSingleElement(dataset=one, **types)[0]


def identity_after(function, inputs):
    """The inputs, once the function was called on them as an array.

    TensorFlow never lets go of the function, so it should not hold a layer, and by it a model.
    """

    def call(batch):
        function(batch)
        return batch

    outputs = tf.numpy_function(call, [inputs], inputs.dtype)
    outputs.set_shape(inputs.shape)
    return outputs


class IdSum(keras.metrics.Metric):
    """The exact sum of `ids ** power` over the samples seen; the ids are the last target column."""

    def __init__(self, power, name):
        super().__init__(name=name, dtype="int64")
        self.power = power
        self.total = self.add_variable((), initializer="zeros", dtype="int64", name="total")

    def update_state(self, y_true, y_pred, sample_weight=None):
        ids = tf.cast(y_true[:, -1], tf.int64)
        self.total.assign_add(tf.reduce_sum(ids**self.power))

    def result(self):
        return keras.ops.add(self.total, 0)  # a value, not the variable

    def reset_state(self):
        self.total.assign(0)

    def get_config(self):
        return {"power": self.power, "name": self.name}


def id_metrics():
    """Metrics that are right only if every id was counted once: number, sum, sum of squares."""
    return [IdSum(0, "id_count"), IdSum(1, "id_sum"), IdSum(2, "id_squares")]


@keras.saving.register_keras_serializable("tests")
def mse_of_first(y_true, y_pred):
    """Squared error against the first target column; the last one holds the id."""
    return keras.ops.mean(keras.ops.square(y_true[:, :1] - y_pred), axis=-1)


def regression(examples=250, features=4, seed=0, ids=True):
    """A linear problem without noise; with `ids`, in the first input and the last target column."""
    x = np.random.default_rng(seed).standard_normal((examples, features)).astype("float32")
    kernel = np.linspace(-1.0, 2.0, features)[:, None]
    y = (x @ kernel + 1.0).astype("float32")
    if not ids:
        return x, y
    number = np.arange(examples, dtype="float32")[:, None]
    return np.concatenate([number, x], 1), np.concatenate([y, number], 1)


def recording_model(optimizer, features=4, metrics=(), with_table=False, **compile_args):
    """A linear model for `regression` data that notes the ids it trains on."""
    last = WithTable() if with_table else keras.layers.Dense(1, kernel_initializer="zeros")
    model = keras.Sequential([keras.Input((features + 1,)), RecordIds(name="ids"), last])
    model.compile(optimizer, mse_of_first, metrics=list(metrics), **compile_args)
    return model


@keras.saving.register_keras_serializable("tests")
def mean_output(y_true, y_pred):
    """A loss linear in the output: the gradient is constant, whatever the weights are."""
    return keras.ops.mean(y_pred, axis=-1) + 0.0 * keras.ops.mean(y_true)


def constant_gradient_model(optimizer, extra=(), width=3, **compile_args):
    """On inputs of ones every weight's gradient is exactly 1, and weights start at 0."""
    model = keras.Sequential(
        [
            keras.Input((width,)),
            *extra,
            keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros"),
        ]
    )
    model.compile(optimizer, mean_output, **compile_args)
    return model


def ones(examples, width=3):
    """Inputs for `constant_gradient_model`."""
    return np.ones((examples, width), "float32"), np.zeros((examples, 1), "float32")


class EpochSeconds(keras.callbacks.Callback):
    """The wall time of each epoch, from its beginning to its logs."""

    def __init__(self):
        super().__init__()
        self.seconds = []

    def on_epoch_begin(self, epoch, logs=None):
        self._start = time.perf_counter()

    def on_epoch_end(self, epoch, logs=None):
        self.seconds.append(time.perf_counter() - self._start)


class AtEpochEnd(keras.callbacks.Callback):
    """Keeps what a function returns at the end of every epoch."""

    def __init__(self, function):
        super().__init__()
        self.function = function
        self.values = []

    def on_epoch_end(self, epoch, logs=None):
        self.values.append(self.function())


class Broken(Exception):
    """Stands for whatever ends a run."""


def break_off(epoch, batch):
    """A callback that raises `Broken` at the end of a mini-batch."""
    at = []

    def stop(number, logs):
        if (at[-1], number) == (epoch, batch):
            raise Broken

    return keras.callbacks.LambdaCallback(
        on_epoch_begin=lambda number, logs: at.append(number), on_train_batch_end=stop
    )


def assert_close(got, want, tolerance=1e-6, name=""):
    """Fails unless two lists of arrays agree to the tolerance, relative and absolute."""
    assert len(got) == len(want), (name, len(got), len(want))
    for index, (a, b) in enumerate(zip(got, want, strict=True)):
        message = f"{name}[{index}]"
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance, err_msg=message)


def assert_ledger_balances(strategy, updates=None):
    """Every message sent was applied or refused, in total and for each worker.

    Each was an update, unless it is said how many there should be.
    """
    ledger = strategy.ledger()
    assert ledger.in_flight == 0
    assert ledger.sent == ledger.applied + ledger.refused
    assert strategy.updates == (ledger.applied if updates is None else updates)
    for name in ("sent", "applied", "refused"):
        assert sum(getattr(w, name) for w in ledger.workers) == getattr(ledger, name), name
    for worker in ledger.workers:
        assert worker.sent == worker.applied + worker.refused
    assert sum(worker.steps for worker in ledger.workers) == strategy.steps
    assert strategy.staleness().count == ledger.applied
    return ledger


@contextlib.contextmanager
def works_or_explains(*words):
    """Lets the block succeed, or fail with one error that holds each of the words."""
    try:
        yield
    except (ValueError, TypeError, RuntimeError, NotImplementedError) as error:
        text = str(error).lower()
        missing = [word for word in words if word.lower() not in text]
        assert not missing, f"the message lacks {missing}: {error}"


def python(code, *, timeout=60, **env):
    """Runs code in a fresh interpreter that finds the package; returns the finished process."""
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=python_env(**env),
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def python_env(**env):
    """The environment of such an interpreter."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    return {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONPATH": path, **env}


def drawn(arrays, batch_size):
    """Mini-batches as a cluster's chief holds them for a worker's round."""
    batches = tf.data.Dataset.from_tensor_slices(arrays).batch(batch_size)
    iterator = iter(batches)
    return tf.stack([tf.nest.flatten(iterator.get_next_as_optional(), True)[0] for _ in batches])


def packed(strategy, arrays, batch_size):
    """Mini-batches as they are sent to a worker process for one round."""
    return strategy.engine.program.step.packing.pack(drawn(arrays, batch_size))


class OwnLogs(keras.Model):
    """Reports the loss of each mini-batch by a name, and no metric."""

    def __init__(self, log):
        super().__init__()
        self.log = log
        self.layer = keras.layers.Dense(1)

    def build(self, shape):
        self.layer.build(shape)

    def call(self, x):
        return self.layer(x)

    def train_step(self, batch):
        x, y = batch
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(x, training=True) - y) ** 2)
        self.optimizer.apply(tape.gradient(loss, self.trainable_weights), self.trainable_weights)
        return {self.log: loss}
