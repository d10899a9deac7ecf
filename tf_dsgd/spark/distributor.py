"""Runs a training script or function as a cluster of Spark's tasks."""

from __future__ import annotations

import codecs
import collections
import contextlib
import json
import math
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from pyspark import cloudpickle

from tf_dsgd.checks import called, integer, positive_int, truth
from tf_dsgd.launch.launcher import AGAIN_SECONDS, INTERRUPT_SECONDS, STOP_SECONDS
from tf_dsgd.launch.tied import TIE_GENTLY
from tf_dsgd.spark import barrier_task, rows_task
from tf_dsgd.spark.partitions import Partitions, within
from tf_dsgd.spark.session import driver, jobs, session, slots
from tf_dsgd.transport import frames
from tf_dsgd.transport.answering import Server

cloudpickle.register_pickle_by_value(barrier_task)
cloudpickle.register_pickle_by_value(frames)

_APART_SECONDS = 60.0
_CHIEF = ["-m", "tf_dsgd.spark.chief"]


@called(examples={"num_workers": "2"})
class Distributor:
    """Trains on Spark's executors: a chief, ps tasks and workers, in one barrier stage.

    Use it where the machines, or the data, are Spark's. `run` starts `num_workers + num_ps + 1`
    tasks at once, each of which starts a process: the chief, which calls `train`, and the servers
    of `python -m tf_dsgd.serve`. TF_CONFIG is set, so `tf_dsgd.DownpourStrategy()` in `train` uses
    them. What the chief writes appears in the driver as it comes.

    The chief is a task, and no part of the driver, for TensorFlow lets a process connect to one
    cluster only: a notebook could run once. It is lost and started again with the others.

    When a task is lost Spark ends all of them, and starts the stage again, up to
    `spark.stage.maxConsecutiveAttempts` times; `train` then begins anew. With
    `tf_dsgd.callbacks.BackupAndRestore` on a folder that all machines have, it goes on from its
    last checkpoint. An error that `train` itself raises ends all tasks at once, and is raised by
    `run`.

    Args:
        num_workers: workers, at least 1.
        num_ps: ps tasks, at least 0, which `tf_dsgd.PeriodicAveragingStrategy` allows.
        local_mode: whether to start all processes on the driver's machine, by
            `tf_dsgd.launch`, without a Spark job.

    Raises:
        ValueError: for a wrong number.

    Example:

    >>> tf_dsgd.spark.Distributor(2)
    Distributor(num_workers=2, num_ps=1, local_mode=False)
    >>> tf_dsgd.spark.Distributor(2).run(train, "gs://bucket/data")  # doctest: +SKIP
    """

    def __init__(self, num_workers: int, num_ps: int = 1, *, local_mode: bool = False):
        self.num_workers = positive_int("num_workers", num_workers)
        self.num_ps = integer("num_ps", num_ps, 0)
        self.local_mode = truth("local_mode", local_mode)

    def __repr__(self) -> str:
        return (
            f"Distributor(num_workers={self.num_workers}, num_ps={self.num_ps}, "
            f"local_mode={self.local_mode})"
        )

    def run(self, train: Callable[..., Any] | str | os.PathLike[str], *args: Any) -> Any:
        """Trains.

        Args:
            train: a function, or the path of a script, which all machines must have.
            args: the function's arguments, which may be `tf_dsgd.spark.partitions`, or lists,
                tuples or dicts of such; or the script's, each written as text.

        Returns:
            What the function returned; None of a script. It is pickled: return a history or
            arrays, and save a model to a file.

        Raises:
            RuntimeError: without Java; in a session of Spark Connect; in local mode if a script
                fails. On Spark that is a lost task.
            ValueError: if Spark has fewer slots than there are tasks, or data are given that nobody
                could read.
            Exception: what the function raised. A task that is lost for good comes as Spark's
                error, with that task's last words.
        """
        script = isinstance(train, (str, os.PathLike))
        if not script and not callable(train):
            raise TypeError(f"train must be a function or a script's path. Received: {train!r}.")
        datasets = list({data.key: data for data in within(args)}.values())
        if datasets and (script or self.local_mode):
            raise ValueError(
                "tf_dsgd.spark.partitions needs a function and local_mode=False: the rows go to "
                "tasks of Spark."
            )
        if script and not os.path.isfile(train):  # type: ignore[arg-type]
            raise ValueError(f"There is no script here at {os.fspath(train)!r}.")  # type: ignore[arg-type]
        if script:
            program, payload = [os.fspath(train), *map(str, args)], b""  # type: ignore[arg-type]
        else:
            keys = [data.key for data in datasets]
            program, payload = _CHIEF, bytes(cloudpickle.dumps((train, args, keys)))
        outcome = (
            self._run_here(program, payload)
            if self.local_mode
            else self._run_on_spark(program, payload, datasets)
        )
        return None if script else _result(outcome)

    def _run_here(self, program: Sequence[str], payload: bytes) -> bytes:
        with tempfile.TemporaryDirectory(prefix="tf_dsgd-") as name:
            folder = Path(name)
            if payload:
                (folder / "payload").write_bytes(pickle.dumps((payload, [])))
            counts = ["--workers", str(self.num_workers), "--ps", str(self.num_ps)]
            command = [sys.executable, "-m", "tf_dsgd.launch", *counts, *program]
            path = os.pathsep.join(path for path in sys.path if path)
            code = _launched([*command, *([name] if payload else [])], path)
            outcome = folder / "outcome"
            if code or (payload and not outcome.exists()):
                raise RuntimeError(f"The training has ended with code {code}. See what it wrote.")
            return outcome.read_bytes() if payload else b""

    def _run_on_spark(
        self, program: list[str], payload: bytes, datasets: Sequence[Partitions]
    ) -> bytes:
        context = session().sparkContext
        count = 1 + self.num_ps + self.num_workers
        there = slots(context)
        if there is not None and there < count:
            raise ValueError(
                f"{self} takes {count} slots of Spark, one for the chief, and {context.master} has "
                f"{there}. Use local[{count}], or fewer workers."
            )
        training = _Training(count)
        with (
            Server(**driver(context), answer=training.answer) as server,  # type: ignore[arg-type]
            contextlib.closing(training),
            jobs(context),
        ):
            cluster = barrier_task.Cluster(
                self.num_workers,
                self.num_ps,
                server.address,
                server.token,
                program,
                payload,
                [data.key for data in datasets],
            )
            found = self._rows(context, count, datasets)
            outcomes = found.barrier().mapPartitions(barrier_task.work(cluster))
            # Of barrier stages Spark starts only those again that a shuffle follows.
            outcomes = outcomes.coalesce(1, shuffle=True).collect()
        return bytes(outcomes[0]) if outcomes else b""

    def _rows(self, context: Any, count: int, datasets: Sequence[Partitions]) -> Any:
        """An RDD with a partition for each task, which holds that task's records."""
        if not datasets:
            return context.parallelize([], count)
        records: list[Any] = []
        for data in datasets:
            before = sum(other.getNumPartitions() for other in records)
            records.append(data.records(count - self.num_workers, self.num_workers, before))
        return context.union(records).partitionBy(count, rows_task.itself)


