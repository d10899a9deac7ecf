"""Tasks that are lost, come late or come back, with real processes: nothing lost, nothing hangs.

Outside witnesses: a table with a row for each example and a gradient of 1 counts how often each
was applied; a momentum of 1 counts mini-batches, and sums the counts in its weight.
"""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest

from tests.cluster import processes

pytestmark = pytest.mark.slow

SCRIPTS = Path(__file__).parent / "scripts"
TRAIN = str(SCRIPTS / "train.py")
CONNECT = str(SCRIPTS / "connect.py")
MODULE = ("-m", "tf_dsgd.launch")
# The same program without the package around it, whose import of TensorFlow takes seconds.
FILE = ("-P", str(processes.helpers.ROOT / "tf_dsgd/launch.py"))
ROLE = re.compile(r"tf_dsgd \S+: ((?:worker|ps) \d) of \d at (127\.0\.0\.1:\d+) \(pid (\d+)\)")
BATCH = 4  # of the scripts
SEED = int(os.environ.get("TF_DSGD_KILL_SEED", "0"))  # another one kills at other moments

# What TensorFlow itself writes as it is imported, before the package can say anything.
NOISE = re.compile(r"WARNING: All log messages before|[IWE]\d{4} |^To enable the following")


def launched(*options, script=TRAIN, program=FILE, **arguments):
    return processes.started(*program, *options, script, json.dumps(arguments))


def log(process):
    return "\n".join(line for line in process.lines if not NOISE.search(line))


def rest(process):
    """Everything that it said until now."""
    with contextlib.suppress(AssertionError):
        process.line_with("\0", 0.2)  # reads all lines
    return log(process)


def said(process, text, seconds=processes.START_SECONDS):
    """The line with `text`, which may have been read already."""
    for line in process.lines:
        if text in line:
            return line
    return process.line_with(text, seconds)


def roles(process, count):
    """Task -> (address, pid), as each first said."""
    deadline = time.monotonic() + processes.START_SECONDS
    while len(found := dict(_roles(process.lines))) < count:
        process.line_with("(pid", max(0.0, deadline - time.monotonic()))
    return found


def _roles(lines):
    for line in lines:
        if match := ROLE.search(line):
            name, address, pid = match.groups()
            yield name, (address, int(pid))


def report(process, name, seconds=processes.START_SECONDS):
    """What the script says next under that name."""
    deadline = time.monotonic() + seconds
    while True:
        line = process.line_with(name + " ", max(0.0, deadline - time.monotonic()))
        if line.startswith(name + " "):  # and no line of a traceback
            return json.loads(line.removeprefix(name))


def steps_where(process, condition, seconds):
    """Reads the steps of each worker, as the script says them, until they meet the condition."""
    deadline = time.monotonic() + seconds
    while True:
        steps = report(process, "STEPS", max(0.0, deadline - time.monotonic()))
        if condition(steps):
            return steps


def stop(process):
    """Has the script end at the end of its epoch; what it printed as DONE."""
    process.popen.stdin.write("stop\n")
    process.popen.stdin.flush()
    return report(process, "DONE")


def exit_of(process, seconds):
    """The exit code and the seconds it took; fails with what is left and what it said."""
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        here = [" ".join(each.cmdline()[1:4]) for each in process.descendants()]
        text = rest(process)
        raise AssertionError(f"still there after {seconds} s, with {here}: {text}") from None


def ended(process, seconds):
    """As `exit_of`; fails also if a process of the family is left."""
    family = process.descendants()
    assert family, "the test looked too late"
    result = exit_of(process, seconds)
    assert not processes.gone(family, 5.0), log(process)
    return result


# -- workers that are killed ----------------------------------------------------------------


def fits(seed, local_rule):
    """Kills in the middle of an epoch: one by one, and of all that are left at the same moment."""
    common = {"steps": 500, "momentum": 1.0, "kills": ["one", "one"]}
    everyone = {"kills": ["one", "all"], "momentum": 0.0, "local_rule": local_rule}
    return [
        {**common, "push_every": 1, "fetch_every": 1, "seed": seed},
        {**common, "push_every": 4, "fetch_every": 4, "seed": seed + 1, **everyone},
        {**common, "push_every": 3, "fetch_every": 5, "seed": seed + 2, "pipelines": True},
        {**common, "push_every": 1, "fetch_every": 6, "seed": seed + 3},  # messages under way
    ]


def assert_each_example_once_an_epoch(fit, got):
    """On every shard, also where a death cut a push off between two of them."""
    handed_out = got["epochs"] * fit["steps"]
    assert got["cut_off"] == 0
    assert [sum(w[0] for w in shard) for shard in got["shards"]] == [handed_out] * len(
        got["shards"]
    )
    for tally in got["times"].values():  # how many examples were applied how often
        assert tally == [[got["epochs"], BATCH * fit["steps"]]], got
    assert got["batches"] == handed_out
    if fit["momentum"] and fit["push_every"] == 1:
        n = handed_out
        assert got["every"] == n * (n + 1) // 2  # 1 + 2 + ... + n: a push twice or never shows


