"""Tasks that are lost, come late or come back, with real processes: nothing lost, nothing hangs.

Outside witnesses: a table with a row for each example and a gradient of 1 counts how often each
was applied; a momentum of 1 counts mini-batches, and sums the counts in its weight.
"""

import json
import os
import re
import shlex
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from tests.cluster import processes
from tests.cluster.counted import (
    assert_each_example_once_an_epoch,
    assert_ledger_balances,
    fits,
)
from tests.cluster.observing import (
    BATCH,
    MODULE,
    SCRIPTS,
    SEED,
    ended,
    exit_of,
    launched,
    log,
    measures_no_seconds,
    report,
    roles,
    said,
    steps_where,
    stop,
)

pytestmark = pytest.mark.slow


# -- workers that are killed ----------------------------------------------------------------


@pytest.mark.beside_others
@pytest.mark.parametrize(("ps", "local_rule"), [(1, "optimizer"), (2, "sgd")])
@pytest.mark.timeout(700)
def test_each_example_once_an_epoch_though_workers_are_killed(ps, local_rule):
    plan = fits(10 * SEED + 100 * ps, local_rule, split=ps > 1)
    script = str(SCRIPTS / "witness.py")
    options = (*MODULE, "--workers", "3", "--ps", str(ps), "--restart_workers", "9")
    with processes.started(*options, script, json.dumps(plan)) as process:
        for fit in plan:
            got = report(process, "RESULT", 240.0)
            killed = [len(who) for _, _, who in got["killed"]]
            assert killed == [2 if kill == "all" else 1 for kill in fit["kills"]], log(process)
            assert_each_example_once_an_epoch(fit, got)
            assert_ledger_balances(fit, got)
            assert got["came_back"], log(process)
        # TensorFlow's calls to processes that were killed take seconds each to be given up.
        code, _ = exit_of(process, 90.0)
    assert code == 0, log(process)


@measures_no_seconds
@pytest.mark.parametrize(("push_every", "fetch_every"), [(1, 1), (2, 6)])
def test_a_worker_that_is_stopped_counts_as_lost_and_joins_when_it_goes_on(push_every, fetch_every):
    fit = {"push_every": push_every, "fetch_every": fetch_every, "momentum": 1.0}
    fit |= {"kills": ["stop"], "seed": SEED, "steps": 500, "worker_timeout_seconds": 5.0}
    script = str(SCRIPTS / "witness.py")
    with processes.started(
        *MODULE, "--workers", "3", "--ps", "2", script, json.dumps([fit])
    ) as run:
        got = report(run, "RESULT", 240.0)
        assert exit_of(run, 90.0)[0] == 0, log(run)
    assert len(got["killed"]) == 1 and got["came_back"]
    assert_each_example_once_an_epoch(fit, got)
    assert_ledger_balances(fit, got)
    assert "has not answered for 5 s and counts as lost" in run.text


@measures_no_seconds
@pytest.mark.parametrize("how", [(), ("stopped",)], ids=["killed", "stopped"])
@pytest.mark.parametrize("lost", [0, 1])
def test_a_worker_is_lost_while_the_step_is_traced(lost, how):
    """The other one alone, with periods of 1, is plain Keras; its functions touch one variable."""
    script = str(SCRIPTS / "lost_in_trace.py")
    options = (*MODULE, "--workers", "2", "--ps", "2")
    with processes.started(*options, script, *how, str(lost)) as process:
        steps, weights, logs = said(process, "DONE").split()[1:]
        assert int(steps) == 60, log(process)
        assert float(weights) < 1e-6 and float(logs) < 1e-4, log(process)
        assert said(process, "tf_dsgd: lost worker").count(f"worker {lost}")


@pytest.mark.parametrize("after", [0.4, 2.5])
def test_nobody_waits_for_a_worker_that_is_stopped(after):
    """Whenever it is, and whatever is new afterwards: fits, a model, `evaluate`, operations.

    Tasks are told of all functions; variables are made on workers. What only waits for its last
    mini-batches waits half a second. Nothing takes a quarter of what makes it count as lost.
    """
    took, longest_lock, stopped = while_stopped("worker", after, 150.0)
    assert stopped
    assert max(took.values()) < 30.0, took
    assert longest_lock < 10.0


