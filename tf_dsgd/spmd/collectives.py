"""Equal processes that know each other by TF_CONFIG: meeting, and copying the first one's arrays.

Each puts messages into the others' queues, and reads variables on their servers, in graphs of
`tf_dsgd.spmd.sessions`, which says why each of them can run twice.

Sums and means are in `tf_dsgd.spmd.exchange`.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NoReturn

import numpy as np
import tensorflow as tf

from tf_dsgd import _tf_errors, resuming
from tf_dsgd.console import before_training, end_scripts_in_a_line
from tf_dsgd.spmd.sessions import Answer, Cell, MainThreadCalls, Sessions, messages_of
from tf_dsgd.transport import cluster_spec, listening, probing

_CHUNK_BYTES = 8 << 20  # larger tensors are copied in parts, side by side: up to twice as fast
_PROBE_SECONDS = 2.0
_ENDING_SECONDS = 5.0
_GRACE_SECONDS = 10.0  # beyond the limit of time that TensorFlow keeps by itself
THIS_PROCESS = -1
_REFUSALS = 10  # of one run in a row, each of which has a chance of 1 / 43,000


class Group:
    """The processes of TF_CONFIG, as this one sees them.

    Every method is collective: all processes call the same ones in the same order, with arrays of
    the same shapes. `meet` is what finds out whether they do.

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
        self.others = [rank for rank in range(self.size) if rank != self.rank]
        self.cluster = cluster
        self._members = members
        self._session: Sessions | None = None
        self._programs: dict[Any, Program] = {}
        self._meetings = 0
        self._own_mark = int.from_bytes(os.urandom(7), "big")
        self._marks: dict[int, int] = {}
        """By rank: a random number of the process that was heard first."""
        self._threads: dict[int, MainThreadCalls] = {}
        self.made: dict[Any, Any] = {}
        """What is kept as long as the group, such as `tf_dsgd.spmd.exchange.Exchange`s."""
        self._lost: Exception | None = None

    def meet(self, *numbers: int) -> np.ndarray:
        """Everybody's numbers, an int64 array [processes, numbers], in the processes' order."""
        rows = [np.array(numbers, np.int64)] * self.size
        if self.size == 1:
            return np.stack(rows)
        with self.unbroken():
            self.sessions()  # which waits for all to begin
            self._meetings += 1
            message = np.array([self._own_mark, self._meetings, *numbers], np.int64)
            told = {rank: self._tell(rank, message) for rank in self.others}
            for rank, running in told.items():
                running.result(functools.partial(self._look, [rank]))
            hear = self.program("hear", self._hearing)
            deadline = time.monotonic() + self.timeout_seconds
            for k, rank in enumerate(self.others):
                look = functools.partial(self._look, self.others[k:])
                met = None
                while met != self._meetings:  # else it is an earlier message, again
                    running = hear.begin(hear.wires[rank], {}, deadline)
                    mark, met, *row = running.result(look)
                    if mark != self._marks.setdefault(rank, mark) or met > self._meetings:
                        self._fail(RuntimeError(self._elsewhere(rank)))
                if len(row) != len(numbers):
                    self._fail(RuntimeError(self._elsewhere(rank)))
                rows[rank] = np.array(row, np.int64)
        return np.stack(rows)

    def agree(self, number: int) -> None:
        """A meeting of those who do the same, with a number that says what.

        Raises:
            RuntimeError: if another one does something else.
        """
        for rank, (theirs,) in enumerate(self.meet(number)):
            if theirs != number:
                self._fail(RuntimeError(self._elsewhere(rank)))

    @contextlib.contextmanager
    def unbroken(self) -> Iterator[None]:
        """Within, something is done together; who leaves it by an error cannot go on with others.

        Not even after a Ctrl-C: they would take what comes next for what was left out.
        """
        try:
            yield
        except BaseException as error:
            if self._lost is None:
                self._lost = RuntimeError(
                    f"{self._me.capitalize()} left what all do together, by "
                    f"{type(error).__name__}, and cannot go on. Start all processes again."
                )
            raise

    def texts(self, text: str) -> list[str]:
        """Everybody's text."""
        with self.unbroken():
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
        at = 0 if self.rank == 0 else None
        with self.unbroken():
            program = self.program(("copy", len(words)), lambda: self._copying(sizes), at)
            fed, given, taken, freed = program.wires
            if self.rank == 0:
                slices = (words[start:stop] for start, stop in parts)
                program.run(given, dict(zip(fed, slices, strict=True)))
            self.agree(len(words))
            received = (
                data if self.rank == 0 else np.concatenate(program.run(taken, {})).view(np.uint8)
            )
            self.agree(len(words))
            if self.rank == 0:
                program.run(freed, {})
        return [
            received[end - array.nbytes : end].view(array.dtype).reshape(array.shape)
            for array, end in zip(mine, ends, strict=True)
        ]

    # -- for what is built on it --------------------------------------------------------------

    def program(self, key: Any, build: Callable[[], Any], at: int | None = THIS_PROCESS) -> Program:
        """A graph that is built once.

        Args:
            key: equal keys are for equal graphs.
            build: adds operations to the open graph and returns them; what they must be able to
                bear is in `tf_dsgd.spmd.sessions`.
            at: on whose server it runs; None if it is this process's, and reads from others'.
        """
        if self._lost is not None:
            raise self._lost
        at = self.rank if at == THIS_PROCESS else at
        key = (key, at)
        if key not in self._programs:
            self._programs[key] = Program(self, build, at)
        return self._programs[key]

    def member(self, rank: int) -> tuple[str, int]:
        """A process's job and number."""
        return self._members[rank]

    def device(self, rank: int) -> str:
        """A process's processor, as TensorFlow calls it."""
        job, index = self._members[rank]
        return f"/job:{job}/replica:0/task:{index}/device:CPU:0"

    def sessions(self) -> Sessions:
        """The server of this process, once all others have theirs."""
        if self._session is None:
            self._session = Sessions(self.cluster)
            self._await_servers()
        return self._session

    def thread(self, at: int | None) -> MainThreadCalls:
        """Makes the calls of graphs that run there, so that the main thread can be interrupted."""
        at = self.rank if at is None else at
        if at not in self._threads:
            self._threads[at] = MainThreadCalls()
        return self._threads[at]

    def explain(self, error: Exception) -> NoReturn:
        """Raises what went wrong in words, with the names of the processes that do not answer."""
        late = isinstance(error, (tf.errors.DeadlineExceededError, TimeoutError))
        silent = error.ranks if isinstance(error, _EndedError) else self._silent(_PROBE_SECONDS)
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

    def _tell(self, rank: int, message: np.ndarray) -> Running:
        """Puts a message into the queue on another's server."""

        def build() -> tuple[Any, Any]:
            fed = tf.compat.v1.placeholder(tf.int64, [None])
            handle = messages_of(self.rank)
            return fed, tf.raw_ops.QueueEnqueueV2(handle=handle, components=[fed])

        program = self.program("tell", build, rank)
        fed, told = program.wires
        return program.begin(told, {fed: message})

    def _hearing(self) -> dict[int, Any]:
        hear = tf.raw_ops.QueueDequeueV2
        return {
            rank: hear(handle=messages_of(rank), component_types=[tf.int64])[0]
            for rank in self.others
        }

    def _copying(self, sizes: Sequence[int]) -> tuple[list[Any], list[Any], list[Any], list[Any]]:
        """What is fed, what the first process gives, what the others take, and what frees it."""
        cells = [
            Cell(self.device(0), f"copied/{sum(sizes)}/{k}", tf.int64, size)
            for k, size in enumerate(sizes)
        ]
        if self.rank > 0:
            return [], [], [cell.read() for cell in cells], []
        fed = [tf.compat.v1.placeholder(tf.int64, [size]) for size in sizes]
        given = [cell.assign(x) for cell, x in zip(cells, fed, strict=True)]
        return fed, given, [], [cell.free() for cell in cells]

    def _address(self, rank: int) -> str:
        job, index = self._members[rank]
        return self.cluster.jobs[job][index]

    def _elsewhere(self, rank: int) -> str:
        return (
            f"{self.names[rank]} is at another place of its program than {self._me}, or one of "
            "them was started again while the other went on. Start all processes together, with "
            "one script."
        )

    def _look(self, awaited: Iterable[int]) -> None:
        """Raises if one has ended whose message is awaited: nothing else would tell."""
        places = {rank: self._address(rank) for rank in awaited if rank != self.rank}
        refusing = probing.refusing(places.values(), _PROBE_SECONDS)
        ended = [rank for rank, address in places.items() if address in refusing]
        if ended:
            raise _EndedError(ended)

    def _silent(self, seconds: float) -> list[int]:
        places = {rank: self._address(rank) for rank in self.others}
        silent = probing.not_reachable(places.values(), seconds)
        return [rank for rank, address in places.items() if address in silent]

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
        others = self.others
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

    def __init__(self, group: Group, build: Callable[[], Any], at: int | None):
        self._group, self._at = group, at
        sessions = group.sessions()
        graph = tf.Graph()
        with graph.as_default(), tf.device(group.device(group.rank if at is None else at)):
            self.wires = build()
        self._session = sessions.open(graph, None if at is None else group.member(at))

    def run(self, fetches: Any, feeds: dict[Any, np.ndarray]) -> Any:
        """Runs it, as long as the group may wait. Ctrl-C ends the wait.

        Raises:
            ConnectionError, TimeoutError: if a process is lost.
        """
        return self.begin(fetches, feeds).result()

    def begin(
        self, fetches: Any, feeds: dict[Any, np.ndarray], deadline: float | None = None
    ) -> Running:
        """Begins to run it, until a time of `time.monotonic`; again, if TensorFlow refuses."""
        group = self._group
        deadline = time.monotonic() + group.timeout_seconds if deadline is None else deadline
        milliseconds = max(1, int(1e3 * (deadline - time.monotonic())))
        options = tf.compat.v1.RunOptions(timeout_in_ms=milliseconds)

        def run() -> Any:
            for refusals in itertools.count(1):
                try:
                    return self._session.run(fetches, feeds, options)
                except tf.errors.AbortedError as error:
                    if not _tf_errors.says_received_twice(error) or refusals == _REFUSALS:
                        raise

        return Running(group, group.thread(self._at).begin(run), deadline)


class Running:
    """A run that has begun."""

    def __init__(self, group: Group, answer: Answer, deadline: float):
        self._group, self._answer, self._deadline = group, answer, deadline

    def result(self, look: Callable[[], None] | None = None) -> Any:
        """What it gives.

        Args:
            look: raises an error if it waits for what does not come.

        Raises:
            ConnectionError, TimeoutError: if a process is lost.
        """
        with self._group.unbroken():
            try:
                return self._answer.get(self._deadline + _GRACE_SECONDS, look)
            except (tf.errors.OpError, TimeoutError, _EndedError) as error:
                self._group.explain(error)


class _EndedError(Exception):
    """Processes have ended."""

    def __init__(self, ranks: list[int]):
        super().__init__(ranks)
        self.ranks = ranks


_group: Group | None = None


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


def _parts(size: int, itemsize: int) -> list[tuple[int, int]]:
    """Where the parts of a long array begin and end."""
    step = _CHUNK_BYTES // itemsize
    return [(start, min(start + step, size)) for start in range(0, size, step)]


def _and(names: Any) -> str:
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last
