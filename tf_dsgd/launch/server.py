"""One worker or ps task of a TensorFlow cluster: `python -m tf_dsgd.serve`, with TF_CONFIG set.

The process serves until it is told to end (SIGTERM or SIGINT, exit code 0), one chief after
another. Environment variables beside TF_CONFIG:

    TF_DSGD_THREADS     threads within an operation (intra-op); by default one per core
    TF_DSGD_LISTEN      "everywhere": on all interfaces, not at the task's address alone
    TF_DSGD_PARENT_FD   set by tf_dsgd.launch: the process ends when this pipe closes
"""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
from typing import Any, NoReturn

import numpy as np

from tf_dsgd import _tf_server, _version
from tf_dsgd.resuming import PARENT_FD, THREADS
from tf_dsgd.transport import channels, cluster_spec, listening

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
TOLD_MS = 1000.0  # until the launcher, which was told at the same time, has said so
LOOK_MS = 500.0  # whether a launcher that has said so has ended: macOS waits for nothing less


def serve(which: cluster_spec.Tasks) -> NoReturn:
    """Serves this process's task until SIGTERM or SIGINT, then exits the process with code 0.

    Use it in a script of your own that every task of a cluster starts; `python -m tf_dsgd.serve` is
    the same as a program. TensorFlow's server is open to whoever reaches its port, and runs what it
    is sent: it belongs on a private network. On Linux it takes connections at the address that
    the cluster spec gives it, if this machine has that address, and at no other.

    Args:
        which: the cluster, and the worker or ps task of it that this process is.

    Raises:
        ValueError: if this process is no worker or ps task, or TF_DSGD_THREADS or TF_DSGD_LISTEN is
            wrong.
        OSError: if the port of the task's address is in use.
        RuntimeError: if called outside the main thread, which alone may handle signals.
    """
    if which.task_type not in ("worker", "ps"):
        raise ValueError(
            f"This task is {which.me}, and only worker and ps tasks serve. Run the training script "
            'itself as the chief: "python train.py".'
        )
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError("A task must be served from the main thread, which handles signals.")
    _threads(), listening.everywhere()  # whether they are right
    number = max(which.jobs[which.task_type]) + 1  # tasks before the last may be left out
    place = which.me.replace(" at ", f" of {number} at ")
    with _Signals() as told_to_end:
        said = f"tf_dsgd {_version.__version__}: {place} (pid {os.getpid()})"
        print(said, file=sys.stderr, flush=True)
        server = _start(which)
        told_to_end.wait()
        _exit_now(server)


def _exit_now(server: Any) -> NoReturn:
    """Ends the process without destroying the server, which may wait for a chief or abort."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


class _Signals:
    """Waits for SIGINT, SIGTERM or the end of the launcher, whatever other threads do.

    A launcher that was told to end says so by a byte in its pipe, and lets its script save. Who
    told it may have told this process, too, as Slurm tells all of a job: its end counts then.

    The handler itself would run only when the main thread runs Python code; the wake-up pipe ends a
    `select` at once.
    """

    def __init__(self) -> None:
        self._former: dict[int, Any] = {}

    def __enter__(self) -> _Signals:
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        for number in _SIGNALS:
            self._former[number] = signal.signal(number, lambda *_: None)
        for number in (signal.SIGUSR1, signal.SIGUSR2):  # for the script
            self._former[number] = signal.signal(number, signal.SIG_IGN)
        signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        return self

    def __exit__(self, *_: Any) -> None:
        signal.set_wakeup_fd(-1)
        for number, handler in self._former.items():
            signal.signal(number, handler)
        os.close(self._read)
        os.close(self._write)

    def wait(self) -> None:
        parent = int(os.environ.get(PARENT_FD) or -1)
        ends, launcher = select.poll(), select.poll()
        ends.register(self._read, select.POLLIN)
        if parent >= 0:
            ends.register(parent, select.POLLIN)
            launcher.register(parent, select.POLLIN)
        told = False  # the launcher was: there is something in the pipe, until it ends
        while True:
            found = dict(ends.poll(LOOK_MS if told else None))
            said = dict(launcher.poll(0)).get(parent, 0)
            if said & ~select.POLLIN:
                return
            if said and not told:
                told = True
                ends.unregister(parent)
            if self._read not in found or not set(os.read(self._read, 64)) & set(_SIGNALS):
                continue
            if not (told or (parent >= 0 and launcher.poll(TOLD_MS))):
                return


def _start(which: cluster_spec.Tasks) -> Any:
    """The running server, which answers with its version."""
    channels.of_a_server()
    if which.task_type == "ps":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    else:
        os.environ.setdefault("TF_FORCE_GPU_ALLOW_GROWTH", "true")
    cluster_spec.check_port(which)
    doubts = cluster_spec.doubts_about_own_host(which)
    if doubts:
        print(f"tf_dsgd: {doubts}", file=sys.stderr, flush=True)
    _tf_server.answer_remotely(cluster_spec.VERSION_TOKEN, _answer)
    job, index = str(which.task_type), which.task_index
    try:
        server = _tf_server.start(which.jobs, job, index, _threads(), gpus=job == "worker")
    except RuntimeError as error:
        cluster_spec.check_port(which)
        raise OSError(f"{which.me} could not start: {error}.") from None
    listening.keep_to(which.own_address)
    return server


def _answer() -> np.ndarray:
    return np.array(_version.__version__.encode())


def _threads() -> int:
    """TF_DSGD_THREADS; 0 is TensorFlow's default."""
    text = os.environ.get(THREADS) or "0"
    if not (text.isascii() and text.isdigit() and len(text) < 6 and int(text) < 1 << 16):
        raise ValueError(
            f"{THREADS} must be a number of threads from 1 to 65535, or 0 for one per core. "
            f"Received: {text!r}."
        )
    return int(text)


def main() -> NoReturn:
    """The program: TF_CONFIG says which task."""
    if len(sys.argv) > 1:
        print(f"{(__doc__ or '').strip()}\n\nIt takes no arguments.", file=sys.stderr)
        sys.exit(0 if sys.argv[1] in ("-h", "--help") else 2)
    try:
        serve(cluster_spec.from_tf_config())
    except (ValueError, OSError) as error:
        print(f"tf_dsgd.serve: {error}", file=sys.stderr)
        sys.exit(1)
