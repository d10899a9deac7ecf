"""What StalenessMonitor measures is what can be worked out by hand."""

import csv
import itertools
import json
import types

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_dsgd
from tests import helpers

StalenessMonitor = tf_dsgd.callbacks.StalenessMonitor

KEYS = {
    "staleness_mean",
    "staleness_p50",
    "staleness_p99",
    "staleness_max",
    "effective_rate",
    "steps_per_second",
}


def records(directory, *kinds):
    """The records of these kinds, of a file in which every line is one JSON object."""
    lines = [json.loads(line) for line in (directory / "monitor.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] in kinds]


def make(strategy, rate=0.5):
    with strategy.scope():
        return helpers.constant_gradient_model(keras.optimizers.SGD(rate))


def fit(model, steps, *callbacks, **options):
    x, y = helpers.ones(2 * steps)
    return model.fit(x, y, batch_size=2, verbose=0, callbacks=list(callbacks), **options).history


def ring(workers=3):
    """Workers in turn: a thousandth of a second apart, so that the order is fixed."""
    times = [1.0 + m / 1000 for m in range(workers)]
    return tf_dsgd.SimulatedCluster(workers, compute_seconds=times, network_seconds=0.0, seed=0)


# -- by hand ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def by_hand(tmp_path_factory):
    """Three workers in turn, two epochs of 30 mini-batches, staleness scaled by 1 / tau."""
    directory = tmp_path_factory.mktemp("run")
    strategy = tf_dsgd.DownpourStrategy(ring(), staleness_scaling="inverse")
    monitor = StalenessMonitor(directory, every_seconds=3.0, tensorboard=False)
    return fit(make(strategy), 30, monitor, epochs=2), directory


def test_the_logs_of_a_ring(by_hand):
    """An epoch's staleness is 0, 1, 2 and then 27 times 2, as each epoch begins with a drain.

    The mean is 57 / 30. f = 1 / max(tau, 1) is 1, 1 and 28 times a half: the rate of 0.5 is in the
    mean 0.5 * 16 / 30. Worker m does ten steps in the 10.02 seconds of the slowest.
    """
    history, _ = by_hand
    assert history["staleness_mean"] == pytest.approx([57 / 30] * 2)
    assert history["staleness_p50"] == history["staleness_p99"] == [2.0, 2.0]
    assert history["staleness_max"] == [2.0, 2.0]
    assert history["effective_rate"] == pytest.approx([0.5 * 16 / 30] * 2)
    assert history["steps_per_second"] == pytest.approx([30 / 10.02] * 2)
    for m in range(3):
        assert history[f"steps_per_second_worker_{m}"] == pytest.approx([10 / 10.02] * 2)
    assert len(history) == len(KEYS) + 3 + 1  # and the loss


def test_the_records_of_a_ring(by_hand):
    """Samples at 3, 6 and 9 virtual seconds, when workers' pushes at 3.000, 3.001 ... arrive.

    At 3.000 worker 0 has pushed three times and the others twice: tau = 0, 1, 2, 2, 2, 2, 2.
    """
    _, directory = by_hand
    (header,) = records(directory, "start")
    assert (header["schema"], header["num_workers"], header["clock"]) == (1, 3, "virtual")
    assert header["versions"]["tf_dsgd"] == tf_dsgd.__version__
    assert header["rules"]["server"]["scaling"] == "inverse_staleness"
    samples = records(directory, "sample")
    seconds = [3.0, 6.0, 9.0, 10.02]
    np.testing.assert_allclose(
        [s["seconds"] for s in samples], seconds + [10.02 + s for s in seconds]
    )
    first = samples[0]
    assert first["staleness"]["histogram"] == [[0, 1], [1, 1], [2, 5]]
    assert first["staleness"]["mean"] == pytest.approx(11 / 7)
    assert first["workers"]["steps"] == [3, 2, 2]
    assert first["workers"]["staleness_mean"] == pytest.approx([4 / 3, 3 / 2, 2])
    assert first["effective_rate"] == pytest.approx(0.5 * (1 + 1 + 5 / 2) / 7)
    assert first["steps_per_second"] == pytest.approx(7 / 3)
    assert [s["samples"] for s in samples] == [2 * s["steps"] for s in samples]
    assert [s["epoch"] for s in samples] == [0] * 4 + [1] * 4
    ends = records(directory, "epoch")
    assert [e["steps"] for e in ends] == [30, 60]
    assert ends[1]["workers"]["steps"] == [10, 10, 10]
    assert records(directory, "end")[0]["seconds"] == pytest.approx(20.04)


def test_several_optimizers_have_no_learning_rate(tmp_path):
    """NaN in logs, and null in records."""
    strategy = tf_dsgd.DownpourStrategy(ring())
    with strategy.scope():
        parts = keras.optimizers.OptimizerMap(keras.optimizers.SGD(0.5))
        model = helpers.constant_gradient_model(keras.optimizers.MultiOptimizer(parts))
    history = fit(model, 6, StalenessMonitor(tmp_path, tensorboard=False))
    assert np.isnan(history["effective_rate"]).all()
    (end,) = records(tmp_path, "epoch")
    assert end["learning_rate"] is None and end["effective_rate"] is None
    assert end["steps"] == 6


def test_the_time_of_simulated_workers():
    """Worker 0: 4 rounds of 0.25 + 2 * 1 + 0.25 seconds. Worker 1: 3 of 0.25 + 2 * 1.5 + 0.25.

    A takes 2 at 0, 2.5, 5, 7.5 and B at 0, 3.5, 7: the first 14 mini-batches. A ends at 10, B at
    10.5, and A waits for it half a second.
    """
    cluster = tf_dsgd.SimulatedCluster(2, compute_seconds=[1.0, 1.5], network_seconds=0.25, seed=0)
    strategy = tf_dsgd.DownpourStrategy(cluster, push_every=2, fetch_every=2)
    fit(make(strategy), 14)
    want = [[1.0, 8.0, 1.0, 0.5], [0.75, 9.0, 0.75, 0.0]]
    snapshot = strategy.engine.snapshot()
    np.testing.assert_allclose(snapshot.spent, want)
    np.testing.assert_allclose(snapshot.spent.sum(1), snapshot.seconds)


# -- the counters ------------------------------------------------------------------------


def test_bins_of_large_staleness():
    """Messages that claim old versions: each is in the last bin whose edge is not above it."""
    from tf_dsgd.engine.ledger import WORKER_EDGES

    strategy = tf_dsgd.DownpourStrategy(tf_dsgd.LocalCluster(2))
    fit(make(strategy), 4)
    before = strategy.engine.snapshot().shards[0]
    program, (sequence, _) = strategy.engine.program, strategy.engine.store.sequences()
    staleness = [63, 64, 79, 80, 127, 128, 1000, 16383, 16384, 100_000]
    for i, tau in enumerate(staleness):
        header = [0, 0, sequence + 1 + i, strategy.updates - tau, 1]
        assert program.deliver(tf.constant(header, tf.int64), [tf.ones([3, 1])])
    new = strategy.engine.snapshot().shards[0].since(before)
    want = np.zeros(len(WORKER_EDGES), int)
    for tau in staleness:
        want[max(i for i, edge in enumerate(WORKER_EDGES) if edge <= tau)] += 1
    np.testing.assert_array_equal(new.worker_bins, [want, 0 * want])
    assert new.bins[[63, 64, 79, 80, 127, 128, 1000, 16383]].tolist() == [1] * 7 + [3]
    summary = new.staleness()
    assert (summary.count, summary.max, summary.p50) == (10, 100_000, 127)
    assert summary.mean == pytest.approx(np.mean(staleness))


def test_a_restored_strategy_goes_on_counting():
    strategy = tf_dsgd.DownpourStrategy(ring())
    fit(make(strategy), 12)
    other = tf_dsgd.DownpourStrategy(ring())
    other.restore(strategy.state())
    mine, theirs = (s.engine.snapshot().shards[0] for s in (other, strategy))
    np.testing.assert_array_equal(mine.worker_bins, theirs.worker_bins)
    np.testing.assert_array_equal(mine.bins, theirs.bins)
    assert str(other.staleness()) == str(strategy.staleness())


# -- in fit -----------------------------------------------------------------------------------


def test_callbacks_after_it_see_the_logs(tmp_path):
    """CSVLogger writes what History has; EarlyStopping stops by it."""
    strategy = tf_dsgd.DownpourStrategy(ring())
    path = tmp_path / "log.csv"
    stop = keras.callbacks.EarlyStopping("staleness_mean", mode="min", patience=1)
    history = fit(
        make(strategy), 9, StalenessMonitor(), keras.callbacks.CSVLogger(path), stop, epochs=9
    )
    assert history["staleness_mean"] == pytest.approx([15 / 9] * 2)  # no better than the first
    with path.open() as file:
        rows = list(csv.DictReader(file))
    for key in KEYS:
        np.testing.assert_allclose([float(row[key]) for row in rows], history[key], rtol=1e-6)


def test_logs_of_many_workers():
    """17 workers, 34 mini-batches: two each. Logs have their least, median and greatest rate."""
    strategy = tf_dsgd.DownpourStrategy(ring(17))
    history = fit(make(strategy), 34, StalenessMonitor())
    extra = {f"steps_per_second_worker_{name}" for name in ("min", "median", "max")}
    assert set(history) == KEYS | extra | {"loss"}
    for key in extra:
        assert history[key] == pytest.approx([2 / (2 * 1.016)])


def test_a_schedule_and_a_scaling_of_ones_own():
    """f(tau) = 1 / (1 + tau)^2 of tau = 0, 1, 2, 2, 2, 2; after six steps the rate is 0.25."""
    rate = keras.optimizers.schedules.PiecewiseConstantDecay([5], [1.0, 0.25])
    strategy = tf_dsgd.DownpourStrategy(
        ring(), staleness_scaling=lambda tau: 1.0 / tf.cast(1 + tau, tf.float32) ** 2
    )
    history = fit(make(strategy, rate), 6, StalenessMonitor())
    assert history["effective_rate"] == pytest.approx([0.25 * (1 + 1 / 4 + 4 / 9) / 6])


def test_samples_are_examples(tmp_path):
    """Eight mini-batches of eight and one of three are 67 examples, not 72."""
    strategy = tf_dsgd.DownpourStrategy(ring())
    model = make(strategy)
    assert np.isnan(strategy.examples_per_step)
    x, y = helpers.ones(67)
    monitor = StalenessMonitor(tmp_path, tensorboard=False)
    model.fit(x, y, batch_size=8, epochs=2, verbose=0, callbacks=[monitor])
    assert [epoch["samples"] for epoch in records(tmp_path, "epoch")] == [67, 134]
    assert strategy.examples_per_step == 67 / 9


@pytest.mark.parametrize(
    ("batch", "examples"),
    [
        ((np.zeros([5, 2]), np.zeros([5])), 5),
        ({"b": tf.ragged.constant([[1], [], [2, 3]]), "c": np.zeros([3])}, 3),
        ((tf.sparse.from_dense(np.eye(4)),), 4),
        (np.float32(0.0), 1),
    ],
    ids=["dense", "ragged", "sparse", "scalar"],
)
def test_examples_of_a_batch(batch, examples):
    dataset = tf.data.Dataset.from_tensors(batch).repeat(3)
    stream = tf_dsgd.DownpourStrategy(ring()).experimental_distribute_dataset(dataset)
    stream = iter(stream).stream
    while stream.take():
        assert stream.make_ready()
        assert stream.examples == examples


def test_slow_samples_are_taken_less_often(monkeypatch):
    """A sample that takes half a second is followed by none for 25: a share of 2 %."""
    strategy = tf_dsgd.DownpourStrategy(tf_dsgd.LocalCluster(1))
    fit(make(strategy), 2)
    now = [100.0]
    monkeypatch.setattr(strategy.engine, "clock", lambda: now[0])
    ticks = (0.5 * tick for tick in itertools.count())
    fake = types.SimpleNamespace(perf_counter=lambda: next(ticks))
    monkeypatch.setattr("tf_dsgd.callbacks.staleness.time", fake)
    monitor = StalenessMonitor(every_seconds=2.0)
    monitor.start(strategy)
    taken = []
    for _ in range(300):
        now[0] += 0.5
        if monitor.sample_if_due() is not None:
            taken.append(now[0])
    assert taken == [102.0 + 25.0 * i for i in range(6)]


def test_a_model_without_a_strategy_is_refused():
    model = helpers.constant_gradient_model(keras.optimizers.SGD(1.0))
    with pytest.raises(ValueError, match=r"tf_dsgd\.DownpourStrategy.*strategy\.scope"):
        fit(model, 2, StalenessMonitor())


def test_a_sample_that_fails_loses_nothing(tmp_path):
    strategy = tf_dsgd.DownpourStrategy(tf_dsgd.LocalCluster(2))
    with strategy.scope():
        model = helpers.constant_gradient_model(keras.optimizers.SGD(1.0))
    monitor = StalenessMonitor(tmp_path, tensorboard=False)
    monitor.start(strategy)
    x, y = helpers.ones(8)
    model.fit(x, y, batch_size=2, verbose=0)
    with pytest.raises(TypeError, match=r"logs must be a dict of numbers.*Received: 5"):
        monitor.sample(5)
    assert monitor.sample()["staleness_max"] >= 0
    model.fit(x, y, batch_size=2, verbose=0)
    monitor.start(strategy)  # the first run ends
    monitor.stop()
    lines = (tmp_path / "monitor.jsonl").read_text().splitlines()
    found = [json.loads(line) for line in lines]
    kinds = [record["kind"] for record in found]
    assert kinds == ["start", "sample", "sample", "end", "start", "end"]
    counts = [record["staleness"]["count"] for record in found if record["kind"] == "sample"]
    assert counts == [4, 4]
