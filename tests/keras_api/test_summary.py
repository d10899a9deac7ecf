"""The line that `fit` says at its end, where its progress bar is on."""

import dataclasses
import re
import time

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_dsgd
from tf_dsgd.engine.ledger import COLUMNS, STALENESS_BINS, STEPS, TAU_SUM, WORKER_EDGES, Counters
from tf_dsgd.engine.snapshot import Snapshot
from tf_dsgd.engine.timing import KINDS
from tf_dsgd.strategies.summary import Account, Summary

SAID = re.compile(r"^(\d+) mini-batches, (\S+) a (virtual )?second; mean staleness (\S+)[;.]")


def trained(strategy, data, callbacks=(), **options):
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.01), "mse", steps_per_execution=2)
    x = data if isinstance(data, tf.data.Dataset) else np.ones((data, 3), "float32")
    y = None if isinstance(data, tf.data.Dataset) else np.ones((data, 1), "float32")
    batch_size = None if y is None else 8
    model.fit(x, y, batch_size=batch_size, callbacks=list(callbacks), shuffle=False, **options)
    return model


def said(capsys):
    return [line for line in capsys.readouterr().out.splitlines() if SAID.match(line)]


def test_each_fit_says_its_own(capsys):
    strategy = tf_dsgd.DownpourStrategy(tf_dsgd.LocalCluster(2))
    model = trained(strategy, 44, epochs=3)
    x, y = np.ones((17, 3), "float32"), np.ones((17, 1), "float32")
    model.fit(x, y, batch_size=8, validation_data=(x, y))
    counts = [int(SAID.match(line)[1]) for line in said(capsys)]
    assert counts == [3 * 6, 3]


def test_the_rate_and_shares_are_those_of_the_virtual_clock(capsys):
    """Two workers of a second a batch, one push of no time: two batches a virtual second."""
    trained(tf_dsgd.DownpourStrategy(tf_dsgd.SimulatedCluster(2, compute_seconds=1.0)), 64)
    (line,) = said(capsys)
    assert "8 mini-batches, 2 a virtual second; " in line
    assert line.endswith("workers: fetch 0%, compute 100%, push 0%, wait 0%.")


@pytest.mark.parametrize("verbose", [0, 2])
def test_without_a_progress_bar_nothing_is_said(capsys, verbose):
    trained(tf_dsgd.DownpourStrategy(tf_dsgd.LocalCluster(1)), 16, verbose=verbose)
    assert not said(capsys)


def test_a_list_of_callbacks_that_is_used_again_has_one(capsys):
    strategy = tf_dsgd.DownpourStrategy(tf_dsgd.LocalCluster(1))
    model = trained(strategy, 16, verbose=0)
    callbacks = keras.callbacks.CallbackList(add_history=True, model=model, verbose=1)
    for _ in range(2):
        model.fit(np.ones((16, 3)), np.ones((16, 1)), batch_size=8, callbacks=callbacks)
    assert [int(SAID.match(line)[1]) for line in said(capsys)] == [2, 2]


def test_input_that_workers_waited_for_is_named(capsys):
    def slow(i):
        time.sleep(0.03)
        return np.ones((8, 3), "float32")

    data = tf.data.Dataset.range(20).map(
        lambda i: (
            tf.ensure_shape(tf.numpy_function(slow, [i], tf.float32), (8, 3)),
            tf.ones((8, 1)),
        )
    )
    trained(tf_dsgd.DownpourStrategy(tf_dsgd.LocalCluster(2)), data, epochs=2)
    (line,) = said(capsys)
    assert line.endswith("Workers waited for input: cache it, or read and prepare it faster.")


def account(spent, arguments=(), **options):
    rows = np.zeros((2, COLUMNS), np.int64)
    rows[:, STEPS], rows[:, TAU_SUM] = [30, 10], [6, 3]
    bins = np.zeros(STALENESS_BINS, np.int64)
    bins[[0, 1, 3]] = 3, 3, 2
    counters = Counters(8, rows, bins, np.zeros((2, len(WORKER_EDGES)), np.int64))
    return Account(
        40,
        Snapshot(16.0, 16.0, (counters,), np.array([[0.0] * len(KINDS), spent])),
        **{
            "input_seconds": 0.0,
            "virtual": False,
            "bounds_staleness": False,
            "arguments": arguments,
            "steps_per_execution": 20,
            **options,
        },
    )


