"""What StalenessMonitor leaves in a run's folder, however the run ends."""

import importlib.util
import json
import logging
import signal
import subprocess
import sys
import time

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_dsgd
from tests import helpers
from tf_dsgd import report

pytestmark = pytest.mark.medium

StalenessMonitor = tf_dsgd.callbacks.StalenessMonitor

needs_tensorboard = pytest.mark.skipif(
    importlib.util.find_spec("tensorboard") is None, reason="TensorBoard is an extra"
)


def make(workers=2, **options):
    times = [1.0 + m / 1000 for m in range(workers)]
    cluster = tf_dsgd.SimulatedCluster(workers, compute_seconds=times, network_seconds=0.0)
    strategy = tf_dsgd.DownpourStrategy(cluster, **options)
    with strategy.scope():
        return strategy, helpers.constant_gradient_model(keras.optimizers.SGD(0.5))


def fit(model, steps, *callbacks, **options):
    x, y = helpers.ones(2 * steps)
    model.fit(x, y, batch_size=2, verbose=0, callbacks=list(callbacks), **options)


def lines(directory):
    return (directory / "monitor.jsonl").read_text().splitlines()


def kinds(directory):
    return [json.loads(line)["kind"] for line in lines(directory)]


# -- lines of JSON ----------------------------------------------------------------------------


def test_every_line_is_strict_json(tmp_path):
    """An interval without a message has no mean: null, which every reader of JSON takes."""
    strategy, _ = make()
    monitor = StalenessMonitor(tmp_path, tensorboard=False)
    monitor.start(strategy)
    monitor.sample({"loss": tf.constant(float("nan")), "name": np.float32(0.25)})
    monitor.stop()

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    start, sample, end = [json.loads(line, parse_constant=refuse) for line in lines(tmp_path)]
    assert [start["kind"], sample["kind"], end["kind"]] == ["start", "sample", "end"]
    assert sample["staleness"]["mean"] is None
    assert sample["staleness"]["count"] == 0
    assert sample["learning_rate"] is None  # no optimizer was named
    assert sample["logs"] == {"loss": None, "name": 0.25}


def test_without_a_folder_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    _, model = make()
    fit(model, 4, StalenessMonitor())
    assert list(tmp_path.iterdir()) == []


class Interrupted(Exception):
    """Stands for whatever ends a run."""


def interrupt_at(epoch, batch):
    at = []

    def stop(number, logs):
        if (at[-1], number) == (epoch, batch):
            raise Interrupted

    return keras.callbacks.LambdaCallback(
        on_epoch_begin=lambda number, logs: at.append(number), on_train_batch_end=stop
    )


def test_a_resumed_run_appends_and_the_report_joins_them(tmp_path):
    """Broken at the fifth mini-batch of epoch 2, resumed from the end of epoch 1.

    The report has each mini-batch once: what came after the checkpoint is there from the resumed
    run alone. Seconds go on from the checkpoint: 10 and 10.01 for two epochs of 20 mini-batches.
    """

    def run(*callbacks):
        _, model = make()
        monitor = StalenessMonitor(tmp_path / "run", every_seconds=2.0, tensorboard=False)
        backup = tf_dsgd.callbacks.BackupAndRestore(tmp_path / "backup")
        fit(model, 20, monitor, backup, *callbacks, epochs=3)

    with pytest.raises(Interrupted):
        run(interrupt_at(1, 9))
    broken = [json.loads(line) for line in lines(tmp_path / "run")]
    assert max(record["steps"] for record in broken) > 20
    run()
    starts = [json.loads(x) for x in lines(tmp_path / "run") if '"kind":"start"' in x]
    assert [start["steps"] for start in starts] == [0, 20]
    joined = report.read(tmp_path / "run")
    assert joined.ended
    assert [epoch["steps"] for epoch in joined.epochs] == [20, 40, 60]
    steps = [sum(sample["workers"]["steps"]) for sample in joined.samples]
    assert sum(steps) == 60
    assert [sample["steps"] for sample in joined.samples] == np.cumsum(steps).tolist()
    seconds = [epoch["seconds"] for epoch in joined.epochs]
    np.testing.assert_allclose(seconds, [10.01, 20.02, 30.03])


def test_after_an_error_the_files_are_whole_and_the_same_monitor_goes_on(tmp_path):
    _, model = make()
    monitor = StalenessMonitor(tmp_path, every_seconds=2.0, tensorboard=False)
    with pytest.raises(Interrupted):
        fit(model, 20, monitor, interrupt_at(0, 12))
    assert kinds(tmp_path)[0] == "start"
    assert set(kinds(tmp_path)[1:]) == {"sample"}
    fit(model, 20, monitor)
    assert kinds(tmp_path)[-2:] == ["epoch", "end"]
    assert kinds(tmp_path).count("start") == 2


def test_a_line_that_was_cut_off_stays_alone(tmp_path):
    (tmp_path / "monitor.jsonl").write_text('{"kind":"start","schema":1,"st')
    _, model = make()
    fit(model, 8, StalenessMonitor(tmp_path, every_seconds=99.0, tensorboard=False))
    cut, *rest = lines(tmp_path)
    assert cut == '{"kind":"start","schema":1,"st'
    assert [json.loads(line)["kind"] for line in rest] == ["start", "sample", "epoch", "end"]
    assert report.read(tmp_path).samples[-1]["steps"] == 8


