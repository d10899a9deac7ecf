"""A task of `Distributor`'s barrier stage: starts one process of the cluster, and watches it.

Travels to the executor by value, as `frames` does. The processes are of their own because
TensorFlow lets one be connected to a single cluster, while Spark uses its Python processes again.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import hashlib
import ipaddress
import itertools
import json
import os
import pickle
import select
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from typing import IO, Any

import numpy as np

from tf_dsgd.launch.tied import TIE
from tf_dsgd.transport import frames

LOOK_SECONDS = 0.2
STOP_SECONDS = 5.0
LEAVE_SECONDS = 30.0
"""For a chief's process to end once it has written what `train` returned."""
LAST_BYTES = 4000
"""Of what a process wrote, in the error that its end is."""
PARENT_FD = "TF_DSGD_PARENT_FD"  # as in tf_dsgd.resuming, which a task need not import


@dataclasses.dataclass(frozen=True)
class Cluster:
    """What all tasks are told."""

    num_workers: int
    num_ps: int
    driver: tuple[str, int]
    token: bytes
    program: list[str]
    """What the chief's Python is to run; the paths of the payload and of the outcome follow it."""
    payload: bytes
    """The function and its arguments, pickled; empty for a script."""
    datasets: list[str]
    """Keys of the data that come with the tasks of workers."""

    def role(self, task: int) -> tuple[str, int]:
        """The chief comes first, then ps tasks, then workers."""
        if task == 0:
            return "chief", 0
        return ("ps", task - 1) if task <= self.num_ps else ("worker", task - 1 - self.num_ps)


def work(cluster: Cluster) -> Callable[[Iterator[Any]], Iterator[bytes]]:
    """What Spark calls with the records that are for this task."""

    def run(records: Iterator[Any]) -> Iterator[bytes]:
        from pyspark import BarrierTaskContext

        context = BarrierTaskContext.get()
        # Python is not told which attempt of the stage this is. Spark numbers the tasks of one in a
        # row, in the order of their partitions.
        attempt = f"{context.stageId()}.{context.taskAttemptId() - context.partitionId()}"
        with (
            Folder(cluster, attempt) as folder,
            socket.socket(socket.AF_INET, socket.SOCK_STREAM) as held,
        ):
            named = context.getTaskInfos()[context.partitionId()].address.rsplit(":", 1)[0]
            # Bound and not listening: nobody else gets the port, and the server may take it.
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            held.bind(("", 0))
            mine = {
                "address": f"{_own_address(cluster.driver, named)}:{held.getsockname()[1]}",
                "places": write(records, cluster.datasets, folder),
            }
            all_of_them = meet(cluster, attempt, context.partitionId(), mine)
            yield from run_process(cluster, context, attempt, all_of_them, folder)

    return run


