"""Trains on one machine with several processes: `python -m tf_dsgd.launch --workers 4 train.py`.

Starts worker and ps processes (`tf_dsgd.serve`) on ports of 127.0.0.1, then the script as the
chief, each with its TF_CONFIG. Ends them all when the script ends, with the script's exit code.

With `--spmd` there is no chief and no ps: every worker runs the script, as
`tf_dsgd.callbacks.PeriodicAveraging` needs it. Ends with the first exit code that is not 0; the
other workers then have a few seconds to say what they miss.

If the launcher itself is killed, Linux kills the processes it started. On other systems the worker
and ps processes end by themselves, as a pipe that they watch closes; the script does not.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import select
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from typing import IO, Any, TextIO

from tf_dsgd import floods
from tf_dsgd._tf_errors import FLOOD_GREETINGS, FLOOD_HEADS, FLOOD_RAISED, FLOOD_TAILS
from tf_dsgd.launch import resources
from tf_dsgd.launch.ending import catches, ending
from tf_dsgd.launch.options import parse
from tf_dsgd.launch.streams import pipes, same_file, terminal_input
from tf_dsgd.launch.tied import TIE
from tf_dsgd.resuming import (
    BACKUP_FD,
    COMMAND,
    ENDED_FD,
    PARENT_FD,
    TASKS_PER_WORKER,
    THREADS,
    how_to_go_on,
)

_INTRA_OP = "TF_NUM_INTRAOP_THREADS"
_EARLY = os.path.join(os.path.dirname(__file__), "early")  # on what Python imports before a script

INTERRUPT_SECONDS = 30.0  # a script may save a checkpoint after Ctrl-C
LAST_WORDS_SECONDS = 15.0  # equal processes name the one that failed: on a busy machine, later
STOP_SECONDS = 5.0
SAY_SECONDS = 1.0  # then a line of the launcher's own comes later, or never
AGAIN_SECONDS = 0.5  # after a signal: what comes sooner is not the user's second one
_OF_THE_SCRIPT = (signal.SIGUSR1, signal.SIGUSR2)  # as Slurm sends a while before the end
_BOOT_SECONDS = 0.3  # so old a script has nothing to save
_QUIET_SECONDS = 0.2  # a question, or a progress bar, has no end of line


# A step frees blocks of up to some MB and takes as large ones again. glibc would give them back to
# the kernel each time, which maps and clears them anew: about a twelfth of all processor time.
_KEPT_BYTES = str(256 << 20)
_DEFAULTS = {
    "MALLOC_TRIM_THRESHOLD_": _KEPT_BYTES,
    "MALLOC_MMAP_THRESHOLD_": _KEPT_BYTES,
    # TensorFlow switches oneDNN on only where there is AVX-512; with AVX2 it is faster, too.
    "TF_ENABLE_ONEDNN_OPTS": "1",
}
"""Of the environment of processes, unless the user has set them."""


@dataclasses.dataclass
class _Task:
    """A worker, ps or chief process and how to start it."""

    name: str
    command: list[str]
    environment: dict[str, str]
    restarts_left: int = 0
    process: subprocess.Popen[bytes] | None = None
    started: float = 0.0
    readers: list[threading.Thread] = dataclasses.field(default_factory=list)

    @property
    def address(self) -> str:
        """Where it listens."""
        config = json.loads(self.environment["TF_CONFIG"])
        return str(config["cluster"][config["task"]["type"]][config["task"]["index"]])

    def send(self, number: int) -> None:
        """Signals the process and those it started, which are its process group.

        One in which Python has hardly started is killed instead of interrupted: it would answer
        with a traceback of Python's own modules.
        """
        if number == signal.SIGINT and time.monotonic() - self.started < _BOOT_SECONDS:
            number = signal.SIGKILL
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, number)

    def kill(self) -> None:
        """Ends what was started of it."""
        self.send(signal.SIGKILL)
        if self.process is not None:
            self.process.wait()
        self.process = None

    def tell_to_end(self, number: int) -> None:
        """As Ctrl-C does, which a script can catch to save; if it catches the signal, by that.

        Python ends at once by SIGTERM or SIGHUP where a script does not catch it.
        """
        self.send(number if self.process and catches(self.process.pid, number) else signal.SIGINT)

    def pass_on(self, number: int) -> None:
        """A signal that says what a script wants it to: to the process alone, if it catches it."""
        if self.process is not None and catches(self.process.pid, number):
            self.process.send_signal(number)


class _Launcher:
    """Starts, watches and ends the processes.

    All in the main thread: Linux ties a child's life to the thread that made it.
    """

    def __init__(self, scripts: Sequence[_Task], servers: Sequence[_Task], prefix_first: bool):
        self._scripts = list(scripts)  # the chief; or all workers, where each runs the script
        self._servers = list(servers)
        self._prefix_first = prefix_first
        self._code: int | None = None  # of the first script that failed
        self._mutex = threading.Lock()
        self._told: int | None = None  # the signal that ends the launcher
        self._parent = os.getppid()
        self._lost_server = False  # whether it was started again or not
        self._lifeline, self._held = os.pipe()  # closes when this process ends
        self._command = shlex.join(sys.orig_argv)
        self._errors = sys.stdout if same_file(sys.stdout, sys.stderr) else sys.stderr
        self._kept = floods.Kept(floods.kept(), FLOOD_GREETINGS)
        """Lines of TensorFlow's that tell a user nothing."""
        self._cut: dict[TextIO, bytes] = {}  # the prefix of whose line there has no end yet
        self._backup = tempfile.TemporaryFile()  # noqa: SIM115, it lives as long as this process
        """Holds the path of the chief's last checkpoint."""
        self._ended = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115
        """Holds the addresses of servers that ended and are not started again, a line each."""

    def run(self) -> int:
        """The exit code."""
        with _wakeups() as (signals, ignored):
            try:
                for task in [*self._servers, *self._scripts]:
                    self._start(task)
                self._watch(signals, ignored)
            finally:
                self._end()
        if self._told is not None:
            return 128 + self._told
        code = self._code or 0
        return 128 - code if code < 0 else code  # as a shell tells of a signal

    def say(self, text: str) -> None:
        """One line of the launcher's own."""
        line = f"{text}\n".encode(errors="surrogateescape")
        # Aside: who reads this may have stopped, and processes must be ended all the same.
        arguments = self._errors, b"[launch] ", line
        saying = threading.Thread(target=self._write, args=arguments, daemon=True)
        with contextlib.suppress(RuntimeError):  # there is no room for a thread
            saying.start()
            saying.join(SAY_SECONDS)

    def _start(self, task: _Task) -> None:
        is_script, is_first = task in self._scripts, task is self._scripts[0]
        prefix = f"[{task.name}] ".encode() if not is_first or self._prefix_first else b""
        out, error = pipes(prefix, is_script)
        command = [sys.executable, *task.command]
        if sys.platform == "linux":
            command = [sys.executable, *TIE, str(os.getpid()), *command]
        told, more = {PARENT_FD: self._lifeline}, {}
        if is_script:
            told = {BACKUP_FD: self._backup.fileno(), ENDED_FD: self._ended.fileno()}
            kept = self._kept.path if error is None else floods.SIFTED
            more = {COMMAND: self._command, floods.KEPT: kept, "PYTHONPATH": _modules()}
        task.started = time.monotonic()
        task.process = subprocess.Popen(
            command,
            env={
                **os.environ,
                **task.environment,
                **more,
                **{name: str(number) for name, number in told.items()},
            },
            pass_fds=tuple(told.values()),
            # In a process group of its own a terminal's Ctrl-C reaches the launcher alone.
            process_group=0,
            stdin=None if is_first and not terminal_input() else subprocess.DEVNULL,
            stdout=out,
            stderr=error,
        )
        for source, sink in (
            (task.process.stdout, sys.stdout),
            (task.process.stderr, self._errors),
        ):
            if source is not None:
                reader = threading.Thread(
                    target=self._copy,
                    args=(source, sink if is_script else self._errors, prefix),
                    daemon=True,
                )
                reader.start()
                task.readers.append(reader)

    def _copy(self, source: IO[bytes], sink: TextIO, prefix: bytes) -> None:
        sieve = floods.Sieve(FLOOD_HEADS, FLOOD_TAILS, FLOOD_RAISED)
        wanted = floods.wanted()
        # Without a prefix the script is as if it wrote itself.
        for piece in floods.pieces(source.fileno(), None if prefix else _QUIET_SECONDS):
            if not (wanted and sieve.takes(piece) and self._keep(prefix + piece)):
                self._write(sink, prefix, piece)

    def _keep(self, line: bytes) -> bool:
        """Whether a line of TensorFlow's is in the file for them."""
        try:
            with self._mutex:
                first = self._kept.add(line)
        except OSError:
            return False
        if first:
            self.say(self._kept.words())
        return True

    def _write(self, sink: TextIO, prefix: bytes, piece: bytes) -> None:
        if prefix:
            piece = prefix + piece.rstrip(b"\r\n") + b"\n"
        # A sink that is gone must not end the reading, or a full pipe stops the process.
        with self._mutex, contextlib.suppress(OSError, ValueError):
            if self._cut.pop(sink, prefix) != prefix:
                piece = b"\n" + piece
            if not piece.endswith(b"\n"):
                self._cut[sink] = prefix
            sink.flush()
            sink.buffer.write(piece)
            sink.buffer.flush()

    def _watch(self, signals: int, ignored: Collection[int]) -> None:
        """Until the scripts have ended, or a while after one of them failed."""
        deadline: float | None = None
        told_at = 0.0
        while running := self._running_scripts():
            if self._code is not None and self._told is None and deadline is None:
                # The others notice by themselves, and their words tell more than a signal.
                deadline = time.monotonic() + LAST_WORDS_SECONDS
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            if left == 0.0 and self._told is None:
                return
            if left == 0.0:
                name = signal.Signals(self._told or 0).name
                for task in running:
                    task.send(signal.SIGKILL)
                    self.say(f"{task.name} still ran after {name}: killed")
                deadline = left = None
            for number in _received(signals, left):
                if number == signal.SIGCHLD:
                    self._look_after_servers()
                elif number in ignored:
                    continue
                elif number in _OF_THE_SCRIPT:
                    for task in running:
                        task.pass_on(number)
                elif self._told is None:
                    self._told = number
                    os.write(self._held, b"!")  # servers that are told as well serve on
                    told_at = time.monotonic()
                    deadline = told_at + INTERRUPT_SECONDS
                    for task in running:
                        task.tell_to_end(number)
                # A terminal that is closed sends two, and who ends all of a group may, too; and
                # one comes by itself where the process ends that started this one.
                elif number == signal.SIGHUP or os.getppid() != self._parent:
                    continue
                elif time.monotonic() - told_at > AGAIN_SECONDS:
                    deadline = time.monotonic()  # the second Ctrl-C

    def _running_scripts(self) -> list[_Task]:
        """Notes the first exit code that is not 0."""
        running = []
        for task in self._scripts:
            code = _process(task).poll()
            if code is None:
                running.append(task)
            elif code and self._code is None:
                self._code = code
                alone = len(self._scripts) == 1
                if self._told is None and (code < 0 or not alone or self._lost_server):
                    how = f"{task.name} (pid {_process(task).pid}) {ending(code)}"
                    self.say(f"{how}. {self._how_to_go_on()}" if alone else how)
        return running

    def _how_to_go_on(self) -> str:
        self._backup.seek(0)
        return how_to_go_on(self._command, self._backup.read().decode(errors="replace"))

    def _look_after_servers(self) -> None:
        """Reports those that ended; starts workers again that may be."""
        for task in self._servers:
            code = None if task.process is None else task.process.poll()
            if code is None or task.process is None:
                continue
            how = f"{task.name} (pid {task.process.pid}) {ending(code)}"
            task.process, self._lost_server = None, True
            if task.restarts_left > 0 and self._told is None:
                task.restarts_left -= 1
                self.say(f"{how}; starting it again, {task.restarts_left} restarts left")
                try:
                    self._start(task)
                    continue
                except (OSError, RuntimeError) as error:  # no process, thread or file is to be had
                    how = f"{task.name} could not be started again: {error}"
                    task.kill()
            # The chief finds out by itself, if later, where the disk is full.
            with contextlib.suppress(OSError):
                self._ended.write(f"{task.address}\n".encode())
            self.say(how)

    def _end(self) -> None:
        """Ends what still runs, first kindly."""
        os.close(self._held)
        tasks = [*self._scripts, *self._servers]
        running = [t for t in tasks if t.process is not None]
        for task in running:
            task.send(signal.SIGTERM)
            task.send(signal.SIGCONT)  # one that was stopped would not hear
        deadline = time.monotonic() + STOP_SECONDS
        for task in running:
            with contextlib.suppress(subprocess.TimeoutExpired):
                _process(task).wait(max(0.0, deadline - time.monotonic()))
        for task in running:
            task.send(signal.SIGKILL)
            _process(task).wait()
        for task in tasks:
            for reader in task.readers:
                reader.join(timeout=1.0)  # longer only if another process has the pipe


