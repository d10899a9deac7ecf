"""`python -m tf_dsgd.launch`: what it starts, what it says, and that nothing outlives it."""

import json
import re
import resource
import signal
import socket
import sys
import time

import pytest

from tests.cluster import processes
from tests.cluster.observing import MODULE
from tf_dsgd.launch import launcher as launch
from tf_dsgd.launch import resources

# The scripts do without TensorFlow, to be quick. They end when the test closes their input. Those
# that are interrupted are ready half a second after they began: a younger one is killed instead.
TALK = """
import json, os, sys
config = json.loads(os.environ["TF_CONFIG"])
print("SCRIPT", json.dumps([sys.argv[1:], config, os.environ["TF_FORCE_GPU_ALLOW_GROWTH"]]))
print("READY", flush=True)
sys.stdin.read()
sys.exit(7)
"""
CATCH = """
import sys, time
try:
    time.sleep(0.5)
    print("READY", flush=True)
    sys.stdin.read()
except KeyboardInterrupt:
    print("SAVED", flush=True)
"""
SAVES = CATCH.replace('    print("SAVED', '    time.sleep(1.0)\n    print("SAVED')
HANDLES = """
import signal, sys, time

def end(number, _):
    print("BY", signal.Signals(number).name, flush=True)
    sys.exit(3)

signal.signal(signal.SIGTERM, end)
time.sleep(0.5)
print("READY", flush=True)
sys.stdin.read()
"""
STUBBORN = """
import signal, sys, time
time.sleep(0.5)
signal.signal(signal.SIGINT, lambda *_: print("NO", flush=True))
print("READY", flush=True)
sys.stdin.read()
"""
KILL_ITSELF = """
import os, signal, sys
print("to stdout", __name__, flush=True)
print("to stderr without an end", file=sys.stderr, end="", flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
IN_A_TERMINAL = """
import sys, time
try:
    time.sleep(0.5)
    print("TERMINAL", sys.stdout.isatty(), sys.stderr.isatty(), [sys.stdin.read()], flush=True)
    time.sleep(100)
except KeyboardInterrupt:
    print("CAUGHT", flush=True)
    time.sleep(0.5)  # a second interrupt, were there one, would come now
"""
# Gives the program a terminal, whose keyboard is this process's input.
TERMINAL = "import os, pty, sys; sys.exit(os.waitstatus_to_exitcode(pty.spawn(sys.argv[1:])))"
STOP_ANOTHER = """
import json, os, signal, sys
import psutil
sys.stdin.readline()
for process in psutil.Process(os.getppid()).children():
    if json.loads(process.environ()["TF_CONFIG"])["task"]["type"] == "ps":
        process.send_signal(signal.SIGSTOP)