def _own_address(driver: tuple[str, int], named: str) -> str:
    """The address of this machine that others reach: the one from which it reaches the driver.

    What a machine's own name leads to may be a loopback address, as on Debian. Where the driver is
    at one, all are on one machine.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked, contextlib.suppress(OSError):
        asked.connect(driver)  # sends nothing
        own = str(asked.getsockname()[0])
        if not ipaddress.ip_address(own).is_loopback:
            return own
    return socket.gethostbyname(named)


class Ended(RuntimeError):
    """A process has ended that others need."""


class Folder:
    """Where a task has its files, in an attempt of the stage.

    If its process ends by itself they stay: until Spark ends the other tasks, which is a moment
    later, workers may read these rows for it, and `train` would fail without them. The next attempt
    removes them; after the last one Spark does as it stops, for they are among its own.
    """

    def __init__(self, cluster: Cluster, attempt: str):
        training = hashlib.sha256(cluster.token).hexdigest()[:12]
        self._of_training, self._of_attempt = (
            f"tf_dsgd-{training}-",
            f"tf_dsgd-{training}-{attempt}-",
        )
        self._path = ""

    def __enter__(self) -> str:
        local = os.environ.get("SPARK_LOCAL_DIRS", "").split(",")[0] or tempfile.gettempdir()
        for name in os.listdir(local):
            if name.startswith(self._of_training) and not name.startswith(self._of_attempt):
                shutil.rmtree(os.path.join(local, name), ignore_errors=True)  # so do other tasks
        self._path = tempfile.mkdtemp(prefix=self._of_attempt, dir=local)
        return self._path

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None or not issubclass(kind, Ended):
            shutil.rmtree(self._path, ignore_errors=True)


def write(records: Iterator[Any], keys: list[str], folder: str) -> list[tuple[list[str], int]]:
    """Writes the records of each data set to files, one a partition: (their paths, bytes) of each.

    Spark hands over the pieces of a partition in their order, and partitions in any order. In the
    order of their numbers they are the same data set if the stage is started again.
    """
    sizes: collections.Counter[tuple[str, int]] = collections.Counter()
    for source, pieces in itertools.groupby(records, lambda record: record[1][:2]):
        key, partition = source
        with open(path_of(folder, keys.index(key), partition), "ab") as file:
            for _, (_, _, piece) in pieces:
                sizes[source] += file.write(piece)
    found = []
    for number, key in enumerate(keys):
        there = sorted(partition for name, partition in sizes if name == key)
        paths = [path_of(folder, number, partition) for partition in there]
        found.append((paths, sum(sizes[key, partition] for partition in there)))
    return found


def path_of(folder: str, dataset: int, partition: int) -> str:
    """Where a partition of a data set is."""
    return os.path.join(folder, f"rows-{dataset}-{partition}")


def meet(cluster: Cluster, attempt: str, task: int, mine: dict[str, Any]) -> list[dict[str, Any]]:
    """What each task of this attempt of the stage says of itself, once all have come.

    By way of the driver, and not by Spark's barrier or `allGather`: where a task is to end while
    its Python waits at one, Spark (4.3) has an exception that nobody catches, and ends the whole
    executor with all that is on it.
    """
    asked = {"do": "meet", "attempt": attempt, "task": task}
    text = np.frombuffer(json.dumps(mine).encode(), np.uint8)
    answer = frames.ask_until_done(cluster.driver, cluster.token, asked, [text])
    found: list[dict[str, Any]] = json.loads(answer.arrays[0].tobytes())
    return found


def run_process(
    cluster: Cluster, context: Any, attempt: str, tasks: list[dict[str, Any]], folder: str
) -> Iterator[bytes]:
    """Runs this task's process until training is over; of the chief, gives the outcome."""
    job, index = cluster.role(context.partitionId())
    addresses: dict[str, list[str]] = {}
    for number, task in enumerate(tasks):
        addresses.setdefault(cluster.role(number)[0], []).append(task["address"])
    config = {"cluster": addresses, "task": {"type": job, "index": index}}
    environment = {
        "TF_CONFIG": json.dumps(config),
        "TF_ENABLE_ONEDNN_OPTS": os.environ.get("TF_ENABLE_ONEDNN_OPTS", "1"),
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }
    gpus = context.resources().get("gpu")
    if gpus is not None:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus.addresses)
    outcome = os.path.join(folder, "outcome")
    if job == "chief":
        places = [task["places"] for task in tasks[1 + cluster.num_ps :]]
        if cluster.payload:
            with open(os.path.join(folder, "payload"), "wb") as file:
                pickle.dump((cluster.payload, places), file)
        command = [*cluster.program, *([folder] if cluster.payload else [])]
    else:
        command = ["-m", "tf_dsgd.serve"]
        if job == "worker":
            threads = os.environ.get("TF_DSGD_THREADS", str(context.cpus()))
            environment["TF_DSGD_THREADS"] = threads
    with Child(f"{job} {index}" if job != "chief" else job, command, environment) as child:
        if job != "chief":
            child.watch_until(Waiting(cluster, attempt))
            return
        for number, lines in enumerate(child.lines(outcome)):
            asked = {"do": "log", "attempt": attempt, "number": number}
            data = np.frombuffer(lines, np.uint8)
            frames.ask_until_done(cluster.driver, cluster.token, asked, [data])
        code = child.process.wait(timeout=STOP_SECONDS)
        if not os.path.exists(outcome) and (cluster.payload or code):
            raise RuntimeError(f"The chief of the training has ended with code {code}.{child.last}")
        asked = {"do": "end", "attempt": attempt}
        frames.ask_until_done(cluster.driver, cluster.token, asked)
        if cluster.payload:
            with open(outcome, "rb") as file:
                yield file.read()


