"""Sums, means and copies of arrays over equal processes that know each other by TF_CONFIG.

The collectives are TensorFlow's own (`CollectiveReduce`, `CollectiveGather`, `CollectiveBcast*`),
in a small graph that a `tf.compat.v1.Session` runs on a `tf.distribute.Server` of this process.
`tf.distribute.MultiWorkerMirroredStrategy` has the same ones, at the same speed, but must be made
before anything else of TensorFlow, and moves all devices of the process to a cluster. A server
and a session of their own can be made at any time, and the training beside them stays as it is.
"""

from __future__ import annotations

import math
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, NoReturn

import numpy as np
import tensorflow as tf

from tf_dsgd import tasks

How = Literal["mean", "sum", "first"]

_GROUP_KEY = 1  # all processes are one group
_CHUNK_BYTES = 8 << 20  # larger tensors travel in parts, side by side: up to twice as fast
_PROBE_SECONDS = 2.0
_GRACE_SECONDS = 10.0  # beyond TensorFlow's own limit of time


class Spec(NamedTuple):
    """An array of an exchange and what becomes of it.

    Args:
        shape: its shape.
        dtype: its NumPy type; numbers or bool.
        how: "mean" (of floating-point arrays) or "sum" over the processes, or that of the "first".
    """

    shape: tuple[int, ...]
    dtype: Any
    how: How


