"""Two workers of two tasks each: codecs on pipelines that they run themselves, backup tasks.

And a worker whose second task does not answer any more, for which its first one waits.
"""

import signal
import time

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_dsgd
from tests import faults, helpers
from tests.cluster import connections

EXAMPLES, BATCH, WIDTH = 96, 4, 5
TIMEOUT = 8.0
PARTS = tf_dsgd.ModelParallel({"first|seen": 0, "second.*|dense.*": 1})
# Keras says so whenever data of unknown length end.
pytestmark = pytest.mark.filterwarnings("ignore:Your input ran out of data:UserWarning")


def groups(**options):
    return tf_dsgd.TFCluster(tasks_per_worker=2, worker_timeout_seconds=TIMEOUT, **options)


def inputs():
    """In eighths: sums of their means are exact in float32."""
    return np.random.default_rng(0).integers(-16, 16, (EXAMPLES, 6)).astype("float32") / 8


def pipeline(context):
    x = inputs()
    data = tf.data.Dataset.from_tensor_slices((x, np.zeros((len(x), 1), "float32")))
    return data.shard(context.num_input_pipelines, context.input_pipeline_id).batch(BATCH)


def test_what_was_applied_and_what_is_kept_are_all_gradients_of_each_part(tmp_path):
    """Also of a checkpoint, which another strategy goes on from; and of each example once."""
    made = []
    for _ in range(2):
        strategy = tf_dsgd.DownpourStrategy(
            groups(),
            push_every=2,
            fetch_every=2,
            compression=tf_dsgd.compression.Threshold(1.0, entropy=True),
            model_parallel=PARTS,
        )
        with strategy.scope():
            x = keras.Input((6,))
            layers = [
                keras.layers.Dense(WIDTH, name=name, use_bias=False, kernel_initializer="zeros")
                for name in ("first", "second")
            ]
            model = keras.Model(x, keras.layers.Concatenate()([layer(x) for layer in layers]))
            model.compile(keras.optimizers.SGD(1.0), loss=lambda y, p: tf.reduce_sum(p, -1))
        made.append((strategy, model))
        backup = tf_dsgd.callbacks.BackupAndRestore(tmp_path / "backup", save_freq=6)
        data = strategy.distribute_datasets_from_function(pipeline)
        ends = helpers.break_off(0, 15) if len(made) == 1 else keras.callbacks.Callback()
        try:
            model.fit(data, epochs=2, shuffle=False, verbose=0, callbacks=[backup, ends])
        except helpers.Broken:
            assert len(made) == 1
    strategy, model = made[1]
    of_weights = [cells["residual"] for cells in strategy.engine.store.kept.values()]
    devices = sorted({v.device[-26:] for cell in of_weights for v in cell.present()})
    assert [len({v.device for v in cell.present()}) for cell in of_weights] == [2, 2]
    assert len(devices) == 4, devices
    # Each mini-batch's gradient is the mean of its inputs, of the same for every output.
    wanted = np.repeat(2 * inputs().sum(0)[:, None] / BATCH, WIDTH, 1)
    for cell, kernel in zip(of_weights, model.get_weights(), strict=True):
        np.testing.assert_array_equal(sum(cell.read().values()) - kernel, wanted)
    assert strategy.steps == 2 * EXAMPLES // BATCH
    helpers.assert_ledger_balances(strategy, strategy.updates)


class UntilRepeated(keras.callbacks.Callback):
    """Ends training at an epoch's end, once the task goes on and what it sent was refused."""

    def __init__(self, strategy, playing, seconds=60.0):
        super().__init__()
        self.strategy, self.playing = strategy, playing
        self.epochs, self.deadline = 0, time.monotonic() + seconds

    def on_epoch_end(self, epoch, logs=None):
        self.epochs = epoch + 1
        struck = not self.playing.script and not self.playing.stopped
        done = struck and self.strategy.ledger().reasons["repeated"] > 0
        assert done or time.monotonic() < self.deadline, self.strategy.ledger()
        self.model.stop_training = done


