"""On every engine StalenessMonitor's numbers are those that the shards counted."""

import json

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_dsgd
from tests import helpers

StalenessMonitor = tf_dsgd.callbacks.StalenessMonitor

ENGINES = helpers.engines(
    local=lambda: tf_dsgd.LocalCluster(2),
    simulated=lambda: tf_dsgd.SimulatedCluster(
        3, compute_seconds=tf_dsgd.Exponential(1.0), network_seconds=0.3, seed=5
    ),
)
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


@pytest.mark.parametrize("engine", ENGINES)
def test_intervals_add_up_to_what_the_shards_counted(engine, tmp_path):
    strategy = tf_dsgd.DownpourStrategy(ENGINES[engine](), push_every=2, fetch_every=3)
    monitor = StalenessMonitor(tmp_path, every_seconds=0.01, tensorboard=False)
    history = fit(make(strategy), 61, monitor, epochs=2, validation_data=helpers.ones(8))
    ledger = helpers.assert_ledger_balances(strategy)
    samples = records(tmp_path, "sample")
    assert len(samples) >= 2
    steps = np.sum([s["workers"]["steps"] for s in samples], axis=0)
    assert steps.tolist() == [w.steps for w in ledger.workers]
    messages = np.sum([s["workers"]["messages"] for s in samples], axis=0)
    assert messages.tolist() == [w.applied for w in ledger.workers]
    counted = {}
    for sample in samples:
        for tau, count in sample["staleness"]["histogram"]:
            counted[tau] = counted.get(tau, 0) + count
    taus = np.repeat(list(counted), list(counted.values()))
    whole = strategy.staleness()
    assert (len(taus), taus.mean(), taus.max()) == pytest.approx(
        (whole.count, whole.mean, whole.max)
    )
    assert samples[-1]["steps"] == strategy.steps == 122
    assert samples[-1]["updates"] == strategy.updates
    assert samples[-1]["samples"] == 244
    # The epochs' percentiles, from the samples of each.
    for epoch in range(2):
        pairs = [p for s in samples if s["epoch"] == epoch for p in s["staleness"]["histogram"]]
        taus = np.sort(np.repeat(*np.transpose(pairs)))
        assert history["staleness_p50"][epoch] == taus[int(np.ceil(0.5 * len(taus))) - 1]
        assert history["staleness_p99"][epoch] == taus[int(np.ceil(0.99 * len(taus))) - 1]
        assert history["staleness_mean"][epoch] == pytest.approx(taus.mean())
    assert history["effective_rate"] == [0.5, 0.5]  # without scaling, the learning rate
    # Logs at samples are of this epoch; the epoch's record has what History has.
    assert [e["logs"]["val_loss"] for e in records(tmp_path, "epoch")] == pytest.approx(
        history["val_loss"], rel=1e-6
    )


@pytest.mark.parametrize("engine", ENGINES)
def test_worker_bins_hold_each_workers_messages(engine):
    strategy = tf_dsgd.DownpourStrategy(ENGINES[engine]())
    fit(make(strategy), 60)
    (counters, *_) = strategy.engine.snapshot().shards
    assert counters.worker_bins.sum(1).tolist() == [w.applied for w in strategy.ledger().workers]
    np.testing.assert_array_equal(counters.worker_bins[:, :64].sum(0), counters.bins[:64])
    means = counters.worker_bins[:, :64] @ np.arange(64) / counters.applied  # all below 64 here
    np.testing.assert_allclose(
        means, [w.staleness_mean for w in strategy.ledger().workers], rtol=1e-12
    )


def test_the_time_of_sleeping_workers():
    """A layer that sleeps 20 ms: 40 mini-batches take two workers together 0.8 s of computing.

    All four kinds together are the time for which a worker took part, which the epoch bounds.
    """
    strategy = tf_dsgd.DownpourStrategy(helpers.workers(2), push_every=4, fetch_every=4)
    with strategy.scope():
        model = helpers.constant_gradient_model(
            keras.optimizers.SGD(1.0), extra=[helpers.Sleep(0.02)]
        )
    strategy.engine.snapshot()  # from here on processes are asked for their times
    fit(model, 40)
    before = strategy.engine.snapshot()
    clock = helpers.EpochSeconds()
    fit(model, 40, clock)
    spent = strategy.engine.snapshot().since(before).spent
    assert spent.shape == (2, 4)
    assert spent[:, 1].sum() >= 0.8
    assert (spent.sum(1) <= clock.seconds[0]).all()
    assert (spent > 0.0).all()


@pytest.mark.parametrize("engine", ENGINES)
def test_sampling_does_not_drain(engine, tmp_path, monkeypatch):
    """Between the first and the last mini-batch of an epoch nobody asks the engine to drain."""
    strategy = tf_dsgd.DownpourStrategy(ENGINES[engine]())
    model = make(strategy)
    fit(model, 4)
    asked, inside = [], []
    drain = strategy.engine.drain
    monkeypatch.setattr(strategy.engine, "drain", lambda: (asked.append(list(inside)), drain()))
    monitor = StalenessMonitor(tmp_path, every_seconds=1e-9, tensorboard=False)
    before = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: inside.append("monitor" if batch < 29 else "")
    )
    after = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: inside.clear())
    fit(model, 30, before, monitor, after)
    assert asked
    assert ["monitor"] not in asked
    assert len(records(tmp_path, "sample")) >= 2


@pytest.mark.parametrize("engine", ENGINES)
def test_a_custom_loop(engine, tmp_path):
    strategy = tf_dsgd.DownpourStrategy(ENGINES[engine]())
    model = make(strategy)
    optimizer = model.optimizer
    with strategy.scope():
        optimizer.build(model.trainable_variables)

    def replica_step(data):
        x, _ = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(x, training=True))
        variables = model.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return loss

    @tf.function
    def step(data):
        return strategy.run(replica_step, args=(data,))

    dataset = tf.data.Dataset.from_tensor_slices(helpers.ones(60)).batch(2)
    monitor = StalenessMonitor(tmp_path, every_seconds=1e-9, tensorboard=False)
    with pytest.raises(RuntimeError, match=r"call start\(strategy\) first"):
        monitor.sample()
    monitor.start(strategy, optimizer)
    seen = []
    for data in strategy.experimental_distribute_dataset(dataset):
        loss = step(data)
        seen.append(monitor.sample_if_due({"loss": loss}))
    monitor.stop()
    measured = [sample for sample in seen if sample is not None]
    assert measured and all(set(sample) > KEYS for sample in measured)
    samples = records(tmp_path, "sample")
    steps = np.sum([s["workers"]["steps"] for s in samples], axis=0)
    assert steps.tolist() == [w.steps for w in strategy.ledger().workers]
    assert steps.sum() == strategy.steps == 30
    assert samples[-1]["learning_rate"] == 0.5
    assert {s["epoch"] for s in samples} == {None}
    assert all(isinstance(s["logs"]["loss"], float) for s in samples[:-1])
    with pytest.raises(RuntimeError, match="not measuring"):
        monitor.stop()
