"""Equal processes that are lost, late or interrupted, and `python -m tf_dsgd.launch --spmd`."""

import collections
import contextlib
import json
import signal
import time
from pathlib import Path

import psutil
import pytest

from tests.cluster import processes
from tests.cluster.observing import MODULE
from tf_dsgd.launch import launcher as launch

SCRIPT = str(processes.helpers.ROOT / "tests/cluster/scripts/endless.py")


@contextlib.contextmanager
def workers(*arguments, count=2, chief=False, absent=()):
    """Processes that know each other; those in `absent` are not started."""
    with contextlib.ExitStack() as stack:
        addresses = stack.enter_context(processes.addresses(count))
        jobs = {"chief": addresses[:1], "worker": addresses[1:]} if chief else {"worker": addresses}
        members = [(job, index) for job in jobs for index in range(len(jobs[job]))]
        yield [
            stack.enter_context(
                processes.started(SCRIPT, *arguments, TF_CONFIG=processes.tf_config(*who, **jobs))
            )
            for k, who in enumerate(members)
            if k not in absent
        ]


def raised(process, seconds):
    """The error's type, text and when it came."""
    return json.loads(process.line_with("RAISED", seconds).removeprefix("RAISED"))


def test_a_killed_process_is_named_by_the_others_at_once():
    with workers("60", count=3) as all_three:
        for process in all_three:
            process.line_with("TRAINS")
        processes.kill(all_three[1].popen.pid)
        start = time.monotonic()
        for rank in (0, 2):
            kind, text, _ = raised(all_three[rank], 20.0)
            assert kind == "ConnectionError"
            assert "worker 1 at 127.0.0.1:" in text
            assert f"this process (worker {rank} at" in text
            assert all_three[rank].wait(20.0)[0] == 3
        assert time.monotonic() - start < 20.0  # of timeout_seconds=60


def test_a_process_that_stops_is_waited_for_until_the_timeout_and_named():
    with workers("4", count=3) as (first, second, third):
        for process in (first, second, third):
            process.line_with("TRAINS")
        second.send(signal.SIGSTOP)
        start = time.monotonic()
        for rank, process in enumerate((first, third)):
            kind, text, _ = raised(process, 30.0)
            assert 3.0 < time.monotonic() - start < 25.0
            # The one that ends last may find that the other has ended.
            assert kind == "TimeoutError" or (kind == "ConnectionError" and rank)
            if kind == "TimeoutError":
                assert "waited 4 s, and worker 1 at 127.0.0.1:" in text
                assert "did not come and does not answer" in text
                assert f"worker {2 - 2 * rank} at" not in text
            assert process.wait(20.0)[0] == 3
        # It goes on, and finds nobody there.
        second.send(signal.SIGCONT)
        kind, text, _ = raised(second, 30.0)
        assert kind in ("ConnectionError", "TimeoutError")
        assert "worker 0 at 127.0.0.1:" in text


def test_a_process_that_answers_and_does_not_come_is_told_from_one_that_is_stopped():
    with workers("4", "busy") as (first, _):
        kind, text, _ = raised(first, 60.0)
        assert kind == "TimeoutError"
        assert "waited 4 s, and worker 1 at 127.0.0.1:" in text
        assert "though it answers: it is busy" in text
        assert first.wait(20.0)[0] == 3


def test_a_process_that_is_never_started_is_named():
    with workers("3", absent=[1]) as (first,):
        kind, text, seconds = raised(first, processes.START_SECONDS)
        assert kind == "TimeoutError"
        assert 3.0 <= seconds < 20.0
        assert "worker 1 at 127.0.0.1:" in text
        assert "did not begin within timeout_seconds=3" in text


@pytest.mark.parametrize("when", ["beginning", "averaging"])
def test_ctrl_c_ends_the_wait(when):
    with workers("100", absent=[1] if when == "beginning" else []) as all_of_them:
        first = all_of_them[0]
        first.line_with("BEGINS")
        if when == "averaging":
            first.line_with("TRAINS")
            all_of_them[1].line_with("TRAINS")
            all_of_them[1].send(signal.SIGSTOP)
        idle_until_it_waits(first)
        first.send(signal.SIGINT)
        first.line_with("INTERRUPTED", 10.0)
        code, _ = first.wait(20.0)
        assert code == 0, first.text


