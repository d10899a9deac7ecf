"""Equal processes that know each other by TF_CONFIG: meeting, and copying the first one's arrays.

The collectives are TensorFlow's own (`CollectiveGather`, `CollectiveBcast*`), in a small graph that
a `tf.compat.v1.Session` runs on a `tf.distribute.Server` of this process.
`tf.distribute.MultiWorkerMirroredStrategy` has the same ones, but must be made before anything else
of TensorFlow, and moves all devices of the process to a cluster. A server and a session of their
own can be made at any time, and the training beside them stays as it is.

Sums and means are in `tf_dsgd.spmd.exchange`.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import numpy as np
import tensorflow as tf

from tf_dsgd import _tf_errors, resuming
from tf_dsgd.console import before_training, end_scripts_in_a_line
from tf_dsgd.transport import cluster_spec, listening, probing

_GROUP_KEY = 1  # all processes are one group
_CHUNK_BYTES = 8 << 20  # larger tensors are copied in parts, side by side: up to twice as fast
_PROBE_SECONDS = 2.0
_ENDING_SECONDS = 5.0
_GRACE_SECONDS = 10.0  # beyond TensorFlow's own limit of time


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

    def __init__(self, cluster: cluster_spec.Tasks, timeout_seconds: float):
        self.timeout_seconds = timeout_seconds
        jobs = {job: cluster.jobs.get(job, {}) for job in ("chief", "worker")}
        members = [(job, index) for job, places in jobs.items() for index in places]
        self.names = [cluster.name(*member) for member in members]
        self.size = len(members)
        self.rank = members.index((str(cluster.task_type), cluster.task_index))
        self.cluster = cluster
        self._members = members
        self._session: _Sessions | None = None
        self._programs: dict[Any, Program] = {}
        self._keys = 0
        self.made: dict[Any, Any] = {}
        """What is kept as long as the group, such as `tf_dsgd.spmd.exchange.Exchange`s."""
        self._lost: Exception | None = None

    def meet(self, *numbers: int) -> np.ndarray:
        """Everybody's numbers, an int64 array [processes, numbers], in the processes' order."""
        if self.size == 1:
            return np.array([numbers], np.int64)
        mine = np.array([self.rank, *numbers], np.int64)  # gathered in an order of TensorFlow's
        program = self.program(("gather", len(mine)), lambda: self._gather(len(mine)))
        fed, gathered = program.wires
        rows = program.run(gathered, {fed: mine})
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
        program = self.program(("broadcast", len(words)), lambda: self._broadcast(sizes))
        fed, copied = program.wires
        feeds = {each: words[start:stop] for each, (start, stop) in zip(fed, parts, strict=False)}
        received = np.concatenate(program.run(copied, feeds)).view(np.uint8)
        return [
            received[end - array.nbytes : end].view(array.dtype).reshape(array.shape)
            for array, end in zip(mine, ends, strict=True)
        ]

    # -- for what is built on it --------------------------------------------------------------

    def program(self, key: Any, build: Callable[[], Any], *, alone: bool = True) -> Program:
        """A graph that is built once.

        Args:
            key: equal keys are for equal graphs.
            build: adds operations to the open graph, on this process's device, and returns them. If
                it takes keys, all processes must build their graphs in the same order.
            alone: whether no operation is on another process's device.
        """
        if self._lost is not None:
            raise self._lost
        key = (key, self.timeout_seconds)
        if key not in self._programs:
            self._programs[key] = Program(self, build, alone)
        return self._programs[key]

    def next_key(self) -> int:
        """A number that no collective operation has yet, equal in all processes."""
        self._keys += 1
        return self._keys

    def device(self, rank: int) -> str:
        """A process's processor, as TensorFlow calls it."""
        job, index = self._members[rank]
        return f"/job:{job}/replica:0/task:{index}/device:CPU:0"

    def sessions(self) -> _Sessions:
        """The server of this process, once all others have theirs."""
        if self._session is None:
            self._session = _Sessions(self.cluster)
            self._await_servers()
        return self._session

    def explain(self, error: Exception) -> NoReturn:
        """Raises what went wrong in words, with the names of the processes that do not answer."""
        late = isinstance(error, (tf.errors.DeadlineExceededError, TimeoutError))
        silent = self._silent(_PROBE_SECONDS)
        deadline = time.monotonic() + _ENDING_SECONDS
        while not (silent or late) and time.monotonic() < deadline:
            # A process that ends may have its port for longer than its connections.
            time.sleep(0.05)
            silent = self._silent(_PROBE_SECONDS)
        after = (
            "The processes train one model together, so all must be started again; "
            "keras.callbacks.BackupAndRestore lets them go on from their last epoch."
        )
        if silent:
            who = _and(self.names[rank] for rank in silent)
            message = f"{who} ended or cannot be reached, while {self._me} waited. "
            self._fail(ConnectionError(message + after), error)
        if late:
            message = (
                f"{self._me.capitalize()} waited {self.timeout_seconds:g} s, and {self._late()} "
            )
            self._fail(TimeoutError(message + after), error)
        reason = _tf_errors.reason_of(error)
        message = f"The connection of {self._me} broke while it waited: {reason} "
        self._fail(ConnectionError(message + after), error)

    # -- inside -----------------------------------------------------------------------------

    def _gather(self, size: int) -> tuple[Any, Any]:
        fed = tf.compat.v1.placeholder(tf.int64, [size])
        shape = [size * self.size]
        return fed, tf.raw_ops.CollectiveGather(input=fed, shape=shape, **self._common())

    def _broadcast(self, sizes: Sequence[int]) -> tuple[list[Any], list[Any]]:
        if self.rank > 0:
            receive = tf.raw_ops.CollectiveBcastRecv
            return [], [receive(T=tf.int64, shape=[size], **self._common()) for size in sizes]
        fed = [tf.compat.v1.placeholder(tf.int64, [size]) for size in sizes]
        send = tf.raw_ops.CollectiveBcastSend
        return fed, [send(input=x, shape=x.shape, **self._common()) for x in fed]

    def _common(self) -> dict[str, Any]:
        """What all collective operations are told, with a key that all processes know."""
        return {
            "group_size": self.size,
            "group_key": _GROUP_KEY,
            "instance_key": self.next_key(),
            "timeout_seconds": float(self.timeout_seconds),
        }

    def _address(self, rank: int) -> str:
        job, index = self._members[rank]
        return self.cluster.jobs[job][index]

    def _silent(self, seconds: float) -> list[int]:
        others = [rank for rank in range(self.size) if rank != self.rank]
        return [rank for rank in others if not probing.reachable(self._address(rank), seconds)]

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
            absent = [rank for rank in absent if not probing.reachable(self._address(rank), 1.0)]

    @property
    def _me(self) -> str:
        return f"this process ({self.names[self.rank]})"

    def _fail(self, error: Exception, cause: Exception | None = None) -> NoReturn:
        """Raises it, now and whenever the group is used again."""
        self._lost = error
        error.add_note(resuming.ENDS_TRAINING)
        raise error from cause

    def _late(self) -> str:
        """Who did not come, though its port is open."""
        others = [rank for rank in range(self.size) if rank != self.rank]
        silent = probing.not_answering(map(self._address, others), _PROBE_SECONDS)
        stopped = [self.names[rank] for rank in others if self._address(rank) in silent]
        if stopped:
            plural = len(stopped) > 1
            return (
                f"{_and(stopped)} did not come and {'do' if plural else 'does'} not answer: "
                f"{'they are' if plural else 'it is'} stopped, or cannot be reached."
            )
        plural = len(others) > 1
        return (
            f"{'one of ' if plural else ''}{_and(self.names[rank] for rank in others)} did not "
            f"come, though {'all answer' if plural else 'it answers'}: it is busy, or does "
            "something else. If that is right, as when one writes a large file, give all of them "
            "a timeout_seconds above it."
        )


