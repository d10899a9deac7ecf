"""Ctrl-C ends `fit` within seconds, as a KeyboardInterrupt, and leaves a usable process."""

import signal
import subprocess
import sys
import time

import keras
import pytest
import tensorflow as tf

import tf_dsgd
from tests import helpers

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
# Where the chief hands out far ahead it does not wait, and Python raises a KeyboardInterrupt
# anywhere: in TensorFlow's cache of traces too, which then is of no more use. This waits where it
# is safe, in the same callbacks that tell of the moment.
WAITS = """
import time
callbacks.append(
    keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: time.sleep(60) if batch == 5 else None
    )
)
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
    [(LOCAL, CAUGHT, 1), (LOCAL, WAITS + CAUGHT, 500), (SIMULATED, CAUGHT, 1)],
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
            2, schedule=[(m, action) for m in (0, 1) * 40 for action in ("fetch", "push")]
        ),
    ],
    ids=["local", "simulated", "scheduled"],
)
@pytest.mark.parametrize("step", range(4, 10))
def test_within_a_step(cluster, step):
    """The signal comes while a worker computes: its message is numbered, and must not be lost."""
    seen = []

    def count(batch):
        seen.append(len(batch))
        if len(seen) == step:
            signal.raise_signal(signal.SIGINT)

    class Interrupts(keras.layers.Layer):
        def call(self, inputs, training=False):
            return helpers.identity_after(count, inputs) if training else inputs

    strategy = tf_dsgd.DownpourStrategy(cluster)
    with strategy.scope():
        model = helpers.constant_gradient_model(keras.optimizers.SGD(1.0), extra=[Interrupts()])
    with pytest.raises(KeyboardInterrupt):
        model.fit(*helpers.ones(160), batch_size=2, verbose=0)
    assert float(model.get_weights()[0][0, 0]) == -strategy.steps
    assert len(seen) == strategy.steps < 80
    helpers.assert_ledger_balances(strategy)


@pytest.mark.parametrize("times", [1, 2])
def test_while_a_step_is_traced(times):
    """One signal waits for the end of the trace, which the next `fit` uses; a second does not."""
    traced, ended = [], []

    class Interrupts(keras.layers.Layer):
        def call(self, inputs, training=False):
            if training and isinstance(inputs, tf.Tensor):  # not Keras's symbolic build
                traced.append(inputs)
                if len(traced) == 1:
                    for _ in range(times):
                        signal.raise_signal(signal.SIGINT)
                ended.append(inputs)
            return inputs

    strategy = tf_dsgd.DownpourStrategy(tf_dsgd.LocalCluster(2))
    with strategy.scope():
        model = helpers.constant_gradient_model(keras.optimizers.SGD(1.0), extra=[Interrupts()])
    with pytest.raises(KeyboardInterrupt):
        model.fit(*helpers.ones(20), batch_size=2, verbose=0)
    assert len(traced) == 1
    assert len(ended) == 2 - times
    model.fit(*helpers.ones(20), batch_size=2, verbose=0)
    assert float(model.get_weights()[0][0, 0]) == -strategy.steps == -10
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


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
    """Nobody catches it: the process is gone within two seconds, by the signal, with its trace."""
    _, err, code, seconds = interrupt(
        LOCAL, "model.fit(x, y, batch_size=2, verbose=0, callbacks=callbacks)"
    )
    assert code in (-signal.SIGINT, 130)
    assert "KeyboardInterrupt" in err
    assert seconds <= LIMIT_SECONDS
