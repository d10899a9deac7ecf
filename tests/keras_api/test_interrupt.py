"""Ctrl-C ends `fit` within seconds, as a KeyboardInterrupt, and leaves a usable process."""

import itertools
import pathlib
import re
import signal
import subprocess
import sys
import time
import traceback

import keras
import pytest
import tensorflow as tf
from keras.src.utils import python_utils  # noqa: TID251, it is tested
from tensorflow.core.function.polymorphism import type_dispatch  # noqa: TID251, it is tested

import tf_dsgd
from tests import helpers
from tf_dsgd.engine import interrupts

pytestmark = pytest.mark.alone

# Two seconds are promised; beside other programs it was seen to take more.
LIMIT_SECONDS = 5.0

SCRIPT = """
import sys
import keras
import tf_dsgd
from tests import helpers

cluster = {cluster}
strategy = tf_dsgd.DownpourStrategy(cluster, push_every={period}, fetch_every={period})
with strategy.scope():
    model = helpers.constant_gradient_model(keras.optimizers.SGD(1.0), extra=[helpers.Sleep(0.05)])
x, y = helpers.ones(2 * 4000)

def tell(batch, logs):
    if batch == 5:
        print("TRAINING", flush=True)

callbacks = [keras.callbacks.LambdaCallback(on_train_batch_end=tell)]
{body}
"""
CAUGHT = """
try:
    model.fit(x, y, batch_size=2, verbose=0, callbacks=callbacks)
except KeyboardInterrupt:
    weight = float(model.get_weights()[0][0, 0])  # waits for what was handed out
    steps = strategy.steps
    print("INTERRUPTED", strategy.ledger().in_flight, steps + weight, flush=True)
    model.fit(x[:20], y[:20], batch_size=2, verbose=0)
    print("AGAIN", strategy.steps - steps, flush=True)
"""
LOCAL = "tf_dsgd.LocalCluster(2)"
SIMULATED = "tf_dsgd.SimulatedCluster(2, compute_seconds=1.0, network_seconds=0.0, seed=0)"