print("READY", flush=True)
sys.stdin.read()
"""
FAMILY = """
import subprocess, sys
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
print("READY", flush=True)
sys.stdin.read()
"""
ROLE = re.compile(r"tf_dsgd \S+: (worker \d of \d|ps \d of \d) at (127\.0\.0\.1:\d+) \(pid (\d+)\)")


def launched(tmp_path, script, *options, arguments=()):
    path = tmp_path / "train.py"
    path.write_text(script)
    return processes.started(*MODULE, *options, str(path), *arguments, warm=False)


def roles(process, count):
    """Task -> (address, pid), from the log."""
    found = {}
    for _ in range(count):
        line = process.line_with("tf_dsgd 0")
        task, address, pid = ROLE.search(line).groups()
        name = task.split(" of ")[0]
        assert line.startswith(f"[{name}] "), line
        found[name] = (address, int(pid))
    return found


@pytest.mark.slow
@pytest.mark.beside_others
def test_the_script_is_chief_and_lost_tasks_are_named(tmp_path):
    options = ("--workers", "2", "--ps", "1", "--threads_per_worker", "3", "--restart_workers", "1")
    own = ["--workers", "9", "-m", "x y"]
    with launched(tmp_path, TALK, *options, arguments=own) as process:
        arguments, config, growth = json.loads(process.line_with("SCRIPT").removeprefix("SCRIPT"))
        assert arguments == own
        assert config["task"] == {"type": "chief", "index": 0}
        assert {job: len(tasks) for job, tasks in config["cluster"].items()} == {
            "chief": 1,
            "worker": 2,
            "ps": 1,
        }
        assert growth == "true"
        found = roles(process, 3)
        assert [found[name][0] for name in ("worker 0", "worker 1", "ps 0")] == [
            *config["cluster"]["worker"],
            *config["cluster"]["ps"],
        ]
        environment = processes.psutil.Process(found["worker 0"][1]).environ()
        assert environment["TF_DSGD_THREADS"] == "3"

        address, pid = found["worker 1"]
        processes.kill(pid)
        said = process.line_with("[launch]", 5.0)
        assert f"worker 1 (pid {pid}) was killed by SIGKILL; starting it again, 0 " in said
        again = roles(process, 1)["worker 1"]
        assert again[0] == address
        processes.kill(again[1])
        said = process.line_with("[launch]", 5.0)
        assert said == f"[launch] worker 1 (pid {again[1]}) was killed by SIGKILL"
        processes.psutil.Process(found["ps 0"][1]).terminate()
        said = process.line_with("[launch]", 5.0)
        assert f"ps 0 (pid {found['ps 0'][1]})" in said

        family = process.descendants()
        assert len(family) == 2  # the script and worker 0
        process.popen.stdin.close()
        code, _ = process.wait(10.0)
        assert code == 7, process.text
        assert processes.gone(family) == []


@pytest.mark.slow
@pytest.mark.beside_others
@pytest.mark.parametrize(
    ("script", "number", "code", "word"),
    [
        (CATCH, signal.SIGINT, 130, "SAVED"),
        (CATCH, signal.SIGTERM, 143, "SAVED"),
        (CATCH, signal.SIGHUP, 129, "SAVED"),
        (HANDLES, signal.SIGTERM, 143, "BY SIGTERM"),
    ],
    ids=["SIGINT", "SIGTERM", "SIGHUP", "SIGTERM, handled"],
)
def test_a_signal_reaches_the_script_and_ends_all(tmp_path, script, number, code, word):
    with launched(tmp_path, script, "--workers", "2") as process:
        process.line_with("READY")
        family = process.descendants()
        assert len(family) == 4
        process.send(number)
        assert process.wait(10.0)[0] == code, process.text
        assert word in process.text
        assert "Traceback" not in process.text
        assert processes.gone(family) == []


@pytest.mark.slow
@pytest.mark.beside_others
def test_a_launcher_in_the_background_of_a_shell_lets_the_script_save(tmp_path):
    """Such a shell has it ignore SIGINT; SIGTERM is still Ctrl-C to the script."""
    path = tmp_path / "train.py"
    path.write_text(CATCH)
    ignoring = "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_IGN); "
    program = (sys.executable, *MODULE, "--workers", "1", str(path))
    with processes.started(
        "-c", f"{ignoring}os.execv(sys.argv[1], sys.argv[1:])", *program, warm=False
    ) as process:
        process.line_with("READY")
        family = process.descendants()
        process.send(signal.SIGINT)
        process.send(signal.SIGTERM)
        assert process.wait(10.0)[0] == 143, process.text
        assert "SAVED" in process.text
        assert processes.gone(family) == []


@pytest.mark.slow
@pytest.mark.beside_others
def test_ctrl_c_in_a_terminal_reaches_the_script_once(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(IN_A_TERMINAL)
    program = (sys.executable, *MODULE, "--workers", "1", str(path))
    with processes.started("-c", TERMINAL, *program) as process:
        # Keras draws its progress bar; a script that reads ends instead of being stopped.
        assert process.line_with("TERMINAL").split() == ["TERMINAL", "True", "True", "['']"]
        family = process.descendants()
        assert len(family) == 4
        process.popen.stdin.write("\x03")
        process.popen.stdin.flush()
        assert process.wait(10.0)[0] == 130, process.text
        assert "CAUGHT" in process.text
        assert "Traceback" not in process.text
        assert processes.gone(family) == []


def test_a_second_signal_ends_a_script_that_ignores_the_first(tmp_path):
    with launched(tmp_path, STUBBORN, "--workers", "1") as process:
        process.line_with("READY")
        family = process.descendants()
        start = time.monotonic()
        process.send(signal.SIGINT)
        process.line_with("NO", 10.0)
        while process.popen.poll() is None and time.monotonic() < start + 10.0:
            process.send(signal.SIGINT)
            time.sleep(0.1)
        assert time.monotonic() - start >= launch.AGAIN_SECONDS
        assert process.wait(10.0)[0] == 130, process.text
        assert "still ran after SIGINT: killed" in process.text
        assert "Traceback" not in process.text
        assert processes.gone(family) == []


@pytest.mark.beside_others
@pytest.mark.parametrize(
    ("numbers", "code"),
    [
        ([signal.SIGHUP, signal.SIGHUP], 129),
        ([signal.SIGTERM, signal.SIGHUP], 143),
        ([signal.SIGINT, signal.SIGINT], 130),
    ],
    ids=["a terminal that is closed", "a supervisor", "a terminal and who passes it on"],
)
def test_signals_that_come_together_leave_the_script_its_time(tmp_path, numbers, code):
    with launched(tmp_path, SAVES, "--workers", "1") as process:
        process.line_with("READY")
        for number in numbers:
            process.send(number)
            time.sleep(0.01)  # or they may be one
        assert process.wait(20.0)[0] == code, process.text
        assert "SAVED" in process.text


@pytest.mark.slow
@pytest.mark.beside_others
@pytest.mark.parametrize("when", ["importing", "serving"])
def test_nothing_outlives_a_launcher_that_is_killed(tmp_path, when):
    with launched(tmp_path, TALK, "--workers", "1") as process:
        process.line_with("READY")
        if when == "serving":
            roles(process, 2)
        family = process.descendants()
        assert len(family) == 3
        process.send(signal.SIGKILL)
        assert process.wait(10.0)[0] == -signal.SIGKILL
        assert processes.gone(family) == []


@pytest.mark.slow
@pytest.mark.beside_others
def test_nothing_outlives_a_script_that_ends(tmp_path):
    with launched(tmp_path, FAMILY, "--workers", "1") as process:
        process.line_with("READY")
        family = process.descendants()
        assert len(family) == 4  # with the script's own child
        process.popen.stdin.close()
        assert process.wait(10.0)[0] == 0, process.text
        assert processes.gone(family) == []


@pytest.mark.slow
@pytest.mark.beside_others
def test_a_stopped_process_ends_with_the_others(tmp_path):
    """Without being waited for: it hears of its end only if it goes on."""
    with launched(tmp_path, STOP_ANOTHER, "--workers", "1") as process:
        roles(process, 2)
        process.popen.stdin.write("\n")
        process.popen.stdin.flush()
        process.line_with("READY")
        family = process.descendants()
        process.popen.stdin.close()
        code, seconds = process.wait(30.0)
        assert code == 0 and seconds < launch.STOP_SECONDS, process.text
        assert processes.gone(family) == []


@pytest.mark.slow
@pytest.mark.beside_others
def test_a_module_with_a_prefix_and_a_script_that_is_killed(tmp_path):
    (tmp_path / "a_module.py").write_text(KILL_ITSELF)
    path = f"{processes.helpers.ROOT}:{tmp_path}"
    options = ("--workers", "1", "--prefix_chief", "-m", "a_module")
    with processes.started(*MODULE, *options, PYTHONPATH=path) as process:
        assert process.wait(60.0)[0] == 128 + signal.SIGKILL
    assert "[chief] to stdout __main__" in process.lines
    assert "[chief] to stderr without an end" in process.lines


@pytest.mark.beside_others
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["train.py"], "--workers"),
        (["--workers", "2"], "script"),
        (["--workers", "0", "train.py"], "integer from 1 to 9999. Received: '0'"),
        (["--workers", "two", "train.py"], "Received: 'two'"),
        (["--workers", "2", "--ps", "-1", "train.py"], "--ps: must be an integer from 0"),
        (["--workers", "2", "--threads_per_worker", "-1", "train.py"], "threads_per_worker"),
        (["--workers", "2", "--restart_workers", "-1", "train.py"], "restart_workers"),
        (["--workers", "2", "--work", "2", "train.py"], "--work"),
        (["--workers", "2", "no/such.py", "--lr", "1"], "no file 'no/such.py'"),
    ],
)
def test_wrong_arguments(capsys, arguments, words):
    with pytest.raises(SystemExit) as caught:
        launch.main(arguments)
    assert caught.value.code == 2
    assert words in capsys.readouterr().err


@pytest.mark.beside_others
def test_more_processes_than_there_are_ports(capsys):
    """Each needs an open socket here; the limit is lowered, as a system's own may be."""
    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, allowed[1]))
    try:
        assert launch.main(["--workers", "500", "--ps", "20", __file__]) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, allowed)
    said = capsys.readouterr().err
    assert "no port for each of 521 processes: Too many open files. Lower --workers" in said


