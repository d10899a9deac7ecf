"""Tasks that come late, chiefs that come and go, and configurations that cannot work."""

import contextlib
import json
import signal
import socket
from pathlib import Path

import pytest

from tests.cluster import processes
from tests.cluster.observing import (
    CONNECT,
    MADE_BEFORE,
    MODULE,
    NOISE,
    SCRIPTS,
    TRAIN,
    exit_of,
    log,
    measures_no_seconds,
    report,
    said,
    steps_where,
    stop,
)

pytestmark = pytest.mark.slow


# -- tasks that come late, and chiefs that come and go --------------------------------------


@measures_no_seconds
def test_tasks_come_late_and_outlive_the_chief():
    with contextlib.ExitStack() as stack:
        chief, w0, w1, ps = stack.enter_context(processes.addresses(4))
        cluster = {"chief": [chief], "worker": [w0, w1], "ps": [ps]}

        def start(job, index, *program):
            config = processes.tf_config(job, index, **cluster)
            return stack.enter_context(processes.started(*program, TF_CONFIG=config))

        script = (TRAIN, json.dumps({"steps": 500, "epochs": 10_000}))
        first = start("chief", 0, *script)
        waiting = first.line_with("waiting for")
        assert f"ps 0 at {ps}" in waiting
        servers = {
            f"worker 0 of 2 at {w0}": start("worker", 0, "-m", "tf_dsgd.serve"),
            f"ps 0 of 1 at {ps}": start("ps", 0, "-m", "tf_dsgd.serve"),
        }
        steps_where(first, lambda s: s[0] > 50 and s[1] == 0, processes.START_SECONDS)

        # One of another version is left out, and the others go on.
        other = start("worker", 1, "-c", OTHER_VERSION)
        steps = steps_where(first, lambda s: True, 10.0)
        assert f"worker 1 at {w1} runs tf_dsgd 9.9.9" in said(first, "runs tf_dsgd")
        steps_where(first, lambda s: s[0] > steps[0] + 500, 30.0)
        other.send(signal.SIGKILL)
        other.wait(10.0)

        # The same script serves where TF_CONFIG says so, and does not go beyond.
        worker_1 = servers[f"worker 1 of 2 at {w1}"] = start("worker", 1, *script)
        steps_where(first, lambda s: s[1] > 50, processes.START_SECONDS)
        first.send(signal.SIGKILL)
        first.wait(10.0)

        second = start("chief", 0, *script)
        steps_where(second, lambda s: min(s) > 50, processes.START_SECONDS)
        got = stop(second)
        assert exit_of(second, 20.0)[0] == 0, log(second)
        assert got["sparse"] == got["dense"] == [got["epochs"]]
        assert got["steps"] == 500 * got["epochs"]

        for role, server in servers.items():
            assert server.popen.poll() is None, log(server)
            server.send(signal.SIGTERM)
            code, seconds = exit_of(server, 10.0)
            assert code == 0, log(server)
            assert seconds < 5.0
            own = [line for line in server.lines if not NOISE.search(line)]
            assert f": {role} (pid {server.popen.pid})" in own[0]
            assert "Traceback" not in server.text
        assert "FIT" not in worker_1.text


@measures_no_seconds
def test_what_was_made_before_the_strategy_stays_usable():
    options = (*MODULE, "--workers", "2", "--ps", "1")
    with processes.started(*options, str(SCRIPTS / "made_before.py")) as process:
        found = report(process, "RESULT")
        assert exit_of(process, 60.0)[0] == 0, log(process)
    assert found == MADE_BEFORE, log(process)
    (warned,) = [line for line in process.lines if "traced before the strategy" in line]
    assert warned.count("assigning") == 1 and "one_step" not in warned
    assert "writers of tf.summary that were made before the strategy: 1" in process.text


@measures_no_seconds
def test_two_chiefs_at_once():
    """Each has its own variables; a round of one leaves threads for what the other's sends."""
    with contextlib.ExitStack() as stack:
        one, other, w0, w1, ps = stack.enter_context(processes.addresses(5))

        def start(job, index, chief, *program):
            cluster = {"chief": [chief], "worker": [w0, w1], "ps": [ps]}
            config = processes.tf_config(job, index, **cluster)
            return stack.enter_context(processes.started(*program, TF_CONFIG=config))

        for job, index in (("worker", 0), ("worker", 1), ("ps", 0)):
            start(job, index, one, "-m", "tf_dsgd.serve")
        script = (TRAIN, json.dumps({"steps": 500, "epochs": 10_000}))
        chiefs = [start("chief", 0, address, *script) for address in (one, other)]
        for chief in chiefs:
            steps_where(chief, lambda s: min(s) > 50, processes.START_SECONDS)
        for chief in chiefs:
            epoch = int(chief.line_with("EPOCH").split()[1])
            chief.line_with(f"EPOCH {epoch + 2}", 60.0)
        for chief in chiefs:
            got = stop(chief)
            assert exit_of(chief, 20.0)[0] == 0, log(chief)
            assert got["sparse"] == got["dense"] == [got["epochs"]]
            assert got["steps"] == 500 * got["epochs"]


# -- configurations -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def serving():
    """Addresses of a worker and a ps that serve, one chief after another; and free ones."""
    with processes.addresses(5) as (w0, ps, *free), contextlib.ExitStack() as stack:
        for job, address in (("worker", w0), ("ps", ps)):
            config = processes.tf_config(job, 0, worker=[w0], ps=[ps])
            task = processes.started("-m", "tf_dsgd.serve", TF_CONFIG=config)
            stack.enter_context(task).line_with(address)
        yield w0, ps, free