class Group:
    """The processes of TF_CONFIG, as this one sees them.

    Every method is collective: all processes call the same ones in the same order, with arrays of
    the same shapes. `meet` is what finds out whether they do, since it always has the same shape.

    Args:
        cluster: the tasks: workers, and perhaps a chief, which is then the first.
        timeout_seconds: how long a process waits for the others.

    Raises (every method):
        ConnectionError: if a process has ended or cannot be reached; it is named.
        TimeoutError: if the others did not come in time.
    """

    def __init__(self, cluster: tasks.Tasks, timeout_seconds: float):
        self.timeout_seconds = timeout_seconds
        jobs = {job: cluster.jobs.get(job, {}) for job in ("chief", "worker")}
        members = [(job, index) for job, places in jobs.items() for index in places]
        self.names = [cluster.name(*member) for member in members]
        self.size = len(members)
        self.rank = members.index((str(cluster.task_type), cluster.task_index))
        self._cluster = cluster
        self._members = members
        self._session: _Sessions | None = None
        self._programs: dict[Any, _Program] = {}
        self._lost: Exception | None = None

    def meet(self, *numbers: int) -> np.ndarray:
        """Everybody's numbers, an int64 array [processes, numbers], in the processes' order."""
        if self.size == 1:
            return np.array([numbers], np.int64)
        mine = np.array([self.rank, *numbers], np.int64)  # gathered in an order of TensorFlow's
        program = self._program(("gather", len(mine)), lambda make: make.gather(len(mine)))
        (rows,) = program.run([mine])
        rows = rows.reshape(self.size, len(mine))
        return rows[np.argsort(rows[:, 0])][:, 1:]

    def texts(self, text: str) -> list[str]:
        """Everybody's text."""
        data = text.encode()
        sizes = self.meet(len(data))[:, 0]
        padded = np.frombuffer(data.ljust(-(-int(sizes.max() + 1) // 8) * 8, b"\0"), np.int64)
        rows = self.meet(*padded.tolist())
        return [row.tobytes()[:size].decode() for row, size in zip(rows, sizes, strict=True)]

    def broadcast(self, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        """The arrays of the first process, bit for bit, whatever their types."""
        if self.size == 1 or not arrays:
            return list(arrays)
        mine = [np.asarray(array, order="C") for array in arrays]
        ends = np.cumsum([array.nbytes for array in mine])
        data = np.zeros(-(-int(ends[-1]) // 8) * 8, np.uint8)
        for array, end in zip(mine, ends, strict=True):
            data[end - array.nbytes : end] = array.reshape(-1).view(np.uint8)
        words = data.view(np.int64)
        parts = _parts(len(words), 8)
        sizes = [stop - start for start, stop in parts]
        program = self._program(("broadcast", len(words)), lambda make: make.broadcast(sizes))
        feeds = [words[start:stop] for start, stop in parts] if self.rank == 0 else []
        received = np.concatenate(program.run(feeds)).view(np.uint8)
        return [
            received[end - array.nbytes : end].view(array.dtype).reshape(array.shape)
            for array, end in zip(mine, ends, strict=True)
        ]

    def exchange(self, specs: Sequence[Spec]) -> Exchange:
        """A function of such arrays, to be kept and called again and again."""
        return Exchange(self, specs)

    # -- inside -----------------------------------------------------------------------------

    def _program(self, key: Any, build: Callable[[_Maker], _Wires]) -> _Program:
        """Collectives that are built once. All processes build theirs in the same order."""
        if self._lost is not None:
            raise self._lost
        key = (key, self.timeout_seconds)
        if key not in self._programs:
            self._programs[key] = _Program(self, build)
        return self._programs[key]

    def _sessions(self) -> _Sessions:
        """The server of this process, once all others have theirs."""
        if self._session is None:
            self._session = _Sessions(self._cluster)
            self._await_servers()
        return self._session

    def _address(self, rank: int) -> str:
        job, index = self._members[rank]
        return self._cluster.jobs[job][index]

    def _silent(self, seconds: float) -> list[int]:
        others = [rank for rank in range(self.size) if rank != self.rank]
        return [rank for rank in others if not tasks.reachable(self._address(rank), seconds)]

    def _await_servers(self) -> None:
        deadline = time.monotonic() + self.timeout_seconds
        absent = self._silent(_PROBE_SECONDS)
        while absent:
            if time.monotonic() > deadline:
                self._fail(
                    TimeoutError(
                        f"{_and(self.names[rank] for rank in absent)} did not begin within "
                        f"timeout_seconds={self.timeout_seconds:g}, and {self._me} waits. Start "
                        "all processes of TF_CONFIG, each with its own task, or raise the time."
                    )
                )
            time.sleep(0.05)  # nothing tells when a port opens
            address = [rank for rank in absent if not tasks.reachable(self._address(rank), 1.0)]
            absent = address

    @property
    def _me(self) -> str:
        return f"this process ({self.names[self.rank]})"

    def _fail(self, error: Exception, cause: Exception | None = None) -> NoReturn:
        """Raises it, now and whenever the group is used again."""
        self._lost = error
        raise error from cause

    def _explain(self, error: Exception) -> NoReturn:
        """Raises what went wrong in words, with the names of the processes that do not answer."""
        silent = self._silent(_PROBE_SECONDS)
        after = (
            "The processes train one model together, so all must be started again; "
            "keras.callbacks.BackupAndRestore lets them go on from their last epoch."
        )
        if silent:
            who = _and(self.names[rank] for rank in silent)
            message = f"{who} ended or cannot be reached, while {self._me} waited. "
            self._fail(ConnectionError(message + after), error)
        if isinstance(error, (tf.errors.DeadlineExceededError, TimeoutError)):
            others = [name for rank, name in enumerate(self.names) if rank != self.rank]
            message = (
                f"{self._me.capitalize()} waited {self.timeout_seconds:g} s, and "
                f"{'one of ' if len(others) > 1 else ''}{_and(others)} did not come, though "
                f"{'all answer' if len(others) > 1 else 'it answers'}: stopped, busy, or doing "
                "something else. If that is right, as when one writes a large file, give all "
                "of them a timeout_seconds above it. "
            )
            self._fail(TimeoutError(message + after), error)
        reason = getattr(error, "message", str(error)).split("\n")[0]
        message = f"The connection of {self._me} broke while it waited: {reason} "
        self._fail(ConnectionError(message + after), error)


class Exchange:
    """Sums and means of arrays of fixed shapes.

    Arrays of a kind travel joined, in parts of 8 MB side by side. Means of types of less than 32
    bits are computed in float32. All processes get the same bits.

    Args:
        group: the processes.
        specs: the arrays, equal in all processes.
    """

    def __init__(self, group: Group, specs: Sequence[Spec]):
        self._group = group
        self._specs = list(specs)
        self._lanes: dict[tuple[str, str], _Lane] = {}
        self._places = [self._place(spec) for spec in self._specs]
        self._parts = [part for lane in self._lanes.values() for part in lane.make()]
        self._key = ("exchange", tuple(self._specs))

    def __call__(self, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        """The results, in memory that the next call uses again.

        Args:
            arrays: one for each spec.
        """
        if self._group.size == 1 or not self._specs:
            return [np.asarray(array) for array in arrays]
        for array, spec, (lane, start) in zip(arrays, self._specs, self._places, strict=True):
            mine = spec.how != "first" or self._group.rank == 0
            target = lane.sent[start : start + math.prod(spec.shape)]
            target[:] = np.asarray(array).reshape(-1) if mine else 0
        program = self._group._program(self._key, lambda make: make.reduce(self._parts))
        feeds = [lane.sent[start:stop] for lane, start, stop in self._parts]
        for (lane, start, stop), result in zip(self._parts, program.run(feeds), strict=True):
            lane.received[start:stop] = result
        return [
            lane.received[start : start + math.prod(spec.shape)]
            .reshape(spec.shape)
            .astype(spec.dtype, copy=False)
            for spec, (lane, start) in zip(self._specs, self._places, strict=True)
        ]

    def _place(self, spec: Spec) -> tuple[_Lane, int]:
        """Where an array stands among those of its kind."""
        dtype = np.dtype(spec.dtype)
        floating = dtype.kind not in "biu"  # NumPy calls bfloat16 "V"
        if spec.how == "mean" and not floating:
            raise ValueError(f'"mean" is for floating-point arrays. Received: {spec}.')
        kind = ("float64" if dtype == np.float64 else "float32") if floating else "int64"
        final = "Div" if spec.how == "mean" else "Id"
        lane = self._lanes.setdefault((kind, final), _Lane(kind, final))
        start = lane.size
        lane.size += math.prod(spec.shape)
        return lane, start


class _Lane:
    """Arrays of one type and one operation, joined."""

    def __init__(self, dtype: str, final: str):
        self.dtype, self.final, self.size = np.dtype(dtype), final, 0

    def make(self) -> list[tuple[_Lane, int, int]]:
        """The memory, and the parts in which it travels."""
        self.sent = np.zeros(self.size, self.dtype)
        self.received = np.zeros(self.size, self.dtype)
        return [(self, start, stop) for start, stop in _parts(self.size, self.dtype.itemsize)]


class _Wires(NamedTuple):
    """What is fed into a graph and what comes out."""

    inputs: list[Any]
    outputs: list[Any]


class _Maker:
    """Makes collective operations in the open graph; each has a key that all processes know."""

    def __init__(self, group: Group, keys: Callable[[], int]):
        self._rank, self._keys = group.rank, keys
        self._common = {
            "group_size": group.size,
            "group_key": _GROUP_KEY,
            "timeout_seconds": float(group.timeout_seconds),
        }

    def gather(self, size: int) -> _Wires:
        fed = tf.compat.v1.placeholder(tf.int64, [size])
        shape = [size * self._common["group_size"]]
        out = tf.raw_ops.CollectiveGather(
            input=fed, shape=shape, instance_key=self._keys(), **self._common
        )
        return _Wires([fed], [out])

    def broadcast(self, sizes: Sequence[int]) -> _Wires:
        fed, out = [], []
        for size in sizes:
            options = {"shape": [size], "instance_key": self._keys(), **self._common}
            if self._rank == 0:
                fed.append(tf.compat.v1.placeholder(tf.int64, [size]))
                out.append(tf.raw_ops.CollectiveBcastSend(input=fed[-1], **options))
            else:
                out.append(tf.raw_ops.CollectiveBcastRecv(T=tf.int64, **options))
        return _Wires(fed, out)

    def reduce(self, parts: Sequence[tuple[_Lane, int, int]]) -> _Wires:
        fed = [tf.compat.v1.placeholder(lane.dtype, [stop - start]) for lane, start, stop in parts]
        out = [
            tf.raw_ops.CollectiveReduce(
                input=each,
                merge_op="Add",
                final_op=lane.final,
                subdiv_offsets=[0],
                instance_key=self._keys(),
                **self._common,
            )
            for each, (lane, _, _) in zip(fed, parts, strict=True)
        ]
        return _Wires(fed, out)


class _Program:
    """A graph of collectives and its session."""

    def __init__(self, group: Group, build: Callable[[_Maker], _Wires]):
        self._group = group
        sessions = group._sessions()
        graph = tf.Graph()
        with graph.as_default(), tf.device(sessions.device):
            self._wires = build(_Maker(group, sessions.next_key))
        self._session = sessions.open(graph)

    def run(self, feeds: Sequence[np.ndarray]) -> list[np.ndarray]:
        """The outputs. Ctrl-C ends the wait."""
        feed_dict = dict(zip(self._wires.inputs, feeds, strict=True))
        seconds = self._group.timeout_seconds + _GRACE_SECONDS
        try:
            return _call(lambda: self._session.run(self._wires.outputs, feed_dict), seconds)
        except (tf.errors.OpError, TimeoutError) as error:
            self._group._explain(error)


class _Sessions:
    """TensorFlow's server of this process, on its address in TF_CONFIG, and sessions on it."""

    def __init__(self, cluster: tasks.Tasks):
        job, index = str(cluster.task_type), cluster.task_index
        leader = "chief" if cluster.chief is not None else "worker"
        self._config = tf.compat.v1.ConfigProto(device_count={"GPU": 0})
        self._config.experimental.collective_group_leader = f"/job:{leader}/replica:0/task:0"
        # A session would wait for all tasks, and ask all for their devices.
        self._config.device_filters.append(f"/job:{job}/task:{index}")
        self.device = f"/job:{job}/replica:0/task:{index}/device:CPU:0"
        self._keys = 0
        tasks.check_port(cluster)
        self._server = tf.distribute.Server(
            cluster.cluster_spec(), job_name=job, task_index=index, config=self._config
        )

    def open(self, graph: tf.Graph) -> Any:
        return tf.compat.v1.Session(self._server.target, graph=graph, config=self._config)

    def next_key(self) -> int:
        self._keys += 1
        return self._keys


_group: Group | None = None
_work: queue.SimpleQueue[tuple[Callable[[], Any], queue.SimpleQueue[Any]]] | None = None


def group(timeout_seconds: float) -> Group | None:
    """The processes of TF_CONFIG; None where it is not set.

    A process has one group, as it has one address, and the latest `timeout_seconds`.

    Raises:
        ValueError: for whatever is wrong in TF_CONFIG, or if it names another cluster than before.
    """
    global _group
    if not os.environ.get("TF_CONFIG", "").strip():
        return None
    cluster = tasks.from_tf_config(ps=False)
    if _group is None:
        _group = Group(cluster, timeout_seconds)
    elif _group._cluster != cluster:
        raise ValueError(
            "TF_CONFIG has changed, and a process can be in one cluster only. Before: "
            f"{_group._cluster}. Received: {cluster}. Start a new process."
        )
    _group.timeout_seconds = timeout_seconds
    return _group


def _call(function: Callable[[], Any], seconds: float) -> Any:
    """Calls it in a thread of its own, so that the main thread can be interrupted as it waits."""
    global _work
    if _work is None:
        _work = queue.SimpleQueue()
        # Not an executor's, which would be waited for when Python ends.
        threading.Thread(target=_serve, args=(_work,), daemon=True, name="collectives").start()
    done: queue.SimpleQueue[Any] = queue.SimpleQueue()
    _work.put((function, done))
    try:
        result, error = done.get(timeout=seconds)
    except queue.Empty:
        raise TimeoutError(f"no answer of TensorFlow within {seconds:g} s") from None
    if error is not None:
        raise error
    return result


def _serve(work: queue.SimpleQueue[tuple[Callable[[], Any], queue.SimpleQueue[Any]]]) -> None:
    while True:
        function, done = work.get()
        try:
            done.put((function(), None))
        except BaseException as error:
            done.put((None, error))
        del function, done


def _parts(size: int, itemsize: int) -> list[tuple[int, int]]:
    """Where the parts of a long array begin and end."""
    step = _CHUNK_BYTES // itemsize
    return [(start, min(start + step, size)) for start in range(0, size, step)]


def _and(names: Any) -> str:
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last