def idle_until_it_waits(process):
    """Returns when the process uses no processor time: its next average does not come."""
    watched = psutil.Process(process.popen.pid)
    deadline = time.monotonic() + 30.0
    while watched.cpu_percent(interval=0.5) > 10.0:
        assert time.monotonic() < deadline


@pytest.mark.slow
@pytest.mark.beside_others
def test_a_chief_is_the_first_worker():
    with workers("60", "23", chief=True) as both:
        results = []
        for rank, process in enumerate(both):
            assert process.line_with("TRAINS").split()[1:] == [str(rank), "2"]
            results.append(json.loads(process.line_with("ENDED", 30.0).removeprefix("ENDED")))
            assert process.wait(20.0)[0] == 0, process.text
        assert results[0] == results[1]
        assert results[0][0] == 5  # at 5, 10, 15, 20, and at the end of the epoch


# -- the launcher; these scripts do without TensorFlow, to be quick --------------------------------

TALK = """
import json, os, sys
config = json.loads(os.environ["TF_CONFIG"])
threads = os.environ["TF_NUM_INTRAOP_THREADS"]
index = config["task"]["index"]
print("SCRIPT", json.dumps([sys.argv[1:], config, threads]), flush=True)
sys.stdin.read() if index == 0 else sys.stdin.read(0)
"""
# Worker 0 waits for its input; the others for ever, or end as their argument says.
ENDING = """
import json, os, signal, sys, time
index = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
print("READY", flush=True)
what = sys.argv[1 + index]
if what == "waits":
    signal.sigwait([signal.SIGUSR1])
if what == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
if what == "sees":
    time.sleep(1.0)  # as one that notices that another is lost, and says so
    print("NOTICED", flush=True)
    sys.exit(9)
sys.exit(int(what))
"""
TALKING = """
import json, os, sys
index = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
for _ in range(100):
    for stream in (sys.stdout, sys.stderr):
        print("ab"[index] * 10_000, file=stream, flush=True)
print("and so on", end="", flush=True)
"""
CATCH = """
import time
try:
    time.sleep(0.5)  # a script that has just begun is killed instead
    print("READY", flush=True)
    time.sleep(100)
except KeyboardInterrupt:
    print("SAVED", flush=True)
"""


def launched(tmp_path, script, *options, arguments=()):
    path = tmp_path / "train.py"
    path.write_text(script)
    options = ("--spmd", "--prefix_chief", *options)
    return processes.started(*MODULE, *options, str(path), *arguments, warm=False)


@pytest.mark.slow
@pytest.mark.beside_others
def test_every_worker_runs_the_script(tmp_path):
    options = ("--workers", "3", "--threads_per_worker", "2")
    with launched(tmp_path, TALK, *options, arguments=["--lr", "1"]) as process:
        told = {}
        for _ in range(3):
            name, text = process.line_with("SCRIPT").split(" SCRIPT ")
            told[name] = json.loads(text)
        process.popen.stdin.close()
        assert process.wait(20.0)[0] == 0, process.text
    assert sorted(told) == ["[worker 0]", "[worker 1]", "[worker 2]"]
    for index, (arguments, config, threads) in enumerate(told[name] for name in sorted(told)):
        assert arguments == ["--lr", "1"]
        assert config["task"] == {"type": "worker", "index": index}
        assert list(config["cluster"]) == ["worker"]
        assert len(set(config["cluster"]["worker"])) == 3
        assert threads == "2"
    assert told["[worker 0]"][1]["cluster"] == told["[worker 2]"][1]["cluster"]


@pytest.mark.slow
@pytest.mark.beside_others
@pytest.mark.parametrize(
    ("ends", "code", "words"),
    [
        (["0", "0", "0"], 0, []),
        (["0", "5", "waits"], 5, ["worker 1 (pid", "exited with code 5"]),
        (["sees", "killed", "sees"], 128 + 9, ["was killed by SIGKILL", "[worker 2] NOTICED"]),
        (["4", "0", "0"], 4, ["worker 0 (pid", "exited with code 4"]),
    ],
)
def test_the_first_failure_ends_all_and_is_the_exit_code(tmp_path, ends, code, words):
    with launched(tmp_path, ENDING, "--workers", "3", arguments=ends) as process:
        for _ in range(3):
            process.line_with("READY")
        family = []
        with contextlib.suppress(psutil.NoSuchProcess):
            family = process.descendants()
        assert process.wait(40.0)[0] == code, process.text
        assert processes.gone(family) == []
    for word in words:
        assert word in process.text
    assert "Traceback" not in process.text