def _launched(command: Sequence[str], path: str) -> int:
    """Runs the launcher to its end, and gives its code; path: where Python looks for modules.

    Ctrl-C goes to this process alone, from a terminal or a notebook, and from here to the launcher,
    which gives the script its time. Should this process end, the launcher ends all, too.
    """
    if sys.platform == "linux":
        command = [sys.executable, *TIE_GENTLY, str(os.getpid()), *command]
    launcher = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": path}, process_group=0)
    try:
        return launcher.wait()
    except BaseException as error:  # or of a handler of SIGTERM, SystemExit
        interrupted = isinstance(error, KeyboardInterrupt)
        launcher.send_signal(signal.SIGINT if interrupted else signal.SIGTERM)
        _await_end(launcher)
        raise
    finally:
        if launcher.poll() is None:
            launcher.kill()
            launcher.wait(STOP_SECONDS)


def _await_end(launcher: subprocess.Popen[bytes]) -> None:
    """Gives it the time that it gives the script, or until a second Ctrl-C."""
    told = time.monotonic()
    until = told + INTERRUPT_SECONDS + 2 * STOP_SECONDS
    while launcher.poll() is None:
        try:
            launcher.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            return
        except KeyboardInterrupt:
            if time.monotonic() - told > AGAIN_SECONDS:
                return


