"""What ends a script: a line, with the traceback in a file, where that line says all."""

import sys
from pathlib import Path

import pytest
import tensorflow as tf

from tf_dsgd import console, resuming


@pytest.fixture
def hook(monkeypatch):
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    console.end_scripts_in_a_line("a note")
    return lambda error: sys.excepthook(type(error), error, error.__traceback__)


def raised(kind, *notes):
    """As a script's call of the package raises it."""
    try:
        error = kind("its words")
        for note in notes:
            error.add_note(note)
        raise error
    except kind as caught:
        return caught


@pytest.mark.parametrize("kind", [ValueError, RuntimeError])
@pytest.mark.parametrize("note", ["a note", console.NOTHING_TRAINED])
def test_an_error_that_says_all(hook, capsys, kind, note):
    hook(raised(kind, note))
    where, last = capsys.readouterr().err.splitlines()
    line = raised.__code__.co_firstlineno + 6
    told = "its words" if kind is RuntimeError else f"{__file__}:{line}: ValueError: its words"
    assert last == f"tf_dsgd: {told}"
    file = Path(where.removeprefix("tf_dsgd: the traceback is in "))
    assert file.read_text().startswith("Traceback (most recent call last):")
    file.unlink()


def test_what_autograph_raises_again_is_said_as_it_was(hook, capsys):
    def step():
        with console.before_training():
            raise ValueError("its words")

    with pytest.raises(ValueError, match="in user code:") as caught:
        tf.function(tf.function(step))()
    hook(caught.value)
    where, last = capsys.readouterr().err.splitlines()
    assert last.startswith("tf_dsgd: ") and last.endswith("ValueError: its words")
    Path(where.removeprefix("tf_dsgd: the traceback is in ")).unlink()


def test_another_error_has_its_traceback(hook, capsys):
    hook(raised(ValueError, "another note"))
    assert capsys.readouterr().err.startswith("Traceback (most recent call last):")


def test_what_comes_before_training_says_so():
    with pytest.raises(OSError, match="its words") as caught, console.before_training():
        raise OSError("its words")
    assert caught.value.__notes__ == [console.NOTHING_TRAINED]


def test_a_hook_of_the_users_stays(monkeypatch):
    theirs = lambda *_: None  # noqa: E731
    monkeypatch.setattr(sys, "excepthook", theirs)
    console.end_scripts_in_a_line()
    assert sys.excepthook is theirs


@pytest.mark.parametrize("backup", [None, "/backups/checkpoint-7"])
def test_ctrl_c_says_what_training_goes_on_from(hook, capsys, monkeypatch, backup):
    monkeypatch.setattr(console, "_trains", lambda where: True)
    monkeypatch.setattr(resuming, "_noted", [])
    resuming.note("/backups/checkpoint-3")
    resuming.note(backup)
    hook(raised(KeyboardInterrupt))
    where, last = capsys.readouterr().err.splitlines()
    Path(where.removeprefix("tf_dsgd: the traceback is in ")).unlink()
    if backup is None:
        assert last.endswith("BackupAndRestore the same command would go on from there.")
    else:
        assert f"KeyboardInterrupt. The last checkpoint is in {backup}. To go on from it: " in last