def test_a_reserved_port_is_given_to_nobody_but_to_who_asks_for_it():
    with launch._reserved_addresses(20) as addresses:
        ports = {int(address.split(":")[1]) for address in addresses}
        assert len(ports) == 20
        for port in ports:
            # As a program without SO_REUSEADDR.
            with socket.socket() as careless, pytest.raises(OSError):
                careless.bind(("127.0.0.1", port))
            for _ in range(2):  # as TensorFlow's server, and as one that is started again
                with (
                    socket.create_server(("", port)),
                    socket.create_connection(("127.0.0.1", port), timeout=5.0),
                ):
                    pass
    with launch._reserved_addresses(300) as many:
        assert len(set(many)) == 300
        held = {int(address.split(":")[1]) for address in many}
        others = [socket.create_server(("127.0.0.1", 0)) for _ in range(300)]
        try:
            assert not held & {other.getsockname()[1] for other in others}
        finally:
            for other in others:
                other.close()


@pytest.mark.beside_others
@pytest.mark.parametrize(
    ("visible", "names"),
    [("", []), ("-1", []), ("0,1", ["0", "1"]), ("3, GPU-1f", ["3", "GPU-1f"]), ("2,-1,3", ["2"])],
)
def test_gpus_that_are_visible(monkeypatch, visible, names):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert resources.gpus() == names


