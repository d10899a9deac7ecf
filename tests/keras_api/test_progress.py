"""What a user sees while `fit` runs: one bar an epoch, true counts, lines when it is piped."""

import re

import pytest

import tf_dsgd
from tests import helpers

ESCAPES = re.compile(r"\x1b\[[0-9;]*m|\x08")


def printed(capsys, verbose, epochs=2, examples=250, **arguments):
    strategy = tf_dsgd.DownpourStrategy(helpers.workers(2))
    x, y = helpers.regression(examples)
    with strategy.scope():
        model = helpers.recording_model("sgd", metrics=helpers.id_metrics())
    capsys.readouterr()
    history = model.fit(x, y, batch_size=8, epochs=epochs, verbose=verbose, **arguments).history
    captured = capsys.readouterr()
    said = captured.err.splitlines()
    if helpers.ON_CLUSTER:  # at the start, what each ps holds
        said = [line for line in said if not line.startswith("tf_dsgd: ps ")]
    assert said == []
    text = ESCAPES.sub("", captured.out)
    return [line for line in text.split("\n") if line], history


def on_screen(lines):
    """What a terminal shows in the end: Keras rewrites the bar's line after a carriage return."""
    return [line.rsplit("\r", 1)[-1] for line in lines]


@pytest.mark.parametrize("verbose", [1, 2])
def test_one_bar_with_the_true_count(capsys, verbose):
    lines, history = printed(capsys, verbose)
    assert [line for line in lines if line.startswith("Epoch")] == ["Epoch 1/2", "Epoch 2/2"]
    lines = on_screen(lines)
    last = [line for line in lines if line.startswith("32/32")]
    summary = [line for line in lines if line.startswith("64 mini-batches, ")]
    assert len(summary) == (verbose == 1)
    assert len(lines) == 4 + len(summary) and len(last) == 2, lines  # one bar an epoch
    for line, loss, count in zip(last, history["loss"], history["id_count"], strict=True):
        assert float(re.search(r" loss: ([-0-9.e+]+)", line)[1]) == pytest.approx(loss, rel=1e-3)
        assert float(re.search(r"id_count: ([0-9.e+]+)", line)[1]) == count == 250
        assert "/step" in line


def test_the_bar_counts_up_and_estimates(capsys):
    lines, _ = printed(capsys, 1, epochs=1)
    drawn = [text for line in lines for text in line.split("\r")]
    counts = [int(m[1]) for m in (re.match(r" ?(\d+)/32 ", text) for text in drawn) if m]
    assert counts == sorted(counts)  # Keras may draw the last one twice: in passing and as the end
    assert len(set(counts)) > 1 and counts[-1] == 32
    assert all(len(text) < 200 and text.isprintable() for text in drawn)


def test_silence_when_asked(capsys):
    lines, _ = printed(capsys, 0)
    assert lines == []


def test_validation_shows_in_the_epochs_last_line(capsys):
    x, y = helpers.regression(40)
    lines, history = printed(capsys, 1, epochs=1, validation_data=(x, y))
    (line,) = [line for line in on_screen(lines) if "val_loss" in line]
    value = float(re.search(r"val_loss: ([-0-9.e+]+)", line)[1])
    assert value == pytest.approx(history["val_loss"][0], rel=1e-3)