def test_a_worker_is_stopped_before_the_strategy_is_made():
    """Its kernel takes connections, and TensorFlow would wait for it without end."""
    script = str(SCRIPTS / "stopped_first.py")
    with processes.started(*MODULE, "--workers", "3", "--ps", "1", script, "before") as process:
        took, stopped, joined, steps, expected = report(process, "RESULT", 120.0)
        assert exit_of(process, 60.0)[0] == 0, log(process)
    assert took < 15.0
    assert stopped and joined
    assert steps == expected


def test_a_worker_is_stopped_as_it_is_connected_to():
    """TensorFlow cannot be told to go on without it."""
    script = str(SCRIPTS / "stopped_first.py")
    with processes.started(*MODULE, "--workers", "3", "--ps", "1", script, "connecting") as process:
        took, error = report(process, "RESULT", 120.0)
        exit_of(process, 60.0)
    assert 20.0 <= took < 30.0
    assert error.startswith("worker 1 at ")
    assert "stopped answering 20 s ago" in error


def test_a_worker_is_stopped_as_another_joins():
    """TensorFlow asks all workers then, and only the one that joins waits for the answers."""
    script = str(SCRIPTS / "stopped_as_joins.py")
    options = (*MODULE, "--workers", "3", "--ps", "1", "--restart_workers", "1")
    with processes.started(*options, script) as process:
        longest, back, counted, expected = report(process, "RESULT", 150.0)
        assert exit_of(process, 60.0)[0] == 0, log(process)
    assert longest < 15.0
    assert back, log(process)
    assert counted == [expected] * len(counted)


@measures_no_seconds
@pytest.mark.parametrize("script", ["left_out.py", "killed_as_joins.py"])
def test_another_is_lost_as_a_worker_joins(script):
    """One goes on as it is left out, and its call would never end; one ends, and is waited for."""
    script = str(SCRIPTS / script)
    options = (*MODULE, "--workers", "3", "--ps", "1", "--restart_workers", "1")
    with processes.started(*options, script) as process:
        back, counted, expected = report(process, "RESULT", 150.0)
        assert exit_of(process, 90.0)[0] == 0, log(process)
    assert back, log(process)
    assert counted == [expected] * len(counted)


SHARED = '{"push_every": 8, "fetch_every": 2}'  # any worker can compute any message


@pytest.mark.parametrize(
    "moment",
    [
        ("show", "drains", "chief", SHARED),
        ("show", "drains", "workers", SHARED),
        ("send", "drains", "chief", SHARED),
        ("inputs", "trains", "workers", SHARED),
        ("inputs", "trains", "chief", '{"push_every": 2, "fetch_every": 4}'),
        ("inputs", "trains", "workers", '{"local_rule": "optimizer"}'),
    ],
)
def test_a_drain_does_not_wait_for_a_worker_that_is_stopped(moment):
    """As it shows what it has, sends, or computes.

    Others do what they can. Where nobody can send its message, it is lost before its time.
    """
    script = str(SCRIPTS / "stopped_as.py")
    with processes.started(*MODULE, "--workers", "3", "--ps", "1", script, *moment) as process:
        took, counted, expected = report(process, "RESULT", 150.0)
        assert exit_of(process, 60.0)[0] == 0, log(process)
    assert took < 20.0
    assert counted == [expected] * len(counted)


@pytest.mark.parametrize("after", [0.0])
def test_a_ps_that_goes_on_again_in_time(after):
    """It is told of functions when it goes on, some after they are called."""
    took, longest_lock, stopped = while_stopped("ps", after, 9.0)
    assert not stopped
    assert max(took.values()) > 5.0, took
    assert longest_lock < 4.0


def while_stopped(job, after, seconds):
    """The seconds that things took, the longest without Python, and whether it is still stopped."""
    script = str(SCRIPTS / "stopped.py")
    options = (*MODULE, "--workers", "3", "--ps", "2")
    with processes.started(*options, script, job, str(after), str(seconds)) as process:
        *found, counted, expected = report(process, "RESULT", 200.0)
        assert exit_of(process, 60.0)[0] == 0, log(process)
    assert counted == [expected] * len(counted)
    return found


