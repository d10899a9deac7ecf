"""What the monitor says of compressed messages, beside what can be worked out by hand."""

import json
import logging

import keras
import numpy as np
import pytest

import tf_dsgd
from tests import helpers
from tests.faults import fail_at
from tf_dsgd import compression

pytestmark = pytest.mark.medium

StalenessMonitor = tf_dsgd.callbacks.StalenessMonitor
OWN = {"message_bytes", "dense_ratio", "fraction_emitted"}
HELD = {"residual_norm", "residual_to_gradient", "residuals_lost"}


def train(codec, steps, cluster=None, epochs=1, directory=None, **options):
    """Every gradient of three weights is 1; four steps of one worker an epoch, at a rate of 0."""
    cluster = tf_dsgd.SimulatedCluster(1) if cluster is None else cluster
    strategy = tf_dsgd.DownpourStrategy(cluster, compression=codec, **options)
    with strategy.scope():
        model = helpers.constant_gradient_model(keras.optimizers.SGD(0.0))
    monitor = StalenessMonitor(directory, every_seconds=2.0, tensorboard=False)
    x, y = helpers.ones(2 * steps)
    kept = model.fit(x, y, batch_size=2, epochs=epochs, verbose=0, callbacks=[monitor])
    return strategy, kept.history


def test_threshold_by_hand():
    """tau = 1.5: r = 1; 2, sends, 0.5; 1.5; 2.5, sends, 1.0. Two of four messages, three each."""
    strategy, logs = train(compression.Threshold(1.5), steps=4)
    wanted = {
        "message_bytes": 2 * 3 * 4 / 4,
        "dense_ratio": 12 / 6,
        "fraction_emitted": 0.5,
        "residual_norm": np.sqrt(3 * 1.0**2),
        "residual_to_gradient": 1.0,  # the gradient's norm is sqrt(3)
        "residuals_lost": 0.0,
        "fraction_overdue": 0.0,
    }
    found = {name: logs[name][0] for name in wanted}
    assert found == pytest.approx(wanted)
    assert strategy.residual() == pytest.approx((found["residual_norm"],))


@pytest.mark.few(5)
@pytest.mark.parametrize("kind", ["simulated", "threads"])
@pytest.mark.parametrize(
    ("codec", "size", "emitted", "names"),
    [
        (compression.Cast("bfloat16"), 6, 1.0, OWN),
        (compression.QSGD(4), 3 + 4, 1.0, OWN),
        (compression.OneBit(), 1 + 2 * 4, 1.0, OWN | HELD),
        (compression.EFSign(), 1 + 4, 1.0, OWN | HELD),
        (compression.PowerSGD(1), 12, 1.0, OWN | HELD),
        (compression.TopK(0.3), 4 + 4, 1 / 3, OWN | HELD),
        (compression.Threshold(0.5), 12, 1.0, OWN | HELD | {"fraction_overdue"}),
    ],
)
def test_each_codec(codec, size, emitted, names, kind):
    """Of two workers; every message has the same bytes. A column is all of three weights."""
    cluster = tf_dsgd.SimulatedCluster(2) if kind == "simulated" else tf_dsgd.LocalCluster(2)
    strategy, logs = train(codec, 8, cluster)
    # A matrix of three rows and one column: one bit's columns, and no matrix for PowerSGD.
    assert {name for name in logs if name in OWN | HELD | {"fraction_overdue"}} == names
    assert logs["message_bytes"][0] == pytest.approx(size)
    assert logs["dense_ratio"][0] == pytest.approx(12 / size)
    assert logs["fraction_emitted"][0] == pytest.approx(emitted)
    if "residual_norm" in names:
        norm = np.sqrt(np.mean(np.square(strategy.residual())))
        assert logs["residual_norm"][0] == pytest.approx(norm)
        assert logs["residual_to_gradient"][0] == pytest.approx(norm / np.sqrt(3))


def test_without_a_codec_nothing_is_said(tmp_path):
    _, logs = train(None, 4, directory=tmp_path)
    assert not (OWN | HELD) & logs.keys()
    assert "messages" not in (tmp_path / "monitor.jsonl").read_text().replace('"messages":[', "")


def test_rows_of_a_table():
    """A message has the rows' numbers, 8 bytes each, and the elements that are due."""
    strategy = tf_dsgd.DownpourStrategy(
        tf_dsgd.SimulatedCluster(1), compression=compression.TopK(0.25)
    )
    with strategy.scope():
        table = keras.layers.Embedding(100, 4)
        model = keras.Sequential([keras.Input((2,), dtype="int32"), table, keras.layers.Flatten()])
        model.compile("sgd", "mse")
    ids = np.arange(16).reshape(8, 2)
    logs = model.fit(
        ids, np.ones((8, 8)), batch_size=2, verbose=0, callbacks=[StalenessMonitor()]
    ).history
    # Four rows of four elements, of which four are sent; uncompressed with the table's shape.
    assert logs["message_bytes"] == [4 * 8 + 4 * (4 + 4)]
    assert logs["dense_ratio"] == [pytest.approx((4 * (8 + 16) + 2 * 4) / 64)]
    assert logs["fraction_emitted"] == [0.25]