def interrupt(cluster, body, period=1):
    """Sends SIGINT once training runs; returns output, error text, exit code and seconds."""
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT.format(cluster=cluster, body=body, period=period)],
        cwd=helpers.ROOT,
        env=helpers.python_env(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        for line in process.stdout:
            if line.startswith("TRAINING"):
                break
        else:
            pytest.fail(process.communicate(timeout=10)[1])
        start = time.monotonic()
        process.send_signal(signal.SIGINT)
        first = process.stdout.readline()
        seconds = time.monotonic() - start
        out, err = process.communicate(timeout=20)
        return first + out, err, process.returncode, seconds
    finally:
        process.kill()
        process.wait(timeout=10)


@pytest.mark.parametrize(
    ("cluster", "body", "period"),
    [(LOCAL, CAUGHT, 1), (LOCAL, CAUGHT, 500), (SIMULATED, CAUGHT, 1)],
    ids=["local", "local_500", "simulated"],
)
def test_caught_and_trained_on(cluster, body, period):
    """What was handed out and is still trained on does not grow with the period."""
    out, err, code, seconds = interrupt(cluster, body, period)
    assert code == 0, err
    assert out.split() == ["INTERRUPTED", "0", "0.0", "AGAIN", "10"], (out, err)
    assert seconds <= LIMIT_SECONDS


@pytest.mark.parametrize(
    "cluster",
    [
        tf_dsgd.LocalCluster(2),
        tf_dsgd.SimulatedCluster(2, compute_seconds=1.0, network_seconds=0.5, seed=0),
        tf_dsgd.SimulatedCluster(
            2, schedule=[(m, action) for m in (0, 1) * 400 for action in ("fetch", "push")]
        ),
    ],
    ids=["local", "simulated", "scheduled"],
)
@pytest.mark.parametrize("step", range(4, 10))
def test_within_a_step(cluster, step):
    """The signal comes while a worker computes: its message is numbered, and must not be lost."""
    seen, numbers = [], itertools.count(1)  # two threads count, and each number comes once

    def count(batch):
        seen.append(len(batch))
        if next(numbers) == step:
            signal.raise_signal(signal.SIGINT)

    class Interrupts(keras.layers.Layer):
        def call(self, inputs, training=False):
            return helpers.identity_after(count, inputs) if training else inputs

    strategy = tf_dsgd.DownpourStrategy(cluster)
    with strategy.scope():
        model = helpers.constant_gradient_model(keras.optimizers.SGD(1.0), extra=[Interrupts()])
    with pytest.raises(KeyboardInterrupt):
        model.fit(*helpers.ones(1600), batch_size=2, verbose=0)
    assert float(model.get_weights()[0][0, 0]) == -strategy.steps
    assert len(seen) == strategy.steps < 800
    helpers.assert_ledger_balances(strategy)


class Raises(keras.layers.Layer):
    """Ctrl-C, as often as it says, when it is traced for the first time; and what was traced."""

    def __init__(self, times):
        super().__init__()
        self.times, self.traced, self.ended = times, 0, 0

    def call(self, inputs, training=False):
        if training and isinstance(inputs, tf.Tensor):  # not Keras's symbolic build
            self.traced += 1
            for _ in range(self.times if self.traced == 1 else 0):
                signal.raise_signal(signal.SIGINT)
            self.ended += 1
        return inputs


@pytest.mark.parametrize("times", [1, 2])
def test_while_a_step_is_traced(times, capsys):
    """One signal waits until a variable is read or written, and is told so; a second does not."""
    raises, after = Raises(times), Raises(0)
    strategy = tf_dsgd.DownpourStrategy(tf_dsgd.LocalCluster(2))
    interrupts.not_where_it_does_harm()  # as the first `fit` of a process would have it
    handler = signal.getsignal(signal.SIGINT)
    with strategy.scope():
        dense = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
        extra = [raises, dense, after]
        model = helpers.constant_gradient_model(keras.optimizers.SGD(1.0), extra=extra)
    with pytest.raises(KeyboardInterrupt):
        model.fit(*helpers.ones(20), batch_size=2, verbose=0)
    assert raises.traced == 1
    assert raises.ended == 2 - times
    assert after.traced == 0  # the layer between them was not left to be traced whole
    assert capsys.readouterr().err.count("Ctrl-C ends fit as soon as the trace of its step") == 1
    model.fit(*helpers.ones(20), batch_size=2, verbose=0)
    assert strategy.steps == 10
    helpers.assert_ledger_balances(strategy)
    assert signal.getsignal(signal.SIGINT) is handler


def test_a_block_within_keeps_what_a_block_around_it_would_let_through():
    """As the rounds of a drain within the trace of another step."""
    came = []

    def interrupted():
        with interrupts.held_back(until_a_point=True):
            signal.raise_signal(signal.SIGINT)
            with interrupts.held_back():
                interrupts.point()
                came.append("within")
            interrupts.point()
            came.append("after")

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert came == ["within"]


def test_while_a_shard_s_update_is_traced():
    """After the step itself: what shards do by it."""

    class Optimizer(keras.optimizers.SGD):
        updates = 0

        def update_step(self, gradient, variable, learning_rate):
            Optimizer.updates += 1
            if Optimizer.updates == 1:
                signal.raise_signal(signal.SIGINT)
            super().update_step(gradient, variable, learning_rate)
            if Optimizer.updates == 1:
                Optimizer.updates = 2  # never: the update writes the variable

    strategy = tf_dsgd.DownpourStrategy(tf_dsgd.LocalCluster(2))
    interrupts.not_where_it_does_harm()
    with strategy.scope():
        model = helpers.constant_gradient_model(Optimizer(1.0))
    with pytest.raises(KeyboardInterrupt):
        model.fit(*helpers.ones(20), batch_size=2, verbose=0)
    assert Optimizer.updates == 1
    model.fit(*helpers.ones(20), batch_size=2, verbose=0)
    assert float(model.get_weights()[0][0, 0]) == -strategy.steps == -10
    helpers.assert_ledger_balances(strategy)


class Key:
    """Stands for the type of a call's arguments in the cache of a `tf.function`."""

    compared = 0
    interrupted_at = 0

    def __init__(self, number):
        self.number = number

    def __hash__(self):
        return self.number

    def __eq__(self, other):
        Key.compared += 1
        if Key.compared == Key.interrupted_at:
            signal.raise_signal(signal.SIGINT)
        return self.number == other.number

    def is_supertype_of(self, other):
        return True


def interrupted_lookup(at):
    """When the KeyboardInterrupt came, in the lookup or after; and what a later one gives."""
    table = type_dispatch.TypeDispatchTable()
    table.add_target(Key(1))
    Key.compared, Key.interrupted_at = 0, 0
    table.dispatch(Key(2))
    Key.compared, Key.interrupted_at = 0, at
    came = "never"
    try:
        table.dispatch(Key(2))
        time.sleep(10.0)
    except KeyboardInterrupt as error:
        files = {f.f_code.co_filename for f, _ in traceback.walk_tb(error.__traceback__)}
        came = "within" if type_dispatch.__file__ in files else "after"
    try:
        return came, table.dispatch(Key(2)).number
    except KeyError:
        return came, KeyError


@pytest.mark.parametrize("at", [1, 2, 3, 4])
def test_within_a_lookup_of_a_trace(at):
    tf_dsgd.DownpourStrategy(tf_dsgd.LocalCluster(2))
    assert interrupted_lookup(at) == ("after", 1)


def test_what_an_interrupt_does_to_tensorflows_lookup():
    """If none of these breaks it any more, `not_where_it_does_harm` has no use."""
    former = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        outcomes = [interrupted_lookup(at) for at in (1, 2, 3, 4)]
    finally:
        signal.signal(signal.SIGINT, former)
    assert ("within", KeyError) in outcomes


class NumberAtCtrlC:
    def __float__(self):
        signal.raise_signal(signal.SIGINT)
        return 3.0


def interrupted_logs():
    """When the KeyboardInterrupt came, and what became of the logs."""
    logs = None
    try:
        logs = python_utils.pythonify_logs({"loss": NumberAtCtrlC()})
        time.sleep(10.0)
    except KeyboardInterrupt:
        return "within" if logs is None else "after", logs
    return "never", logs


def test_within_the_logs():
    tf_dsgd.DownpourStrategy(tf_dsgd.LocalCluster(2))
    assert interrupted_logs() == ("after", {"loss": 3.0})


def test_what_keras_does_to_an_interrupt_within_the_logs(monkeypatch):
    """If this raises, nothing need wait for the logs any more."""
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    former = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        came, logs = interrupted_logs()
    finally:
        signal.signal(signal.SIGINT, former)
    assert came == "never"
    assert isinstance(logs["loss"], NumberAtCtrlC)


def test_a_handler_of_the_users_stays():
    former = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        tf_dsgd.DownpourStrategy(tf_dsgd.LocalCluster(2))
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, former)


