"""Programs that begin with TensorFlow and Keras imported, which takes 5 s of a core otherwise.

A process imports them, opens no device, and forks: `Popen` is `subprocess.Popen` of such a fork.
Where the program is `tf_dsgd.launch`, the scripts that it starts are forks, too. Its worker and ps
processes are not: they import little, and tests read their environments. Linux only.

What the command line does to a program is tested cold, in `test_launch.py` and others.
"""

import atexit
import builtins
import contextlib
import ctypes
import fcntl
import io
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import types
import warnings
from pathlib import Path

ROOT = Path(__file__).parents[2]
LAUNCH = "tf_dsgd.launch"
_PR_SET_PDEATHSIG = 1
_STDIO = 3
_BYTES = 1 << 20  # of a request
_FORK_SECONDS = 150.0  # the parent imports TensorFlow before the first one
_START_THREADS = ("pandas", "pyarrow")  # as they are imported


class Popen(subprocess.Popen):
    """A program that another process of this test run forks for us."""

    def _execute_child(self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *others):
        _, _, _, stdin, _, _, stdout, _, stderr, *_ = others
        assert min(stdin, stdout, stderr) >= 0 and not pass_fds, "pipes for all three"
        self._exit_code, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._exit_code.settimeout(_FORK_SECONDS)
        with theirs:
            asked = {"argv": args, "env": env, "cwd": os.fspath(cwd)}
            _send(_parent(), asked, [stdin, stdout, stderr, theirs.fileno()])
        self.pid = int(self._exit_code.recv(32))
        self._child_created = True
        for fd in {stdin, stdout, stderr}:
            os.close(fd)

    def _wait(self, timeout):
        if self.returncode is None:
            if not select.select([self._exit_code], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self.args, timeout)
            self.returncode = int(self._exit_code.recv(32) or -signal.SIGKILL)
            self._exit_code.close()
        return self.returncode

    def _internal_poll(self, *_, **__):
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._wait(0.0)
        return self.returncode


class _Script(subprocess.Popen):
    """A script of a launcher: one of its `waiting` forks, or a new process if it is a server."""

    waiting = ()

    def __init__(self, command, **options):
        tie = command.index(str(os.getpid()))  # what comes before has the child end with us
        self._is_script = "tf_dsgd.serve" not in command
        super().__init__(command[tie + 1 :] if self._is_script else command, **options)

    def _execute_child(self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *others):
        if not self._is_script:
            given = args, executable, preexec_fn, close_fds, pass_fds, cwd, env
            super()._execute_child(*given, *others)
            return
        _, _, _, *pipes = others
        stdio = [p if p >= 0 else fd for fd, p in enumerate((pipes[0], pipes[3], pipes[5]))]
        self.pid, connection = self.waiting.pop(0)
        with connection:
            asked = {"argv": args, "env": env, "cwd": os.getcwd(), "pass_fds": pass_fds}
            _send(connection, asked | {"group": True}, [*stdio, *pass_fds])
        self._child_created = True
        for fd in {p for p in (pipes[0], pipes[3], pipes[5]) if p >= 0}:
            os.close(fd)


def _send(connection, asked, fds):
    socket.send_fds(connection, [json.dumps(asked).encode()], fds)


def _receive(connection):
    """What was asked for, and file descriptors; None when the other side has ended."""
    text, fds, _, _ = socket.recv_fds(connection, _BYTES, 16)
    return (json.loads(text), fds) if text else None


_connection = None


def _parent():
    """A connection to the process that forks, which ends with this one."""
    global _connection
    if _connection is None:
        _connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
        own = {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": path}
        own["OPENBLAS_NUM_THREADS"] = "1"  # it would start the others as it is imported
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env=os.environ | own,
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
            )
        atexit.register(process.wait)
        atexit.register(_connection.close)  # the other way round: it comes first
    return _connection


# -- in the process that forks, and in its forks ----------------------------------------------