KILLED = """
import sys
import keras
import tf_dsgd
from tests import helpers

strategy = tf_dsgd.DownpourStrategy(tf_dsgd.LocalCluster(2))
with strategy.scope():
    model = helpers.constant_gradient_model(keras.optimizers.SGD(1.0), extra=[helpers.Sleep(0.02)])
x, y = helpers.ones(2 * 100_000)
monitor = tf_dsgd.callbacks.StalenessMonitor(sys.argv[1], every_seconds=0.05, tensorboard=False)
model.fit(x, y, batch_size=2, verbose=0, callbacks=[monitor])
"""


@pytest.mark.few(1)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_run_that_was_killed_leaves_a_readable_file(number, tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(tmp_path)],
        cwd=helpers.ROOT,
        env=helpers.python_env(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + 80
        path = tmp_path / "monitor.jsonl"
        while not path.exists() or path.read_bytes().count(b"\n") < 6:
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(number)
        process.wait(timeout=20)
    finally:
        process.kill()
        process.wait(timeout=10)
    run = report.read(tmp_path)
    assert not run.ended
    assert len(run.samples) >= 5
    assert run.samples[-1]["steps"] == sum(sum(s["workers"]["steps"]) for s in run.samples) > 0


# -- TensorBoard ------------------------------------------------------------------------------


@pytest.fixture
def no_tensorboard(monkeypatch):
    """As if TensorBoard were not installed."""
    find = importlib.util.find_spec

    def find_spec(name, *args):
        return None if name.split(".")[0] == "tensorboard" else find(name, *args)

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)


def test_missing_tensorboard_is_said_once_and_nothing_else_is_missing(
    no_tensorboard, tmp_path, caplog
):
    _, model = make()
    with caplog.at_level(logging.WARNING, logger="absl"):
        fit(model, 4, StalenessMonitor(tmp_path), epochs=2)
    said = [record.getMessage() for record in caplog.records]
    assert len([text for text in said if "TensorBoard" in text]) == 1
    assert 'pip install "tf_dsgd[tensorboard]"' in " ".join(said)
    assert kinds(tmp_path)[-1] == "end"
    assert [path.name for path in tmp_path.iterdir()] == ["monitor.jsonl"]


def test_tensorboard_that_is_asked_for_must_be_there(no_tensorboard, tmp_path):
    with pytest.raises(ImportError, match=r'pip install "tf_dsgd\[tensorboard\]"'):
        StalenessMonitor(tmp_path, tensorboard=True)
    with pytest.raises(ValueError, match="needs a run_dir"):
        StalenessMonitor(tensorboard=True)


def test_kerass_own_callback_needs_it_too(no_tensorboard, tmp_path):
    strategy, model = make()
    with pytest.raises(ImportError, match=r'pip install "tf_dsgd\[tensorboard\]"'):
        fit(model, 4, keras.callbacks.TensorBoard(tmp_path))
    assert strategy.steps == 0
    fit(model, 4)
    assert strategy.steps == 4


def test_tensorboard_false_is_silent(no_tensorboard, tmp_path, caplog):
    with caplog.at_level(logging.WARNING, logger="absl"):
        fit(make()[1], 4, StalenessMonitor(tmp_path, tensorboard=False))
    assert not [record for record in caplog.records if "TensorBoard" in record.getMessage()]


@needs_tensorboard
def test_event_files_hold_scalars_and_histograms(tmp_path):
    """Two workers in turn, 40 mini-batches: tau is 0, then 1 always; the samples are the records'.

    Worker 0's first message meets version 0, worker 1's the one of worker 0.
    """
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    _, model = make(staleness_scaling="inverse")
    fit(model, 40, StalenessMonitor(tmp_path, every_seconds=5.0, tensorboard=True))
    events = EventAccumulator(str(tmp_path / "tensorboard"), size_guidance={"tensors": 0})
    events.Reload()

    def read(tag):
        found = events.Tensors(tag)
        return [e.step for e in found], [tf.make_ndarray(e.tensor_proto) for e in found]

    samples = report.read(tmp_path).samples
    steps, means = read("staleness/mean")
    assert steps == [sample["steps"] for sample in samples]
    np.testing.assert_allclose(means, [s["staleness"]["mean"] for s in samples], rtol=1e-6)
    _, rates = read("steps_per_second/worker_1")
    np.testing.assert_allclose(
        rates, [s["workers"]["steps_per_second"][1] for s in samples], rtol=1e-6
    )
    _, effective = read("rate/effective")
    np.testing.assert_allclose(effective, [0.5] * len(samples), rtol=1e-6)  # f(0) = f(1) = 1
    for tag, want in (
        ("staleness/shard_0", {0: 1, 1: 39}),
        ("staleness/worker_0", {0: 1, 1: 19}),
        ("staleness/worker_1", {1: 20}),
    ):
        counted = {}
        for buckets in read(tag)[1]:
            for left, right, count in buckets:
                assert right == left + 1
                counted[left + 0.5] = counted.get(left + 0.5, 0) + count
        assert {tau: count for tau, count in counted.items() if count} == want
