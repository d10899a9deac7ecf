"""A ps task is lost: the error says so, and how to go on, whatever was under way."""

import re

import pytest

from tests.cluster import processes
from tests.cluster.observing import MODULE, SCRIPTS, exit_of, log, report, roles
from tf_dsgd.membership import deadlines

pytestmark = [pytest.mark.slow, pytest.mark.beside_others]


@pytest.mark.parametrize(
    ("moment", "what"),
    [
        ("start", "ps 0 at 127.0.0.1:"),
        *(
            (moment, "Lost ps 0 at 127.0.0.1:")
            for moment in ("model", "fit", "trace", "validation", "evaluate", "between")
        ),
    ],
)
def test_a_ps_that_is_lost_is_named_whatever_was_under_way(moment, what):
    """Also by the error of what runs in the chief, which Keras calls."""
    script = str(SCRIPTS / "lost_ps.py")
    with processes.started(*MODULE, "--workers", "1", "--ps", "2", script, moment) as process:
        error = report(process, "ERROR", 60.0)
        code, _ = exit_of(process, 60.0)
    assert code == 1, log(process)
    assert error.startswith(what)
    assert "To start again: " in error and "-m tf_dsgd.launch --workers 1 " in error
    assert "[launch] chief (pid" in process.text.splitlines()[-1]
    assert "Traceback" not in process.text, log(process)


@pytest.mark.parametrize("what", ["evaluate", "read"])
def test_an_interrupt_while_a_ps_does_not_answer_is_one(what):
    """TensorFlow, whose call ends only when the ps is lost, makes another error of it."""
    script = str(SCRIPTS / "interrupted_without_ps.py")
    with processes.started(*MODULE, "--workers", "1", "--ps", "1", script, what) as process:
        code, _ = exit_of(process, 2 * processes.START_SECONDS)
    assert code == 0 and "INTERRUPTED" in process.lines, log(process)


def test_an_interrupt_ends_calls_that_nobody_answers():
    """The chief waits for rounds under way half a second, not the 5 s until it would give up."""
    script = str(SCRIPTS / "interrupted_in_a_round.py")
    with processes.started(*MODULE, "--workers", "1", "--ps", "1", script) as process:
        code, _ = exit_of(process, 2 * processes.START_SECONDS)
    assert code == 130, log(process)
    seconds = float(re.search(r"CLOSED (\S+)", process.text)[1])
    assert seconds < deadlines.CLOSE_SECONDS - 0.5, log(process)
    assert "lost worker" not in process.text, log(process)


def test_reading_what_a_lost_ps_held_names_it():
    script = str(SCRIPTS / "reads_without_ps.py")
    with processes.started(*MODULE, "--workers", "1", "--ps", "1", script) as process:
        address = roles(process, 2)["ps 0"][0]
        code, _ = exit_of(process, 2 * processes.START_SECONDS)
    assert code == 0, log(process)
    got = [line.split(maxsplit=3)[1:] for line in process.lines if line.startswith("READ")]
    names = [
        "weights",
        "array",
        "assign",
        "rate",
        "steps",
        "updates",
        "staleness",
        "ledger",
        "state",
    ]
    assert [name for name, _, _ in got] == names, log(process)
    for name, kind, text in got:
        assert kind == "RuntimeError" and f"ps 0 at {address}" in text, (name, kind, text)