def main():
    """Forks whenever it is asked to; returns in a fork, with its command line."""
    _import()
    here = [Path(f"/proc/self/task/{task}/comm") for task in os.listdir("/proc/self/task")]
    names = sorted(path.read_text().strip() for path in here)
    assert len(names) == 1, f"a fork would have one thread of {names}"
    connection = socket.socket(fileno=int(sys.argv[1]))
    children = {}
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    read, write = os.pipe()
    os.set_blocking(read, False)
    os.set_blocking(write, False)
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    while True:
        ready, _, _ = select.select([connection, read], [], [])
        if read in ready:
            os.read(read, 4096)
            while children and (ended := os.waitpid(-1, os.WNOHANG))[0]:
                with children.pop(ended[0]) as told, contextlib.suppress(OSError):
                    told.send(str(os.waitstatus_to_exitcode(ended[1])).encode())
        if connection in ready:
            received = _receive(connection)
            if received is None:
                os._exit(0)
            asked, (*stdio, told) = received
            told = socket.socket(fileno=told)
            pid = os.fork()
            if not pid:
                signal.set_wakeup_fd(-1)
                for each in (connection, told, *children.values()):
                    each.close()
                os.close(read), os.close(write)
                return _become(asked, stdio)
            told.send(str(pid).encode())
            children[pid] = told
            for fd in stdio:
                os.close(fd)


def _import():
    """Imports what programs need, and starts no thread.

    Where pandas is installed Keras imports it, which imports pyarrow, whose allocator (jemalloc)
    starts a thread and locks that a fork would have without it. In forks Keras is as where there is
    no pandas; a program that wants pandas itself may import it.
    """
    hidden = [name for name in _START_THREADS if name not in sys.modules]
    sys.modules.update(dict.fromkeys(hidden))
    import keras
    import psutil
    import tensorflow

    import tf_dsgd

    del keras, psutil, tensorflow, tf_dsgd
    for name in hidden:
        del sys.modules[name]


def _become(asked, fds):
    """Makes this fork look like a new process."""
    for number in (signal.SIGINT, signal.SIGCHLD):
        default = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        signal.signal(number, default)
    if asked.get("group"):
        os.setpgid(0, 0)
    # Out of the way of the numbers that they are to have.
    moved = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 200) for fd in fds]
    for fd in fds:
        os.close(fd)
    for fd, number in zip(moved, [*range(_STDIO), *asked.get("pass_fds", ())], strict=True):
        os.dup2(fd, number, inheritable=True)
        os.close(fd)
    os.chdir(asked["cwd"])
    os.environ.clear()
    os.environ.update(asked["env"])
    interpreter, *argv = asked["argv"]
    sys.orig_argv[:] = [interpreter, *argv]
    unbuffered = argv[0] == "-u"
    if unbuffered:
        argv.pop(0)
    while argv[0] == "-W":  # error::UserWarning, say
        action, _, category = argv[1].split(":")
        warnings.filterwarnings(action, category=getattr(builtins, category))
        sys.warnoptions.append(argv[1])  # for what it starts
        argv = argv[2:]
    sys.stdin = open(0, closefd=False)  # noqa: SIM115, they live as long as the process
    out = open(1, "wb", 0 if unbuffered else -1, closefd=False)  # noqa: SIM115
    sys.stdout = io.TextIOWrapper(out, write_through=unbuffered)
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr
    return argv


def _wait_to_become():
    """Forks; in the fork returns what it is to become, and in the parent (pid, connection)."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    parent = os.getpid()
    pid = os.fork()
    if pid:
        theirs.close()
        return pid, ours
    ours.close()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent or (received := _receive(theirs)) is None:
        os._exit(0)
    theirs.close()
    return _become(*received)


def _launch(argv):
    """Has forks ready for a launcher's scripts; returns in each of them, with its command line."""
    from tf_dsgd.launch import launcher, options

    asked = options.parse(argv)
    forks = []
    for _ in range(asked.workers if asked.spmd else 1):
        forked = _wait_to_become()
        if not isinstance(forked, tuple):
            return forked
        forks.append(forked)
    _Script.waiting = forks
    names = ("PIPE", "STDOUT", "DEVNULL", "TimeoutExpired", "run")
    launcher.subprocess = types.SimpleNamespace(
        Popen=_Script, **{name: getattr(subprocess, name) for name in names}
    )
    return ["-m", LAUNCH, *argv]


def run(argv):
    """Runs a program as `python` does."""
    if argv[:2] == ["-m", LAUNCH]:
        argv = _launch(argv[2:])
    if argv[0] == "-m":
        sys.path[0] = os.getcwd()
        sys.argv[:] = argv[1:]
        runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
        return
    sys.path[0] = os.path.dirname(os.path.abspath(argv[0]))
    sys.argv[:] = argv
    module = types.ModuleType("__main__")
    module.__file__ = argv[0]
    sys.modules["__main__"] = module  # for good: threads and pickles may ask for it to the end
    with open(argv[0], "rb") as file:
        code = compile(file.read(), argv[0], "exec")
    exec(code, vars(module))


if __name__ == "__main__":
    run(main())
