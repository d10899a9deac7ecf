"""Processes of a cluster, started and watched by tests; every wait has a deadline."""

import contextlib
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time

import psutil

from tests import helpers
from tests.cluster import warm as warm_start

START_SECONDS = 150.0  # TensorFlow's import takes 3 s, and was seen to take 38 on a busy machine


class Process:
    """A Python process, on a host of its own or here, whose output is read as it comes."""

    def __init__(self, *arguments, warm=True, host=None, **environment):
        variables = {
            **helpers.python_env(),
            "CUDA_VISIBLE_DEVICES": "",
            "TF_CPP_MIN_LOG_LEVEL": "3",
            **environment,
        }
        self.lines = []
        self._new = queue.SimpleQueue()
        popen = (
            warm_start.Popen
            if warm and host is None and _may_be_warm(arguments, environment)
            else subprocess.Popen
        )
        command = (sys.executable, *arguments)
        self.popen = popen(
            [*(command if host is None else host.within(*command))],
            cwd=helpers.ROOT,
            env=variables,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self):
        for line in self.popen.stdout:
            self._new.put(line.rstrip("\n"))
        self._new.put(None)

    def line_with(self, text, seconds=START_SECONDS):
        """The next line that has `text`."""
        deadline = time.monotonic() + seconds
        while True:
            try:
                line = self._new.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise AssertionError(
                    f"no line with {text!r} in {seconds} s: {self.lines}"
                ) from None
            assert line is not None, f"ended without a line with {text!r}: {self.lines}"
            self.lines.append(line)
            if text in line:
                return line

    def send(self, number):
        self.popen.send_signal(number)

    def wait(self, seconds):
        """The exit code, once all output is in `lines`; and the seconds it took."""
        start = time.monotonic()
        code = self.popen.wait(timeout=seconds)
        took = time.monotonic() - start
        self._reader.join(timeout=10.0)
        assert not self._reader.is_alive(), "another process still has the output"
        with contextlib.suppress(queue.Empty):
            while (line := self._new.get_nowait()) is not None:
                self.lines.append(line)
        return code, took

    def descendants(self):
        """Its children and theirs, now."""
        return psutil.Process(self.popen.pid).children(recursive=True)

    @property
    def text(self):
        return "\n".join(self.lines)


def _may_be_warm(arguments, environment):
    """Whether it would import TensorFlow, or start what does, and with nothing special about it."""
    first, *others = arguments
    return (
        sys.platform == "linux"
        and set(environment) <= {"TF_CONFIG"}
        and (first.endswith(".py") or [first, *others[:1]] == ["-m", warm_start.LAUNCH])
    )


@contextlib.contextmanager
def started(*arguments, warm=True, host=None, **environment):
    """A process that does not outlive the test, nor do its children.

    A script, or a launcher's script, has TensorFlow imported as it begins unless `warm` is False.
    """
    process = Process(*arguments, warm=warm, host=host, **environment)
    try:
        yield process
    finally:
        family = []
        with contextlib.suppress(psutil.NoSuchProcess):
            family = process.descendants()
        for each in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
        process.popen.kill()
        process.popen.wait(timeout=10)
        process.popen.stdin.close()
        process._reader.join(timeout=10)
        if not process._reader.is_alive():  # else another process has the pipe, and close waits
            process.popen.stdout.close()


@contextlib.contextmanager
def addresses(count):
    """Free addresses, kept from others as `tf_dsgd.launch` keeps them."""
    with contextlib.ExitStack() as stack:
        found = []
        for _ in range(count):
            held = stack.enter_context(socket.socket())
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            held.bind(("127.0.0.1", 0))
            found.append(f"127.0.0.1:{held.getsockname()[1]}")
        yield found


def tf_config(job, index, **jobs):
    return json.dumps({"cluster": jobs, "task": {"type": job, "index": index}})


def gone(processes, seconds=5.0):
    """Those that still run after `seconds`; a zombie runs no more."""
    _, alive = psutil.wait_procs(processes, timeout=seconds)
    return [p for p in alive if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


def kill(pid):
    os.kill(pid, signal.SIGKILL)