@pytest.mark.skipif(not os.environ.get("TF_DSGD_LONG"), reason="5 minutes; set TF_DSGD_LONG=1")
@pytest.mark.timeout(500)
def test_a_round_may_take_longer_than_a_server_takes_pings():
    """Without other calls between them it closes the connection after three to four minutes."""
    script = str(SCRIPTS / "long_call.py")
    with processes.started(*MODULE, "--workers", "1", "--ps", "1", script, "300") as process:
        steps, expected, lost = report(process, "RESULT", 400.0)
        assert steps == expected and not lost, log(process)
        assert exit_of(process, 60.0)[0] == 0, log(process)


@measures_no_seconds
@pytest.mark.parametrize("job", ["worker", "ps"])
def test_a_task_that_is_there_and_answers_no_calls_counts_as_lost(job):
    script = str(SCRIPTS / "unresponsive.py")
    with processes.started(*MODULE, "--workers", "2", "--ps", "1", script, job) as process:
        if job == "ps":
            assert report(process, "ERROR", 120.0).startswith("Lost ps 0 at "), log(process)
        else:
            steps, expected = report(process, "RESULT", 120.0)
            assert steps == expected and "tf_dsgd: lost worker 0 at " in log(process), log(process)
        assert exit_of(process, 60.0)[0] == 0, log(process)


@measures_no_seconds
def test_all_workers_are_lost_before_fit_and_come_back():
    script = str(SCRIPTS / "lost_in_trace.py")
    options = (*MODULE, "--workers", "2", "--ps", "1", "--restart_workers", "1")
    with processes.started(*options, script, "all") as process:
        assert int(said(process, "DONE").split()[1]) == 60, log(process)
        assert "no worker is there: waiting" in log(process)


def test_training_goes_on_and_the_lost_worker_comes_back():
    options = ("--workers", "2", "--restart_workers", "1")
    with launched(*options, steps=2000, epochs=10_000) as process:
        address, pid = roles(process, 3)["worker 1"]
        before = steps_where(process, lambda s: min(s) > 50, processes.START_SECONDS)
        processes.kill(pid)
        # More than can have been handed out already.
        steps_where(process, lambda s: s[0] > before[0] + 500, 10.0)
        lost = said(process, "tf_dsgd: lost", 1.0)  # of the chief: without a prefix
        assert lost.startswith("tf_dsgd: lost worker 1 at " + address), lost
        last = steps_where(process, lambda s: True, 10.0)
        joined = said(process, f"tf_dsgd: worker 1 at {address} joined")
        assert process.lines.index(lost) < process.lines.index(joined)
        again = steps_where(process, lambda s: s[1] > last[1] + 50, 10.0)
        assert again[0] > last[0]
        got = stop(process)
        assert ended(process, 20.0)[0] == 0, log(process)
    assert got["sparse"] == got["dense"] == [got["epochs"]]
    assert got["steps"] == 2000 * got["epochs"]


def test_one_worker_comes_back_and_another_stays_away():
    """TensorFlow waits for all tasks it knows when one joins: it must not know the absent one."""
    script = str(SCRIPTS / "one_comes_back.py")
    with processes.started(*MODULE, "--workers", "3", "--ps", "1", script) as process:
        came_back, longest, steps, expected = report(process, "RESULT", 200.0)
        assert exit_of(process, 60.0)[0] == 0, log(process)
    assert came_back and steps == expected, log(process)
    assert longest < 10.0


@measures_no_seconds
def test_two_threads_find_a_worker_lost():
    """Its own and the main one; it was fenced twice, and by shards in different order."""
    script = str(SCRIPTS / "lost_twice.py")
    with processes.started(*MODULE, "--workers", "2", "--ps", "2", script) as process:
        incarnations, before, after, steps, expected = report(process, "RESULT", 120.0)
        assert exit_of(process, 60.0)[0] == 0, log(process)
    assert incarnations == [1, 1, 1]
    assert after > before > 0
    assert steps == expected


@measures_no_seconds
def test_a_worker_that_was_replaced_before_anybody_noticed():
    """Its errors are about what TensorFlow does not find there, and do not end training."""
    options = ("--workers", "3", "--ps", "1", "--restart_workers", "9")
    script = str(SCRIPTS / "replaced_unnoticed.py")
    with processes.started(*MODULE, *options, script) as process:
        lost, incarnations, steps, expected = report(process, "RESULT", 200.0)
        assert exit_of(process, 60.0)[0] == 0, log(process)
    assert lost == [False, True]
    assert incarnations == [1, 1] and steps == expected