def test_files_and_page(tmp_path):
    """Samples and epochs have it, TensorBoard's scalars too; the page draws it."""
    strategy = tf_dsgd.DownpourStrategy(
        tf_dsgd.SimulatedCluster(1), compression=compression.Threshold(1.5)
    )
    with strategy.scope():
        model = helpers.constant_gradient_model(keras.optimizers.SGD(0.0))
    monitor = StalenessMonitor(tmp_path, every_seconds=2.0, tensorboard=True)
    x, y = helpers.ones(16)
    model.fit(x, y, batch_size=2, epochs=2, verbose=0, callbacks=[monitor])
    lines = [json.loads(line) for line in (tmp_path / "monitor.jsonl").read_text().splitlines()]
    samples = [line for line in lines if line["kind"] == "sample"]
    epochs = [line for line in lines if line["kind"] == "epoch"]
    assert len(epochs) == 2 and all("messages" in line for line in samples + epochs)
    assert "message_bytes" not in epochs[0]["logs"]
    # A message in two of four, of 12 bytes: over all samples as over all epochs.
    assert np.mean([line["messages"]["message_bytes"] for line in epochs]) == pytest.approx(
        7.5, 0.3
    )

    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    tags = events.Tags()["tensors"]
    for name in OWN | HELD | {"fraction_overdue"}:
        assert f"messages/{name}" in tags

    pytest.importorskip("matplotlib", reason="matplotlib is an extra")
    from tf_dsgd import report

    page = report.figure(report.read(tmp_path))
    titles = [ax.get_title(loc="left") for ax in page.axes]
    assert len(titles) == 8 and titles[6].startswith("Sent") and "Held back" in titles[7]
    labels = [line.get_label() for line in page.axes[6].lines]
    assert any(label.startswith("dense ratio") for label in labels)
    ys = page.axes[7].lines[0].get_ydata()
    expected = [line["messages"]["residual_to_gradient"] for line in samples]
    np.testing.assert_allclose(ys, [value for value in expected if value])


# -- falling behind ---------------------------------------------------------------------------


@pytest.fixture
def warned(caplog):
    """What was warned of."""
    caplog.set_level(logging.WARNING, logger="absl")
    return lambda: [m for m in caplog.messages if "after sending" in m]


def test_what_falls_behind_is_warned_of_once(warned):
    """Gradients of 1 and tau = 0.25: each message leaves 0.75 more of every element."""
    _, logs = train(compression.Threshold(0.25), 4, epochs=3)
    assert logs["fraction_overdue"] == [1.0, 1.0, 1.0]
    assert logs["residual_norm"] == pytest.approx([np.sqrt(3) * 3.0 * k for k in (1, 2, 3)])
    (said,) = warned()
    assert "100 % are above tau=0.25" in said and "100 % were before" in said
    assert f"norm of {np.sqrt(3) * 3:.3g}, and had {np.sqrt(3) * 1.5:.3g}." in said
    assert "Use a larger tau" in said and "warm start" in said


def test_the_first_epoch_is_compared_with_its_first_messages(warned):
    """With one epoch alone. After one step 0.75 are held back of each, and 7.5 after ten."""
    train(compression.Threshold(0.25), 10)
    (said,) = warned()
    assert "100 % were before" in said


def test_large_first_gradients_that_are_made_up_for_are_no_reason_to_warn(warned):
    """A message takes 1 of 8, 1/2, 1/2, ...: 7 are held back after the first, 1.5 after twelve."""
    strategy = tf_dsgd.DownpourStrategy(
        tf_dsgd.SimulatedCluster(1), compression=compression.Threshold(1.0)
    )
    with strategy.scope():
        model = helpers.constant_gradient_model(keras.optimizers.SGD(0.0), width=2)
    x = np.full((12, 2), 0.5, "float32")
    x[0] = [2.0, 8.0]
    monitor = StalenessMonitor(every_seconds=1.0, tensorboard=False)
    logs = model.fit(
        x, np.zeros((12, 1)), batch_size=1, shuffle=False, verbose=0, callbacks=[monitor]
    ).history
    assert logs["fraction_overdue"] == [0.5]
    assert logs["residual_norm"] == [pytest.approx(np.hypot(0.5, 1.5))]
    assert not warned()


def test_a_residual_above_a_gradient_is_no_reason_to_warn(warned):
    """tau = 3.5 and gradients of 1: a residual of up to three gradients, and never above tau."""
    _, logs = train(compression.Threshold(3.5), 3, epochs=2)
    assert logs["residual_to_gradient"] == pytest.approx([3.0, 2.5])
    assert logs["fraction_overdue"] == [0.0, 0.0]
    assert not warned()


@pytest.mark.parametrize("codec", [compression.TopK(0.3), compression.OneBit()])
def test_codecs_without_a_threshold_are_not_warned_of(warned, codec):
    _, logs = train(codec, 4, epochs=2)
    assert "fraction_overdue" not in logs and not warned()


# -- lost workers -----------------------------------------------------------------------------


def test_a_lost_worker_is_shown_and_counted():
    """Its norm is NaN while it is away; its messages since it came back are its own."""
    script = [fail_at(1, 2, "compute")]
    cluster = tf_dsgd.SimulatedCluster(2, faults=script, worker_timeout_seconds=4.0)
    strategy, logs = train(compression.Threshold(1.5), 12, cluster)
    assert strategy.engine.struck
    first, second = strategy.residual()
    assert first >= 0 and np.isnan(second)
    assert logs["residuals_lost"] == [1.0]
    assert logs["residual_norm"] == [pytest.approx(first)]
    assert "1 time gone with a lost worker" in repr(strategy)

    strategy, _ = train(compression.QSGD(4), 12, cluster)  # which keeps a count alone
    store = strategy.engine.store
    assert strategy.engine.struck and store.kept and not store.residuals_lost
    assert "held back" not in repr(strategy)

    script = [fail_at(1, 2, "compute", back_after=2.0)]
    cluster = tf_dsgd.SimulatedCluster(2, faults=script, worker_timeout_seconds=4.0)
    strategy, logs = train(compression.Threshold(1.5), 16, cluster)
    assert np.isfinite(strategy.residual()).all()
    assert logs["residuals_lost"] == [1.0]
    assert 0 < logs["message_bytes"][0] < 12