@pytest.mark.slow
@pytest.mark.beside_others
def test_ctrl_c_reaches_every_worker(tmp_path):
    with launched(tmp_path, CATCH, "--workers", "2") as process:
        process.line_with("READY")
        process.line_with("READY")
        family = process.descendants()
        process.send(signal.SIGINT)
        assert process.wait(20.0)[0] == 130, process.text
        assert process.text.count("SAVED") == 2
        assert "Traceback" not in process.text
        assert processes.gone(family) == []


FITS = """
import os
import keras, numpy as np, tf_dsgd
model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
model.compile("adam", "mse")
telling = keras.callbacks.LambdaCallback(
    on_train_batch_end=lambda batch, logs: batch == 20 and print(told, flush=True)
)
averaging = tf_dsgd.callbacks.PeriodicAveraging(5)
told = f"TRAINS {averaging.worker_index} {os.getpid()}"
x = np.ones((200, 2))
model.fit(x, x[:, :1], batch_size=1, epochs=10**6, verbose=0, callbacks=[averaging, telling])
"""


@pytest.mark.parametrize("ended_by", ["Ctrl-C", "a lost worker"])
def test_a_script_that_catches_nothing_ends_soon_and_in_a_few_lines(tmp_path, ended_by):
    """Seconds were spent in garbage collection: two to three on two cores, more on busy ones."""
    path = tmp_path / "train.py"
    path.write_text(FITS)
    with processes.started(*MODULE, "--spmd", "--workers", "3", str(path)) as process:
        pids = {}
        while len(pids) < 3:
            _, index, pid = process.line_with("TRAINS").rsplit(maxsplit=2)
            pids[int(index)] = int(pid)
        if ended_by == "Ctrl-C":
            process.send(signal.SIGINT)
        else:
            processes.kill(pids[1])
        code, seconds = process.wait(30.0)
    said = [line for line in process.lines if "TRAINS" not in line]
    for line in said:
        if "the traceback is in " in line:
            Path(line.split()[-1]).unlink()
    assert "Traceback" not in process.text
    if ended_by == "Ctrl-C":
        assert (code, len(said)) == (130, 2), process.text
        assert (
            "KeyboardInterrupt. With keras.callbacks.BackupAndRestore, in a folder for each"
            in said[-1]
        )
        assert seconds < 2.0
    else:
        assert (code, len(said)) == (137, 5), process.text
        assert sum("worker 1 at 127.0.0.1:" in line for line in said) == 2


@pytest.mark.slow
@pytest.mark.beside_others
def test_nothing_outlives_a_launcher_that_is_killed(tmp_path):
    with launched(tmp_path, ENDING, "--workers", "2", arguments=["waits"] * 2) as process:
        process.line_with("READY")
        process.line_with("READY")
        family = process.descendants()
        assert len(family) == 2
        process.send(signal.SIGKILL)
        process.wait(10.0)
        assert processes.gone(family) == []


@pytest.mark.beside_others
def test_lines_of_several_processes_do_not_mix(tmp_path):
    """Longer ones than a pipe takes at once, on both streams, and one that has no end."""
    path = tmp_path / "train.py"
    path.write_text(TALKING)
    options = ("--spmd", "--workers", "2", str(path))
    with processes.started(*MODULE, *options, warm=False) as process:
        assert process.wait(60.0)[0] == 0
    one, other = "a" * 10_000, "[worker 1] " + "b" * 10_000
    assert collections.Counter(process.lines) == {
        one: 200,
        other: 200,
        "and so on": 1,
        "[worker 1] and so on": 1,
    }


@pytest.mark.beside_others
@pytest.mark.parametrize(
    ("option", "words"),
    [
        (["--ps", "1"], "--spmd starts no ps processes"),
        (["--restart_workers", "1"], "--spmd cannot start a worker again"),
    ],
)
def test_options_that_do_not_go_with_spmd(capsys, tmp_path, option, words):
    (tmp_path / "train.py").touch()
    with pytest.raises(SystemExit) as caught:
        launch.main(["--workers", "2", "--spmd", *option, str(tmp_path / "train.py")])
    assert caught.value.code == 2
    assert words in capsys.readouterr().err
