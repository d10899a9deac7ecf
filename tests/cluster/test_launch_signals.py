"""What a launcher's processes make of signals that others send to all of them; and full disks."""

import errno
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from tests import helpers
from tests.cluster import processes
from tests.cluster.observing import MODULE
from tests.cluster.test_launch import launched, roles
from tf_dsgd.launch import ending
from tf_dsgd.launch import launcher as launch

# As docs/cluster.md shows it.
SAVES_BESIDE = """
import os, signal, sys, time
import psutil

def end(number, frame):
    signal.signal(number, lambda *_: None)
    raise KeyboardInterrupt

signal.signal(signal.SIGTERM, end)
try:
    time.sleep(0.5)
    print("READY", flush=True)
    sys.stdin.read()
except KeyboardInterrupt:
    time.sleep(2.0)  # servers that end by the signal have ended by then
    running = [p for p in psutil.Process(os.getppid()).children() if p.status() != "zombie"]
    print("SAVED beside", len(running), flush=True)
"""
ITS_OWN = """
import signal, sys, time
signal.signal(signal.SIGUSR1, lambda *_: print("USR1", flush=True))
time.sleep(0.5)
print("READY", flush=True)
sys.stdin.read()
"""
FLOODS = """
import signal
signal.signal(signal.SIGINT, signal.SIG_IGN)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
while True:
    print("line " * 1000)
"""


@pytest.mark.slow
@pytest.mark.beside_others
@pytest.mark.parametrize("launcher_first", [True, False])
def test_a_signal_to_all_processes_of_a_job_leaves_the_script_its_time(tmp_path, launcher_first):
    """As Slurm sends it. The servers serve on while the script saves, and the exit code is 143."""
    with launched(tmp_path, SAVES_BESIDE, "--workers", "2") as process:
        process.line_with("READY")
        roles(process, 3)
        family = [psutil.Process(process.popen.pid), *process.descendants()]
        for each in family if launcher_first else reversed(family):
            each.send_signal(signal.SIGTERM)
        assert process.wait(20.0)[0] == 143, process.text
        assert "SAVED beside 4" in process.text
        assert "Traceback" not in process.text
        assert processes.gone(family[1:]) == []


@pytest.mark.slow
@pytest.mark.beside_others
def test_a_server_that_alone_is_told_ends(tmp_path):
    with launched(tmp_path, SAVES_BESIDE, "--workers", "1") as process:
        process.line_with("READY")
        pid = roles(process, 2)["worker 0"][1]
        os.kill(pid, signal.SIGTERM)
        process.line_with("worker 0 (pid", 20.0)
        process.send(signal.SIGTERM)
        assert process.wait(20.0)[0] == 143, process.text
        assert "SAVED beside 2" in process.text


@pytest.mark.beside_others
def test_a_script_that_catches_it_gets_a_signal_of_its_own(tmp_path):
    with launched(tmp_path, ITS_OWN, "--workers", "1") as process:
        process.line_with("READY")
        process.send(signal.SIGUSR2)  # nobody catches it
        process.send(signal.SIGUSR1)
        process.line_with("USR1", 20.0)
        process.popen.stdin.close()
        assert process.wait(20.0)[0] == 0, process.text


@pytest.mark.slow
@pytest.mark.beside_others
def test_a_launcher_whose_output_nobody_reads_can_be_ended(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(FLOODS)
    command = [sys.executable, *MODULE, "--workers", "1", str(script)]
    with subprocess.Popen(
        command,
        cwd=helpers.ROOT,
        env=helpers.python_env(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    ) as process:
        try:
            assert process.stdout.read(1)  # then no more
            time.sleep(2.0)  # the pipe is full
            family = psutil.Process(process.pid).children(recursive=True)
            process.send_signal(signal.SIGTERM)
            time.sleep(2 * launch.AGAIN_SECONDS)
            process.send_signal(signal.SIGTERM)
            assert process.wait(20.0) == 143
            assert processes.gone(family) == []
        finally:
            process.kill()


class _FullDisk:
    def write(self, _):
        raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize(
    ("restarts", "missing"),
    [
        (0, None),
        (1, OSError(errno.ENOMEM, "Cannot allocate memory")),
        (1, RuntimeError("can't start new thread")),
    ],
    ids=["a full disk", "no memory", "no thread"],
)
def test_what_a_machine_has_no_room_for_ends_nothing(monkeypatch, capsys, restarts, missing):
    script, server = (
        launch._Task(name, ["-c", ""], {"TF_CONFIG": text}, restarts)
        for name, text in (
            ("chief", "{}"),
            (
                "worker 0",
                '{"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": 0}}',
            ),
        )
    )
    launcher = launch._Launcher([script], [server], False)
    server.process = subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"])
    server.process.wait(20.0)

    started = []

    def none(task):
        if isinstance(missing, RuntimeError):  # its output's reader cannot be started
            task.process = subprocess.Popen(
                [sys.executable, "-c", "import time; time.sleep(100)"], process_group=0
            )
            started.append(task.process)
        raise missing

    with launcher._backup, launcher._ended:
        monkeypatch.setattr(launcher, "_start", none)
        monkeypatch.setattr(launcher, "_ended", _FullDisk())
        launcher._look_after_servers()
    os.close(launcher._held)
    os.close(launcher._lifeline)
    said = capsys.readouterr()
    assert ("could not be started again" in said.out + said.err) == bool(restarts)
    assert "exited with code 3" in said.out + said.err
    assert server.process is None
    assert all(process.returncode == -signal.SIGKILL for process in started)


def test_the_launcher_does_not_need_a_thread_to_go_on(monkeypatch, capsys):
    launcher = launch._Launcher([], [], False)

    def none(_):
        raise RuntimeError("can't start new thread")

    with launcher._backup, launcher._ended:
        monkeypatch.setattr(launch.threading.Thread, "start", none)
        launcher.say("a line")
    os.close(launcher._held)
    os.close(launcher._lifeline)
    assert "a line" not in capsys.readouterr().err


def test_signals_that_a_system_does_not_tell(monkeypatch):
    monkeypatch.setattr(ending.Path, "read_text", lambda _: "Name:\tpython\nState:\tS\n")
    assert not ending.catches(os.getpid(), signal.SIGTERM)