class _Training:
    """What tasks tell the driver: where they are, what the chief wrote, and that training is over.

    An attempt of the stage has a name, by which its tasks know each other.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._changed = threading.Condition()
        self._come: dict[str, dict[int, Any]] = collections.defaultdict(dict)
        """Of each attempt, what each of its tasks said as it came."""
        self._asked: dict[int, float] = {}
        """When each task, of whichever attempt, asked for the others last."""
        self._apart_since = math.inf
        """When all tasks were first there, and not of one attempt."""
        self._ended: set[str] = set()
        self._closed = False
        self._log = _Log()

    def answer(
        self, header: dict[str, Any], arrays: list[np.ndarray]
    ) -> tuple[dict[str, Any], list[Any]]:
        """The server's answer."""
        if header["do"] == "log":
            return {"done": self._log.add(header, arrays[0].tobytes())}, []
        if header["do"] == "meet":
            return self._meet(header, json.loads(arrays[0].tobytes()))
        with self._changed:
            if header["do"] == "end":
                self._ended.add(header["attempt"])
                self._changed.notify_all()
            else:
                self._wait(lambda: header["attempt"] in self._ended, header)
            return {"done": header["attempt"] in self._ended}, []

    def _meet(self, header: dict[str, Any], said: Any) -> tuple[dict[str, Any], list[Any]]:
        with self._changed:
            come = self._come[header["attempt"]]
            come[header["task"]] = said
            self._asked[header["task"]] = time.monotonic()
            self._changed.notify_all()
            self._wait(lambda: len(come) == self._count, header)
            if len(come) < self._count:
                self._check_attempts(header["seconds"])
                return {"done": False}, []
            everybody = json.dumps([come[task] for task in range(self._count)]).encode()
        return {"done": True}, [np.frombuffer(everybody, np.uint8)]

    def _check_attempts(self, seconds: float) -> None:
        """Tasks that all ask and do not meet would wait without end.

        Those of an attempt that was given up ask until they are ended, which is soon.
        """
        now = time.monotonic()
        asking = sum(now - asked < 2 * seconds for asked in self._asked.values())
        if asking < self._count:
            self._apart_since = math.inf
            return
        self._apart_since = min(self._apart_since, now)
        if now - self._apart_since > _APART_SECONDS:
            raise RuntimeError(
                "The tasks of the barrier stage cannot tell that they are of one attempt: "
                f"{sorted((attempt, sorted(come)) for attempt, come in self._come.items())}. This "
                "version of Spark numbers them in another way than 4.3 does."
            )

    def _wait(self, condition: Callable[[], bool], header: dict[str, Any]) -> None:
        self._changed.wait_for(lambda: self._closed or condition(), header["seconds"])

    def close(self) -> None:
        """Nobody waits any more."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()


class _Log:
    """Shows what the chief writes: each piece once, in their order, and no character in halves."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._decoders: dict[str, codecs.IncrementalDecoder] = {}
        """Of each attempt: it keeps the begin of a character whose end is in the next piece."""
        self._shown: dict[str, int] = {}
        """The number of the last piece of each attempt."""

    def add(self, header: dict[str, Any], piece: bytes) -> bool:
        """Whether the piece is shown; if not, whoever reads the driver's output is at another."""
        attempt, number = header["attempt"], header["number"]
        if not self._mutex.acquire(timeout=header["seconds"]):
            return False
        try:
            if number > self._shown.get(attempt, -1):
                decoder = self._decoders.setdefault(attempt, _utf8("replace"))
                _write(decoder.decode(piece))
                self._shown[attempt] = number
        finally:
            self._mutex.release()
        return True


_utf8 = codecs.getincrementaldecoder("utf-8")


def _write(text: str) -> None:
    """Shows it, as far as it can be shown: that it cannot ends no training."""
    there = sys.stdout
    if there is None:  # Python's own for a process without any
        return
    with contextlib.suppress(OSError, ValueError):  # as of one that is closed
        try:
            there.write(text)
        except UnicodeEncodeError as error:
            there.write(text.encode(error.encoding, "replace").decode(error.encoding))
        there.flush()


def _result(outcome: bytes) -> Any:
    succeeded, value = pickle.loads(outcome)
    if not succeeded:
        raise value
    return value