@contextlib.contextmanager
def connecting(*specs, job="chief", index=0, text=None, timeout=600, **jobs):
    config = processes.tf_config(job, index, **jobs) if text is None else text
    options = json.dumps({"connect_timeout_seconds": timeout})
    specs = [json.dumps(spec) for spec in specs]
    with processes.started(CONNECT, options, *specs, TF_CONFIG=config) as process:
        yield process


def error_of(process, kind, seconds=10.0):
    """The message of the error that the script ends with, and the seconds it took."""
    said(process, "SECONDS", processes.START_SECONDS + seconds)
    code, _ = exit_of(process, 30.0)  # with TensorFlow, leaving takes a while on a busy machine
    took = float(said(process, "SECONDS").split()[1])
    assert code == 1, log(process)
    assert "Traceback" not in process.text, log(process)
    assert took < seconds, log(process)
    *_, where, last = process.lines
    assert where.startswith("tf_dsgd: the traceback is in "), log(process)
    traceback = Path(where.split()[-1])
    assert f"\n{kind}: " in traceback.read_text()
    traceback.unlink()
    assert kind == "RuntimeError" or f"{kind}: " in last, log(process)
    return last, took


MISTYPED = {
    "malformed": ("{'cluster': {}}", "ValueError", ["TF_CONFIG is not JSON", "line 1, column 2"]),
    "no ps": ({"ps": None}, "ValueError", ["no ps", 'Add "ps"']),
    "no worker": ({"worker": None}, "ValueError", ['no "worker" tasks', "Add"]),
    "unknown job": ({"workers": ["127.0.0.1:9"]}, "ValueError", ['unknown job "workers"']),
    "index out of range": (
        {"task": {"type": "worker", "index": 2}},
        "ValueError",
        ["index 2", "worker"],
    ),
    "duplicate address": ({"ps": ["127.0.0.1:2"]}, "ValueError", ["127.0.0.1:2", "worker 0"]),
}


def test_mistyped_configurations():
    """All at once, because importing TensorFlow takes most of the time."""
    good = {"chief": ["127.0.0.1:1"], "worker": ["127.0.0.1:2"], "ps": ["127.0.0.1:3"]}
    with contextlib.ExitStack() as stack:
        started = {}
        for name, (change, *_) in MISTYPED.items():
            if isinstance(change, str):
                process = connecting(text=change)
            else:
                change = dict(change)
                task = change.pop("task", {"type": "chief", "index": 0})
                jobs = {k: v for k, v in {**good, **change}.items() if v}
                process = connecting(job=task["type"], index=task["index"], **jobs)
            started[name] = stack.enter_context(process)
        for name, (_, kind, words) in MISTYPED.items():
            message, took = error_of(started[name], kind)
            assert took < 1.0, (name, took)
            for word in words:
                assert word in message, (name, message)


def test_missing_tasks_are_named(serving):
    w0, ps, (chief, missing, other) = serving
    with (
        connecting(timeout=5, chief=[chief], worker=[w0], ps=[ps, missing]) as no_ps,
        connecting(timeout=5, chief=[other], worker=[missing], ps=[ps]) as no_worker,
    ):
        for process, name, not_that in ((no_ps, "ps 1", ps), (no_worker, "worker 0", w0)):
            message, took = error_of(process, "TimeoutError", 15.0)
            assert took >= 5.0
            assert f"{name} at {missing}" in message
            assert not_that not in message
            assert "tf_dsgd.serve" in message


@pytest.mark.parametrize("tasks_are_there", [True, False])
def test_the_port_of_the_chief_is_in_use(serving, tasks_are_there):
    w0, ps, (missing, *_) = serving
    with socket.create_server(("127.0.0.1", 0)) as taken:
        chief = f"127.0.0.1:{taken.getsockname()[1]}"
        ps = ps if tasks_are_there else missing
        with connecting(chief=[chief], worker=[w0], ps=[ps]) as process:
            message, _ = error_of(process, "OSError")
    assert chief in message
    assert "another" in message and "TF_CONFIG" in message


def test_a_second_cluster_in_one_process(serving):
    w0, ps, (chief, other, *_) = serving
    with connecting(
        {"worker": [other], "ps": [ps]}, chief=[chief], worker=[w0], ps=[ps]
    ) as process:
        message, _ = error_of(process, "RuntimeError")
    assert "CONNECTED" in process.text
    assert "connected to another cluster" in message
    assert w0 in message and other in message
    assert "new process" in message


OTHER_VERSION = """
import tf_dsgd
from tf_dsgd import _version
_version.__version__ = "9.9.9"
tf_dsgd.DownpourStrategy()
"""


@pytest.mark.parametrize("job", ["worker", "ps"])
def test_a_task_of_another_version(serving, job):
    w0, ps, (chief, own, *_) = serving
    cluster = {"chief": [chief], "worker": [w0], "ps": [ps], job: [own]}
    config = processes.tf_config(job, 0, **cluster)
    with processes.started("-c", OTHER_VERSION, TF_CONFIG=config) as task:
        assert "tf_dsgd 9.9.9: " in task.line_with(own)
        with connecting(**cluster) as process:
            message, _ = error_of(process, "RuntimeError")
    assert f"{job} 0 at {own} runs tf_dsgd 9.9.9" in message
    assert "Install one version" in message