class Waiting(threading.Thread):
    """A thread that ends when the chief's task has told the driver that training is over."""

    def __init__(self, cluster: Cluster, attempt: str):
        super().__init__(name="tf_dsgd waiting", daemon=True)
        self._cluster, self._attempt = cluster, attempt
        self.error: Exception | None = None
        self.start()

    def run(self) -> None:
        try:
            asked = {"do": "wait", "attempt": self._attempt}
            frames.ask_until_done(self._cluster.driver, self._cluster.token, asked)
        except Exception as error:  # raised where the process is watched
            self.error = error


class Leaving:
    """Whether a process has ended; one that stays `LEAVE_SECONDS` after its outcome is ended."""

    def __init__(self, process: subprocess.Popen[bytes], outcome: str | None):
        self._process, self._outcome = process, outcome
        self._since: float | None = None

    def has_ended(self) -> bool:
        """Looks now."""
        if self._process.poll() is not None:
            return True
        if self._since is None and self._outcome and os.path.exists(self._outcome):
            self._since = time.monotonic()
        if self._since is not None and time.monotonic() - self._since > LEAVE_SECONDS:
            self._process.kill()
        return False


class Child:
    """A process that ends with this one, whatever ends that.

    Linux kills it then. Elsewhere it watches a pipe from here, unless it is a script.
    """

    def __init__(self, name: str, command: list[str], environment: dict[str, str]):
        self.name = name
        self._written = b""
        lifeline, self._held = os.pipe()
        program = [sys.executable, "-u", *command]
        if sys.platform == "linux":  # a script watches no pipe
            program = [sys.executable, *TIE, str(os.getpid()), *program]
        self.process = subprocess.Popen(
            program,
            env={**os.environ, **environment, PARENT_FD: str(lifeline)},
            pass_fds=(lifeline,),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        os.close(lifeline)

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._held)
        self.process.terminate()
        try:
            self.process.wait(timeout=STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(timeout=STOP_SECONDS)

    @property
    def last(self) -> str:
        """The end of what it wrote, for an error."""
        text = self._written[-LAST_BYTES:].decode(errors="replace").strip()
        return f" Its last words:\n{text}" if text else ""

    def lines(self, outcome: str | None = None) -> Iterator[bytes]:
        """What it writes, as it comes, until it ends.

        Others that it left may write on. It may also write elsewhere: what is read ends before it.
        Once a file `outcome` is there it has `LEAVE_SECONDS` more, then it is ended: threads that
        `train` has left would keep it for ever.
        """
        pipe: IO[bytes] | None = self.process.stdout
        left = Leaving(self.process, outcome)
        while pipe is not None:
            ended = left.has_ended()
            readable, _, _ = select.select([pipe], [], [], 0.0 if ended else LOOK_SECONDS)
            if readable:
                part = os.read(pipe.fileno(), 1 << 16)
                if not part:
                    break
                self._written = (self._written + part)[-LAST_BYTES:]
                yield part
            elif ended:
                break
        if pipe is not None:
            pipe.close()
        while not left.has_ended():
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout=LOOK_SECONDS)

    def watch_until(self, end: Waiting) -> None:
        """Returns when `end` has ended; the process may not do so before.

        Raises:
            Ended: if it does.
        """
        copy = threading.Thread(target=self._copy, daemon=True)
        copy.start()
        while end.is_alive():
            if self.process.poll() is not None:
                copy.join(timeout=STOP_SECONDS)
                raise Ended(
                    f"{self.name} of the training has ended with code {self.process.returncode}."
                    f"{self.last}"
                )
            end.join(timeout=LOOK_SECONDS)
        if end.error is not None:
            raise end.error

    def _copy(self) -> None:
        for line in self.process.stdout or ():
            self._written = (self._written + line)[-LAST_BYTES:]
            sys.stderr.write(f"[{self.name}] {line.decode(errors='replace')}")
            sys.stderr.flush()