def test_two_are_killed_as_the_third_is_stopped():
    """TensorFlow waits for that one as the others leave its cluster; they must not."""
    options = ("--workers", "3", "--ps", "2", "--restart_workers", "9")
    script = str(SCRIPTS / "all_struck_at_once.py")
    with processes.started(*MODULE, *options, script) as process:
        held_nobody, counted, expected = report(process, "RESULT", 200.0)
        assert exit_of(process, 60.0)[0] == 0, log(process)
    assert held_nobody, log(process)
    assert counted == [expected] * 3


@measures_no_seconds
def test_workers_are_lost_while_nothing_trains():
    script = str(SCRIPTS / "lose_and_go_on.py")
    with launched("--workers", "4", script=script) as process:
        code, _ = exit_of(process, 90.0)
    assert code == 0, log(process)
    stages = [line.removeprefix("STAGE ") for line in process.lines if line.startswith("STAGE")]
    assert stages == [
        "lost before the model was made {'sparse': [2.0], 'dense': [2.0]}",
        "lost between two fits {'sparse': [4.0], 'dense': [4.0]}",
        "predict [402.]",  # 4 / BATCH of each table, and 400 mini-batches
        "evaluate -402.0",
        "lost before predict {'sparse': [6.0], 'dense': [6.0]}",
        "a second strategy {'sparse': [2.0], 'dense': [2.0]}",
    ]


def test_all_workers_are_lost():
    arguments = {"epochs": 10_000, "cluster": {"worker_timeout_seconds": 5}}
    with launched("--workers", "2", **arguments) as process:
        where = roles(process, 3)
        steps_where(process, lambda s: min(s) > 50, processes.START_SECONDS)
        start = time.monotonic()
        for name in ("worker 0", "worker 1"):
            processes.kill(where[name][1])
        code, _ = ended(process, 30.0)
        took = time.monotonic() - start
    assert code == 1, log(process)
    (error,) = [line for line in process.lines if line.startswith("TimeoutError")]
    for name in ("worker 0", "worker 1"):
        assert f"{name} at {where[name][0]}" in error
    assert 5.0 < took < 15.0


# -- a ps that is killed --------------------------------------------------------------------


@measures_no_seconds
def test_a_lost_ps_and_a_lost_chief_end_training_and_the_command_in_the_error_resumes(tmp_path):
    arguments = {"epochs": 6, "steps": 500, "backup": str(tmp_path / "backup")}
    with launched("--workers", "2", "--ps", "2", **arguments) as process:
        address, pid = roles(process, 4)["ps 1"]
        said(process, "EPOCH 2")
        process.line_with("STEPS", 10.0)
        start = time.monotonic()
        processes.kill(pid)
        code, _ = ended(process, 30.0)
        assert time.monotonic() - start < 30.0
    assert code == 1 and "tf_dsgd: Lost ps 1" in process.text, log(process)
    error = process.text[process.text.rindex("tf_dsgd: Lost ps 1") :]
    assert len(error.splitlines()) < 20, error  # nothing that hides what to do
    assert f"ps 1 at {address}" in error
    assert "ps 0" not in error

    with processes.started(*resuming(error, tmp_path)) as process:
        assert said(process, "EPOCH") == "EPOCH 2"
        said(process, "EPOCH 4")
        chief = re.search(r"chief at .* \(pid (\d+)\)", process.text)[1]
        processes.kill(int(chief))
        line = said(process, f"[launch] chief (pid {chief}) was killed by SIGKILL. ")
        assert exit_of(process, 30.0)[0] == 128 + signal.SIGKILL, log(process)

    with processes.started(*resuming(line, tmp_path)) as process:
        assert said(process, "EPOCH") == "EPOCH 4"
        got = report(process, "DONE")
        assert exit_of(process, 20.0)[0] == 0, log(process)
    assert got == {"epochs": 6, "steps": 3000, "sparse": [6], "dense": [6]}


def resuming(error, folder):
    """The command at the end of an error, behind the checkpoint it goes on from."""
    found = re.search(r"The last checkpoint is in (.*)\. To go on from it: (.*)", error)
    assert found and found[1].startswith(f"{folder}/backup/checkpoint-"), error
    program, *arguments = shlex.split(found[2])
    assert Path(program).name.startswith("python")
    return arguments