def test_a_backup_task_is_run_for_a_worker_whose_second_task_is_stopped():
    strategy = tf_dsgd.PeriodicAveragingStrategy(
        groups(late_after_seconds=1.0), average_every=3, model_parallel=PARTS
    )
    with strategy.scope():
        model = faults.seen_model(EXAMPLES, keras.optimizers.SGD(0.01))
    x, y = faults.data(EXAMPLES)
    playing = faults.OnProcesses(strategy, [faults.stop_at(1, 20, seconds=TIMEOUT / 2)])
    until = UntilRepeated(strategy, playing)
    history = model.fit(
        x, y, batch_size=BATCH, epochs=10_000, verbose=0, callbacks=[playing, until]
    )
    faults.assert_metrics_whole(history, y)
    faults.assert_nothing_lost(strategy, model, until.epochs, EXAMPLES // BATCH)
    assert strategy.engine.store.incarnations == [0, 0]  # nobody counted as lost


def test_a_part_of_each_worker_that_is_idle_is_told_of(capfd):
    strategy = tf_dsgd.DownpourStrategy(groups())
    with strategy.scope():
        model = helpers.constant_gradient_model("sgd")
    model.fit(*helpers.ones(8), batch_size=4, verbose=0)
    said = capfd.readouterr().err
    assert "tasks_per_worker=2 is for model_parallel" in said and 'ModelParallel("auto")' in said


class Vanishes(keras.callbacks.Callback):
    """Stops a worker's second task for good, and kills it once the worker is lost.

    Until then the kernel takes in what is sent there, as where a host has lost its power: nothing
    tells the first task that nobody answers, but whoever cancels what it waits for. Where it did
    not wait in that moment the second goes on, and is stopped again.
    """

    def __init__(self, strategy):
        super().__init__()
        self.strategy = strategy
        self.process = faults.task("worker", 1)
        self.begin, self.stopped, self.before = 3, None, None
        self.told, self.epochs = 0, 0
        self.deadline = time.monotonic() + 150.0

    def sent(self):
        """Bytes from the first task to the second."""
        return connections.between_tasks()["worker 0", "worker 1"]

    def on_train_batch_end(self, batch, logs=None):
        now, here = time.monotonic(), self.strategy.engine.store.present[0]
        assert now < self.deadline, (self.begin, self.before, self.told)
        if self.told:
            return
        done = self.strategy.ledger().workers[0].steps
        if self.stopped is None and here and done >= self.begin:
            self.process.send_signal(signal.SIGSTOP)
            self.stopped = now
        elif self.stopped is not None and self.before is None and now > self.stopped + 2.0:
            self.before = self.sent()  # it waits by now
        elif self.before is not None and not here:
            # Less than before was seen once on a busy machine: not a sign that it was told.
            self.told = max(0, self.sent() - self.before)
            self.process.send_signal(signal.SIGKILL if self.told else signal.SIGCONT)
            self.begin, self.stopped, self.before = done + 3, None, None

    def on_epoch_end(self, epoch, logs=None):
        self.epochs = epoch + 1
        self.model.stop_training = bool(self.told) and self.strategy.engine.store.present[0]


def test_one_that_waits_for_a_task_that_answers_nobody_is_told_and_joins_with_its_successor():
    """As it is told, it ends its calls to the other: a frame of 13 bytes for each (RFC 9113)."""
    strategy = tf_dsgd.DownpourStrategy(groups(), model_parallel=PARTS)
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((5,)),
                faults.Seen(EXAMPLES, name="seen"),
                keras.layers.Dense(3, name="first"),
                helpers.Sleep(0.3, name="second_waits"),  # most of a round the first waits for it
                keras.layers.Dense(6, name="second"),
            ]
        )
        model.compile(keras.optimizers.SGD(0.01), "mse")
    vanishes = Vanishes(strategy)
    x, y = faults.data(EXAMPLES)
    model.fit(x, y, batch_size=BATCH, epochs=10_000, verbose=0, callbacks=[vanishes])
    assert vanishes.told >= 13
    faults.assert_nothing_lost(strategy, model, vanishes.epochs, EXAMPLES // BATCH)
    assert strategy.engine.store.incarnations[0] >= 1