def assert_ledger_balances(fit, got):
    for shard in got["shards"]:
        for _, sent, applied, refused in shard:
            assert sent == applied + refused
    first = np.array(got["shards"][0])
    assert first.sum(0).tolist() == [got[k] for k in ("steps", "sent", "applied", "refused")]
    assert got["in_flight"] == 0
    assert got["updates"] == got["applied"] == got["staleness_count"]
    by_worker = fit.get("local_rule") == "optimizer"  # counts each step of its own
    assert got["iterations"] == (got["steps"] if by_worker else got["updates"])


@pytest.mark.parametrize(("ps", "local_rule"), [(1, "optimizer"), (2, "sgd")])
@pytest.mark.timeout(420)
def test_each_example_once_an_epoch_though_workers_are_killed(ps, local_rule):
    plan = fits(10 * SEED + 100 * ps, local_rule)
    script = str(SCRIPTS / "witness.py")
    options = (*FILE, "--workers", "3", "--ps", str(ps), "--restart_workers", "9")
    with processes.started(*options, script, json.dumps(plan)) as process:
        for fit in plan:
            got = report(process, "RESULT", 120.0)
            killed = [len(who) for _, _, who in got["killed"]]
            assert killed == [2 if kill == "all" else 1 for kill in fit["kills"]], log(process)
            assert_each_example_once_an_epoch(fit, got)
            assert_ledger_balances(fit, got)
            assert got["came_back"], log(process)
        # TensorFlow's calls to processes that were killed take seconds each to be given up.
        code, _ = exit_of(process, 90.0)
    assert code == 0, log(process)


@pytest.mark.parametrize("lost", [0, 1])
def test_a_worker_is_lost_while_the_step_is_traced(lost):
    """The other one alone, with periods of 1, is plain Keras; its functions touch one variable."""
    script = str(SCRIPTS / "lost_in_trace.py")
    options = (*FILE, "--workers", "2", "--ps", "2")
    with processes.started(*options, script, str(lost)) as process:
        steps, weights, logs = said(process, "DONE").split()[1:]
        assert int(steps) == 60, log(process)
        assert float(weights) < 1e-6 and float(logs) < 1e-4, log(process)
        assert said(process, "tf_dsgd: lost worker").count(f"worker {lost}")


def test_all_workers_are_lost_before_fit_and_come_back():
    script = str(SCRIPTS / "lost_in_trace.py")
    options = (*FILE, "--workers", "2", "--ps", "1", "--restart_workers", "1")
    with processes.started(*options, script, "all") as process:
        assert int(said(process, "DONE").split()[1]) == 60, log(process)
        assert "no worker is there: waiting" in log(process)


def test_training_goes_on_and_the_lost_worker_comes_back():
    options = ("--workers", "2", "--restart_workers", "1")
    with launched(*options, program=MODULE, steps=2000, epochs=10_000) as process:
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
    with processes.started(*FILE, "--workers", "3", "--ps", "1", script) as process:
        came_back, longest, steps, expected = report(process, "RESULT", 200.0)
        assert exit_of(process, 60.0)[0] == 0, log(process)
    assert came_back and steps == expected
    assert longest < 10.0


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


def test_a_lost_ps_ends_training_and_starting_again_resumes(tmp_path):
    arguments = {"epochs": 4, "steps": 500, "backup": str(tmp_path / "backup")}
    options = ("--workers", "2", "--ps", "2")
    with launched(*options, **arguments) as process:
        address, pid = roles(process, 4)["ps 1"]
        said(process, "EPOCH 2")
        process.line_with("STEPS", 10.0)
        start = time.monotonic()
        processes.kill(pid)
        code, _ = ended(process, 30.0)
        assert time.monotonic() - start < 30.0
    assert code == 1 and "RuntimeError" in process.text, log(process)
    error = process.text[process.text.rindex("RuntimeError") :]
    assert f"ps 1 at {address}" in error
    assert "ps 0" not in error
    assert str(tmp_path / "backup") in error

    with launched(*options, **arguments) as process:
        assert said(process, "EPOCH") == "EPOCH 2"
        got = report(process, "DONE")
        assert exit_of(process, 20.0)[0] == 0, log(process)
    assert got == {"epochs": 4, "steps": 2000, "sparse": [4], "dense": [4]}


def test_the_only_ps_is_lost_without_a_backup():
    with launched("--workers", "1", epochs=10_000) as process:
        address, pid = roles(process, 2)["ps 0"]
        steps_where(process, lambda s: s[0] > 50, processes.START_SECONDS)
        processes.kill(pid)
        code, seconds = ended(process, 30.0)
    assert code == 1, log(process)
    error = process.text[process.text.rindex("RuntimeError") :]
    assert f"ps 0 at {address}" in error
    assert "BackupAndRestore" in error
    assert seconds < 30.0


# -- interrupts -----------------------------------------------------------------------------


def test_reading_what_a_lost_ps_held_names_it():
    script = str(SCRIPTS / "reads_without_ps.py")
    with processes.started(*FILE, "--workers", "1", "--ps", "1", script) as process:
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
    assert process.text.rstrip().endswith("KeyboardInterrupt"), log(process)


# -- tasks that come late, and chiefs that come and go --------------------------------------


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
    assert f"\n{kind}: " in process.text, log(process)
    assert process.text.count("Traceback") == 1, log(process)
    assert "site-packages" not in process.text, log(process)
    assert took < seconds, log(process)
    return process.text[process.text.index(f"\n{kind}: ") + 1 :], took


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
tf_dsgd.__version__ = "9.9.9"
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