class Program:
    """A graph on TensorFlow's servers, and its session.

    Attributes:
        wires: what `build` returned.
    """

    def __init__(self, group: Group, build: Callable[[], Any], alone: bool):
        self._group = group
        sessions = group.sessions()
        graph = tf.Graph()
        with graph.as_default(), tf.device(group.device(group.rank)):
            self.wires = build()
        self._session = sessions.open(graph, alone)

    def run(self, fetches: Any, feeds: dict[Any, np.ndarray]) -> Any:
        """Runs it, as long as the group may wait. Ctrl-C ends the wait.

        Raises:
            ConnectionError, TimeoutError: if a process is lost.
        """
        seconds = self._group.timeout_seconds
        options = tf.compat.v1.RunOptions(timeout_in_ms=int(1e3 * (seconds + _GRACE_SECONDS)))
        try:
            return _call(
                lambda: self._session.run(fetches, feeds, options), seconds + 2 * _GRACE_SECONDS
            )
        except (tf.errors.OpError, TimeoutError) as error:
            self._group.explain(error)


class _Sessions:
    """TensorFlow's server of this process, on its address in TF_CONFIG, and sessions on it."""

    def __init__(self, cluster: cluster_spec.Tasks):
        job, index = str(cluster.task_type), cluster.task_index
        leader = "chief" if cluster.chief is not None else "worker"
        self._config = tf.compat.v1.ConfigProto(device_count={"GPU": 0})
        self._config.experimental.collective_group_leader = f"/job:{leader}/replica:0/task:0"
        # A session would connect to all tasks, at their pace, and ask all for their devices.
        self._alone = tf.compat.v1.ConfigProto()
        self._alone.CopyFrom(self._config)
        self._alone.device_filters.append(f"/job:{job}/task:{index}")
        os.environ.setdefault("GRPC_FAIL_FAST", "use_caller")  # or a lost task is waited for
        cluster_spec.check_port(cluster)
        self._server = tf.distribute.Server(
            cluster.cluster_spec(), job_name=job, task_index=index, config=self._config
        )
        listening.keep_to(cluster.own_address)

    def open(self, graph: tf.Graph, alone: bool) -> Any:
        config = self._alone if alone else self._config
        return tf.compat.v1.Session(self._server.target, graph=graph, config=config)


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
    with before_training():
        listening.everywhere()  # whether it is right, before a server is started
        cluster = cluster_spec.from_tf_config(ps=False)
    if _group is None:
        _group = Group(cluster, timeout_seconds)
        # One Ctrl-C ends all processes: the first one says so for all.
        end_scripts_in_a_line(
            resuming.ENDS_TRAINING,
            says_interrupts=_group.rank == 0,
            backups="keras.callbacks.BackupAndRestore, in a folder for each process,",
        )
    elif _group.cluster != cluster:
        raise ValueError(
            "TF_CONFIG has changed, and a process can be in one cluster only. Before: "
            f"{_group.cluster}. Received: {cluster}. Start a new process."
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