def _process(task: _Task) -> subprocess.Popen[bytes]:
    if task.process is None:
        raise RuntimeError(f"{task.name} was not started")
    return task.process


@contextlib.contextmanager
def _wakeups() -> Iterator[tuple[int, Collection[int]]]:
    """A file descriptor that tells which signals came, one byte each, to wait on with `select`.

    And which of them are to be passed over. A signal that is ignored here is in the script, too: so
    is SIGINT where a shell started the launcher in the background, and a script could not be told
    to end by it.
    """
    read, write = os.pipe()
    os.set_blocking(write, False)
    os.set_blocking(read, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    ignored = {n for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if _is_ignored(n)}
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, *_OF_THE_SCRIPT):
        if number not in ignored or number == signal.SIGINT:
            signal.signal(number, lambda *_: None)
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    # The process exits after this; handlers stay, or a late Ctrl-C shows a traceback.
    yield read, ignored


def _is_ignored(number: int) -> bool:
    """As nohup, and "&" in scripts, ask for."""
    return signal.getsignal(number) == signal.SIG_IGN


def _received(signals: int, seconds: float | None) -> list[int]:
    """The signals that came, waiting for one."""
    ready, _, _ = select.select([signals], [], [], seconds)
    return list(dict.fromkeys(os.read(signals, 4096))) if ready else []