@pytest.mark.beside_others
@pytest.mark.parametrize("gpus", [2, 0])
def test_gpus_that_nvidia_smi_lists(monkeypatch, tmp_path, gpus):
    program = tmp_path / "nvidia-smi"
    lines = "".join(
        f"echo 'GPU {n}: NVIDIA (UUID: GPU-{n})'\necho '  MIG 1g'\n" for n in range(gpus)
    )
    program.write_text(f"#!/bin/sh\n{lines}")
    program.chmod(0o755)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert resources.gpus() == ["0", "1"][:gpus]
    program.unlink()
    assert resources.gpus() == []


@pytest.mark.beside_others
def test_processes_keep_freed_memory_unless_told_otherwise(monkeypatch, tmp_path):
    script = tmp_path / "train.py"
    script.touch()
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "4096")
    monkeypatch.delenv("MALLOC_MMAP_THRESHOLD_", raising=False)
    options = launch.parse(["--workers", "1", str(script)])
    chief, servers = launch._tasks(options, ["h:1", "h:2", "h:3"])
    for task in (chief, *servers):
        assert task.environment["MALLOC_TRIM_THRESHOLD_"] == "4096"
        assert task.environment["MALLOC_MMAP_THRESHOLD_"] == str(256 << 20)


@pytest.mark.beside_others
def test_workers_share_gpus_and_cores(monkeypatch, tmp_path):
    script = tmp_path / "train.py"
    script.touch()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    monkeypatch.setattr(resources, "cores", lambda: 7)
    options = launch.parse(["--workers", "3", "--ps", "2", str(script), "--lr", "1"])
    chief, servers = launch._tasks(options, [f"h:{n}" for n in range(6)])
    assert chief.command == [str(script), "--lr", "1"]
    assert "CUDA_VISIBLE_DEVICES" not in chief.environment
    devices = {task.name: task.environment["CUDA_VISIBLE_DEVICES"] for task in servers}
    assert devices == {"ps 0": "", "ps 1": "", "worker 0": "4", "worker 1": "5", "worker 2": "4"}
    threads = [task.environment.get("TF_DSGD_THREADS") for task in servers]
    assert threads == [None, None, "2", "2", "2"]
    config = json.loads(servers[-1].environment["TF_CONFIG"])
    assert config == {
        "cluster": {"chief": ["h:0"], "worker": ["h:1", "h:2", "h:3"], "ps": ["h:4", "h:5"]},
        "task": {"type": "worker", "index": 2},
    }