class FreedAtCtrlC:
    def __del__(self):
        signal.raise_signal(signal.SIGINT)


def test_within_a_finaliser(monkeypatch):
    """Python would print what it raises there, and go on."""
    others = []
    monkeypatch.setattr(sys, "unraisablehook", others.append)
    strategy = tf_dsgd.DownpourStrategy(tf_dsgd.LocalCluster(2))
    with strategy.scope():
        model = helpers.constant_gradient_model(keras.optimizers.SGD(1.0))
    seen = []

    def free(batch, logs):
        seen.append(batch)
        if batch == 3:
            FreedAtCtrlC()

    free = keras.callbacks.LambdaCallback(on_train_batch_end=free)
    with pytest.raises(KeyboardInterrupt):
        model.fit(*helpers.ones(8000), batch_size=2, verbose=0, callbacks=[free])
    assert seen[3:4] == [3]
    assert len(seen) < 1000
    assert float(model.get_weights()[0][0, 0]) == -strategy.steps
    assert others == []


def test_other_errors_of_finalisers_are_told_as_before(monkeypatch):
    class Broken:
        def __del__(self):
            raise ValueError("its words")

    others = []
    monkeypatch.setattr(
        sys, "unraisablehook", lambda unraisable: others.append(unraisable.exc_type)
    )
    for _ in range(2):  # the second finds it there
        tf_dsgd.DownpourStrategy(tf_dsgd.LocalCluster(2))
    Broken()
    assert others == [ValueError]


def test_uncaught_ends_the_process():
    """Nobody catches it: the process is gone within two seconds, by the signal, and says so."""
    _, err, code, seconds = interrupt(
        LOCAL, "model.fit(x, y, batch_size=2, verbose=0, callbacks=callbacks)"
    )
    assert code in (-signal.SIGINT, 130)
    assert "Traceback" not in err
    *_, where, last = err.strip().splitlines()
    assert "KeyboardInterrupt. With tf_dsgd.callbacks.BackupAndRestore" in last
    traceback_file = pathlib.Path(re.search(r"the traceback is in (\S+)", where)[1])
    assert traceback_file.read_text().strip().endswith("KeyboardInterrupt")
    traceback_file.unlink()
    assert seconds <= LIMIT_SECONDS