@contextlib.contextmanager
def _reserved_addresses(count: int) -> Iterator[list[str]]:
    """Free addresses that nobody else is given while the context is open.

    A bound socket that does not listen keeps Linux from giving its port to anybody who asks for any
    port, while a server that asks for this port by number may have it, as both set SO_REUSEADDR. So
    there is no time in which the port is free, and a worker that is started again finds its port.
    """
    with contextlib.ExitStack() as stack:
        addresses = []
        for _ in range(count):
            held = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM))
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            held.bind(("127.0.0.1", 0))
            addresses.append(f"127.0.0.1:{held.getsockname()[1]}")
        yield addresses


def _environment(cluster: dict[str, Any], job: str, index: int) -> dict[str, str]:
    config = {"cluster": cluster, "task": {"type": job, "index": index}}
    defaults = {**_DEFAULTS, "TF_FORCE_GPU_ALLOW_GROWTH": "true"}
    ours = {name: os.environ.get(name, value) for name, value in defaults.items()}
    return {"TF_CONFIG": json.dumps(config), **ours}


def _modules() -> str:
    """Where a script's Python looks for modules first."""
    own = os.environ.get("PYTHONPATH")
    return f"{_EARLY}{os.pathsep}{own}" if own else _EARLY


def _threads(options: argparse.Namespace) -> str:
    return str(options.threads_per_worker or max(1, resources.cores() // options.workers))


def _script(options: argparse.Namespace) -> list[str]:
    return [*(["-m"] if options.module else []), options.script, *options.args]


def _tasks(options: argparse.Namespace, addresses: Sequence[str]) -> tuple[_Task, list[_Task]]:
    """The chief and the servers, ready to start."""
    chief, workers = addresses[0], addresses[1 : 1 + options.workers]
    cluster = {"chief": [chief], "worker": workers}
    if options.ps:
        cluster["ps"] = addresses[1 + options.workers :]
    gpus = resources.gpus()

    def server(job: str, index: int, restarts: int, **more: str) -> _Task:
        return _Task(
            f"{job} {index}",
            ["-u", "-m", "tf_dsgd.serve"],
            _environment(cluster, job, index) | more,
            restarts,
        )

    servers = [server("ps", s, 0, CUDA_VISIBLE_DEVICES="") for s in range(options.ps)]
    for m in range(options.workers):
        own = {THREADS: _threads(options), **resources.own_gpu(gpus, m)}
        servers.append(server("worker", m, options.restart_workers, **own))
    unbuffered = ["-u"] if options.prefix_chief else []
    environment = _environment(cluster, "chief", 0)
    environment[TASKS_PER_WORKER] = str(options.tasks_per_worker)
    return _Task("chief", unbuffered + _script(options), environment), servers


def _equal_tasks(options: argparse.Namespace, addresses: Sequence[str]) -> list[_Task]:
    """Workers that each run the script, ready to start."""
    cluster = {"worker": list(addresses)}
    gpus = resources.gpus()
    # What TensorFlow takes for its default; a script may still set another number.
    threads = {_INTRA_OP: os.environ.get(_INTRA_OP) or _threads(options)}
    found = []
    for m in range(options.workers):
        unbuffered = ["-u"] if m or options.prefix_chief else []
        own = _environment(cluster, "worker", m) | threads | resources.own_gpu(gpus, m)
        found.append(_Task(f"worker {m}", unbuffered + _script(options), own))
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """The program; returns the exit code."""
    options = parse(arguments)
    count = options.workers + (0 if options.spmd else 1 + options.ps)
    with contextlib.ExitStack() as stack:
        try:
            places = stack.enter_context(_reserved_addresses(count))
        except OSError as error:
            print(
                f"tf_dsgd.launch: there is no port for each of {count} processes: "
                f"{error.strerror}. Lower --workers or --ps.",
                file=sys.stderr,
            )
            return 2
        if options.spmd:
            return _Launcher(_equal_tasks(options, places), [], options.prefix_chief).run()
        chief, servers = _tasks(options, places)
        return _Launcher([chief], servers, options.prefix_chief).run()