@measures_no_seconds
def test_the_only_ps_is_lost_without_a_backup():
    with launched("--workers", "1", epochs=10_000) as process:
        address, pid = roles(process, 2)["ps 0"]
        steps_where(process, lambda s: s[0] > 50, processes.START_SECONDS)
        processes.kill(pid)
        code, seconds = ended(process, 30.0)
    assert code == 1, log(process)
    assert "Traceback" not in process.text, log(process)
    error = process.text[process.text.rindex("tf_dsgd: Lost ps 0") :]
    assert f"ps 0 at {address}" in error and "did not start" not in error
    (file,) = re.findall(r"the traceback is in (\S+)", process.text)
    traceback = Path(file)
    assert traceback.read_text().splitlines()[0] == "Traceback (most recent call last):"
    traceback.unlink()
    assert "No checkpoint was written yet; tf_dsgd.callbacks.BackupAndRestore writes them" in error
    assert "-m tf_dsgd.launch --workers 1 " in error[error.index("To start again: ") :]
    assert seconds < 30.0


@measures_no_seconds
def test_a_ps_that_is_stopped_counts_as_lost():
    arguments = {"epochs": 10_000, "cluster": {"worker_timeout_seconds": 5}}
    with launched("--workers", "1", **arguments) as process:
        address, pid = roles(process, 2)["ps 0"]
        steps_where(process, lambda s: s[0] > 50, processes.START_SECONDS)
        start = time.monotonic()
        os.kill(pid, signal.SIGSTOP)
        said(process, f"ps 0 at {address} has not answered for 5 s and counts as lost")
        said(process, "tf_dsgd: Lost ps 0")
        assert time.monotonic() - start < 60.0
        os.kill(pid, signal.SIGCONT)
        code, _ = ended(process, 60.0)
    assert code == 1, log(process)


# -- interrupts -----------------------------------------------------------------------------


def test_interrupts():
    """A caught one leaves a model that trains on; one that is not caught ends everything."""
    after = 1.0 + np.random.default_rng(SEED).uniform()
    with launched("--workers", "2", steps=300, epochs=10_000, interrupt_after=after) as process:
        epochs, counts = report(process, "CAUGHT")
        for values in counts.values():  # of the interrupted epoch, each at most once
            assert set(values) <= {epochs, epochs + 1}
        more, balance, steps = report(process, "SECOND")
        assert more == [[2 / BATCH]] * 2
        assert balance == 0
        assert 300 * (epochs + 2) <= steps < 300 * (epochs + 3)
        # A third fit.
        steps_where(process, lambda s: sum(s) > steps + 50, 10.0)
        process.send(signal.SIGINT)
        code, seconds = ended(process, 20.0)
    assert code == 130, log(process)
    assert seconds < 10.0
    assert process.text.rstrip().endswith("the same command would go on from there."), log(process)
    assert "Traceback" not in process.text, log(process)


@measures_no_seconds
def test_workers_are_killed_in_a_resumed_run():
    """Their numbers go on from the checkpoint: what is done, and what others must do, goes by them.

    That each example was applied once an epoch is asserted by the script.
    """
    options = (*MODULE, "--workers", "3", "--ps", "2", "--restart_workers", "9")
    with processes.started(*options, str(SCRIPTS / "resumed.py")) as process:
        assert json.loads(said(process, "DONE").split(maxsplit=1)[1]) == [2, 2000]
        assert exit_of(process, 90.0)[0] == 0, log(process)


@measures_no_seconds
def test_pipelines_of_lost_workers_in_a_resumed_run(tmp_path):
    """Others do at the end of the epoch what a lost worker had begun, also after a checkpoint."""
    options = (*MODULE, "--workers", "3", "--ps", "2")
    script = str(SCRIPTS / "resumed_pipelines.py")
    with processes.started(*options, script, str(tmp_path / "b")) as process:
        code, _ = exit_of(process, 90.0)
    assert code == 1 and "helpers.Broken" in process.text, log(process)
    assert "unfinished mini-batch" in process.text  # one goes, or several go, to others
    with processes.started(*options, script, str(tmp_path / "b")) as process:
        result, expected = report(process, "RESULT", 90.0)
        assert exit_of(process, 60.0)[0] == 0, log(process)
    assert result == expected