def test_the_line_by_hand():
    """40 mini-batches in 16 s; nine updates of staleness over eight messages."""
    assert account([1.0, 6.0, 1.0, 2.0]).line() == (
        "40 mini-batches, 2.5 a second; mean staleness 1.12; "
        "workers: fetch 10%, compute 60%, push 10%, wait 20%."
    )


WAITED = [1.0, 4.0, 0.0, 5.0]
EXCHANGED = [3.0, 5.0, 2.0, 0.0]
PERIODS = ("cluster", "push_every", "fetch_every", "max_staleness")


@pytest.mark.parametrize(
    ("found", "hint"),
    [
        (account(EXCHANGED), None),
        (account(EXCHANGED, PERIODS), "A larger push_every and fetch_every takes less time"),
        (account(WAITED), None),
        (account(WAITED, input_seconds=7.0), "waited for input"),
        (account(WAITED, input_seconds=7.0, virtual=True), None),
        (account(WAITED, PERIODS, bounds_staleness=True), "with a larger max_staleness"),
        (account(WAITED, ("average_every",), bounds_staleness=True), "a larger average_every"),
        (account(WAITED, PERIODS, steps_per_execution=1), "compile(steps_per_execution=20)"),
        (account(WAITED, input_seconds=None, steps_per_execution=1), None),
        (account([0.0, 0.0, 0.0, 0.0], PERIODS, steps_per_execution=1), None),
    ],
)
def test_one_hint_if_there_is_one(found, hint):
    given = found.hint()
    assert given is None if hint is None else hint in given


def test_shares_that_are_not_known_are_not_shown():
    """2.5 of 10 seconds went to rounds that workers had not told of."""
    found = account(WAITED, steps_per_execution=1)
    unknown = dataclasses.replace(
        found, interval=dataclasses.replace(found.interval, undivided=2.5)
    )
    assert unknown.line() == "40 mini-batches, 2.5 a second; mean staleness 1.12."


def test_tracing_is_not_in_the_rate(capsys):
    """The first `fit` traces for a second and trains for hundredths of one."""
    strategy = tf_dsgd.DownpourStrategy(tf_dsgd.LocalCluster(1))
    traced = []

    class Traced(keras.layers.Layer):
        def call(self, x):
            traced.append(x)
            return x

    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), Traced(), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    begun = []
    begin = Summary.begin

    def noted(self, input_time):
        begun.append(len(traced))
        begin(self, input_time)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Summary, "begin", noted)
        model.fit(np.ones((16, 3)), np.ones((16, 1)), batch_size=8, epochs=2)
    assert begun == [len(traced)] * 2  # no layer is traced after that


def test_a_list_of_callbacks_without_a_model(capsys):
    model = trained(tf_dsgd.DownpourStrategy(tf_dsgd.LocalCluster(1)), 16, verbose=0)
    callbacks = keras.callbacks.CallbackList([keras.callbacks.TerminateOnNaN()], verbose=1)
    model.fit(np.ones((16, 3)), np.ones((16, 1)), batch_size=8, callbacks=callbacks)
    assert [int(SAID.match(line)[1]) for line in said(capsys)] == [2]
    assert len(callbacks.callbacks) == 1


def test_lost_counts_are_no_error_of_a_fit_that_is_done(capsys, monkeypatch):
    strategy = tf_dsgd.DownpourStrategy(tf_dsgd.LocalCluster(1))

    class Lose(keras.callbacks.Callback):
        def on_train_end(self, logs=None):
            def lost():
                raise RuntimeError("Lost ps 0")

            monkeypatch.setattr(strategy.engine, "snapshot", lost)

    assert trained(strategy, 16, [Lose()]).history.history["loss"]
    assert not said(capsys)


def test_nothing_is_said_of_a_fit_that_an_error_ended(capsys):
    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match="enough"):
        trained(tf_dsgd.DownpourStrategy(tf_dsgd.LocalCluster(1)), 16, [Stop()])
    assert not said(capsys)
