"""Many asynchronous updates, fast: a schedule played by one loop in the graph.

For studies with hundreds of thousands of updates. The rules, the step and the shard's counters are
the very functions of training (`engine.program`), traced for one worker; what the other workers own
is stacked in variables `[workers, ...]`, whose rows take that worker's place in turn. `timetable`
makes a schedule from the simulated cluster's virtual clock.

    schedule = timetable(cluster, exchange, num_batches)
    study = Study(algorithm, cluster.num_workers, make_model, x, y, batch_size)
    study.run(schedule)
"""

from __future__ import annotations

import bisect
import contextlib
import functools
import itertools
import time
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf_dsgd import _tf
from tf_dsgd.algorithm import Algorithm, ExchangeRule
from tf_dsgd.algorithms.played import check_played
from tf_dsgd.checks import positive_int, truth
from tf_dsgd.cluster import Cluster, SimulatedCluster
from tf_dsgd.engine.base import Engine, nothing_to_explain
from tf_dsgd.engine.program import Program
from tf_dsgd.engine.schedule import Entry, Recorder, checked
from tf_dsgd.engine.scheduled import ScheduledEngine
from tf_dsgd.engine.scheduler import Scheduler
from tf_dsgd.engine.snapshot import Snapshot
from tf_dsgd.engine.state import WORKER, Store
from tf_dsgd.engine.work import Source
from tf_dsgd.membership.task import Task
from tf_dsgd.simulation.stacks import Stack
from tf_dsgd.strategies.base import DistributedStrategy
from tf_dsgd.strategies.variable import Kind, ReplicaVariable

# So few whole turns in a row are not worth a call of their own.
_SHORT = 64


class _StackedEngine(Engine):
    """Nobody hands batches out; there is never work under way."""

    counts_messages = False  # a worker's own count is in its row; the shard's is the same

    @property
    def can_record(self) -> bool:
        return False

    def prepare(self, program: Program) -> None:
        program.prepare("work_of", "collect", "fetch", "flush")

    def _grant(self, program: Program, stream: Any) -> None:
        raise RuntimeError("Train this model by Study.run.")

    def _await_begun(self, program: Program) -> None:
        """Nobody shows metrics."""

    def _drain(self) -> None:
        """All is at rest whenever somebody looks."""

    def clock(self) -> float:
        return time.perf_counter()

    def snapshot(self) -> Snapshot:
        return self.counted()

    def state(self) -> dict[str, np.ndarray]:
        return {}

    def check(self, state: Mapping[str, np.ndarray]) -> None:
        """A study takes no checkpoint."""

    def restore(self, state: Mapping[str, np.ndarray]) -> None:
        """A study takes no checkpoint."""

    def quiesce(self) -> None:
        """Nobody computes beside a study."""

    def explained(self) -> contextlib.AbstractContextManager[None]:
        return nothing_to_explain()

    def tracing(self) -> contextlib.AbstractContextManager[None]:
        return nothing_to_explain()

    def _source(self, stream: Any) -> Source | None:
        return None

    def _at_rest(self, task: Task, action: Callable[[], Any]) -> None:
        action()


class _StackedCluster(Cluster):
    """One worker is there, whose variables stand for each in turn."""

    def __init__(self, num_workers: int):
        self.num_workers = num_workers

    def configure(self, used: bool = False) -> None: ...

    def shard_devices(self) -> list[str]:
        return [tf.config.list_logical_devices("CPU")[0].name]

    def make_engine(self, exchange: ExchangeRule) -> Engine:
        tasks = [Task(m, here=m == 0) for m in range(self.num_workers)]
        store = Store(self.shard_devices() * self.num_workers, 1, tasks)
        return _StackedEngine(store, Scheduler(exchange, tasks))


class _StackedStrategy(DistributedStrategy):
    """Knows its variables, so that those of all workers can be stacked."""

    def __init__(self, algorithm: Algorithm, num_workers: int):
        self.adopted: list[ReplicaVariable] = []
        self._rows: dict[int, Stack] = {}
        """Stacks, by the id of the variable that each worker owns."""
        super().__init__(_StackedCluster(num_workers), algorithm)

    def adopt(self, primary: tf.Variable, shard: int, lent: bool = False) -> ReplicaVariable:
        variable = super().adopt(primary, shard, lent)
        self.adopted.append(variable)
        return variable

    def stacks(self) -> list[Stack]:
        """What each worker owns, stacked, but for metrics, of which only the sum is asked."""
        store = self.engine.store
        owners = {id(v.copies): v for v in self.adopted if v.copies is not None}
        stacks = []
        for replicated in store.replicas:
            owner = owners.get(id(replicated))
            if owner is not None and owner.kind is Kind.METRIC:
                continue
            copy = replicated.template
            if isinstance(copy, _tf.SizeChangingVariable):
                raise ValueError("Sparse gradients cannot be stacked: use SimulatedCluster.")
            first = np.repeat(copy.numpy()[None], store.num_workers, 0)
            if replicated is store.clock:
                first[:, WORKER] = np.arange(store.num_workers)
            elif owner is not None and owner.kind is Kind.SEED:
                first[:] = [owner.first_value(m) for m in range(store.num_workers)]
            stacks.append(Stack(copy, first))
            self._rows[id(replicated)] = stacks[-1]
        return stacks

    def residual(self) -> tuple[float, ...]:
        name, store = self.algorithm.codec.held_back, self.engine.store
        squares = np.zeros(store.num_workers)
        for cells in store.kept.values():
            if name in cells:
                squares += self._rows[id(cells[name])].squares()
        return tuple(np.sqrt(squares).tolist())


class Study:
    """A model, an algorithm and any number of workers, for runs of a schedule.

    Args:
        algorithm: the three rules.
        num_workers: number of workers.
        make_model: gives the compiled model; called in the strategy's scope.
        x: the examples.
        y: their targets.
        batch_size: examples of a mini-batch. Mini-batch b of a schedule is the b-th in the order of
            the examples, which begin anew when no whole one is left.
        jit_compile: whether XLA compiles the loop: about three times as fast, after some seconds of
            compiling, and equal to the simulator but for rounding and for what dropout draws;
            without, equal bit for bit.

    Raises:
        ValueError, TypeError: for a wrong argument, naming it and what was received.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        num_workers: int,
        make_model: Callable[[], keras.Model],
        x: np.ndarray,
        y: np.ndarray,
        batch_size: int,
        jit_compile: bool = True,
    ):
        if not isinstance(algorithm, Algorithm):
            raise TypeError(
                "algorithm must be a tf_dsgd.algorithm.Algorithm, such as a strategy's "
                f"`algorithm`. Received: {algorithm!r}."
            )
        num_workers = positive_int("num_workers", num_workers)
        batch_size = positive_int("batch_size", batch_size)
        jit_compile = truth("jit_compile", jit_compile)
        examples = [_examples("x", x), _examples("y", y)]
        if examples[0] != examples[1] or examples[0] < batch_size:
            raise ValueError(
                "x and y must have as many examples, and at least batch_size of them. "
                f"Received: {examples[0]} and {examples[1]}, batch_size={batch_size}."
            )
        check_played(algorithm)
        self.strategy = _StackedStrategy(algorithm, num_workers)
        self._batch_size = batch_size
        self._data = (tf.constant(x), tf.constant(y))
        self._num_batches = len(x) // batch_size
        spec = tuple(tf.TensorSpec([batch_size, *d.shape[1:]], d.dtype) for d in self._data)
        with self.strategy.scope():
            self.model = _compiled(make_model)
            self.model.optimizer.build(self.model.trainable_variables)
            self._program = self.strategy.trace(self.model.train_step, spec)
        self._stacks = self.strategy.stacks()
        self._has_run = False
        self._first: list[tuple[tf.Variable, np.ndarray]] | None = None
        self._loops = {
            whole: tf.function(
                functools.partial(self._loop, whole),
                autograph=False,
                jit_compile=jit_compile,
                input_signature=[tf.TensorSpec([None, 4], tf.int64), tf.TensorSpec([], tf.int32)],
            )
            for whole in (False, True)
        }

    def run(self, schedule: Iterable[Any]) -> None:
        """Trains by a schedule, as `tf_dsgd.SimulatedCluster` describes it, and drains."""
        turns = _turns(checked(schedule, self.strategy.num_workers))
        self._has_run = True
        for whole, rows in _segments(turns) if len(turns) else ():
            # XLA compiles for one length: of few lengths there are few.
            padded = np.zeros([max(_SHORT, 1 << (len(rows) - 1).bit_length()), 4], np.int64)
            padded[: len(rows)] = rows
            self._loops[whole](tf.constant(padded), tf.constant(len(rows)))
        if self._program.flush is not None:
            self._program.flush()

    def begin_anew(self, assign: Callable[[], Any] = lambda: None) -> None:
        """Undoes all runs: weights, slots, counters and what each worker owns are as at first.

        Args:
            assign: gives the model other first weights, which all workers then have.

        Raises:
            RuntimeError: the first time, if the study has run: call it once before.
        """
        if self._first is None:
            if self._has_run:
                raise RuntimeError(
                    "What a study was at first is not known after it has run: call begin_anew() "
                    "before the first run, too."
                )
            self._first = [(v, v.numpy()) for v in self._changed()]
        for variable, value in self._first:
            variable.assign(value)
        assign()
        for stack in self._stacks:
            stack.follow()

    def _changed(self) -> list[tf.Variable]:
        """All that a run may change."""
        signature = (tf.zeros([1, 4], tf.int64), tf.constant(1))
        graphs = [loop.get_concrete_function(*signature).graph for loop in self._loops.values()]
        return list({id(v): v for graph in graphs for v in graph.variables}.values())

    def _loop(self, whole: bool, turns: tf.Tensor, count: tf.Tensor) -> None:
        """Plays turns; `whole` ones step, push and fetch, the others do what their flags say."""

        def body(k: tf.Tensor) -> tf.Tensor:
            worker, batch, pushes, fetches = tf.unstack(turns[k], 4)
            for stack in self._stacks:
                stack.load(worker)
            _when(whole, batch >= 0, lambda: self._step(batch))
            _when(whole, pushes > 0, self._push)
            _when(whole, fetches > 0, self._program.fetch[0].traced)
            for stack in self._stacks:
                stack.store(worker)
            return k + 1

        tf.while_loop(lambda k: k < count, body, (tf.constant(0),), parallel_iterations=1)

    def _step(self, batch: tf.Tensor) -> None:
        begin = batch % self._num_batches * self._batch_size
        parts = []
        for data in self._data:
            first = tf.concat([begin[None], tf.zeros([len(data.shape) - 1], tf.int64)], 0)
            parts.append(tf.slice(data, first, [self._batch_size, *data.shape[1:]]))
        self._program.work_of[0].traced(tuple(parts))

    def _push(self) -> None:
        heads, message = self._program.collect[0].traced()
        self._program.delivery(heads, message)


def _examples(name: str, array: Any) -> int:
    """How many there are."""
    shape = tuple(getattr(array, "shape", ()))
    if not shape:
        raise TypeError(f"{name} must be an array of examples. Received: {array!r}.")
    return int(shape[0])


def _compiled(make_model: Any) -> keras.Model:
    model = make_model() if callable(make_model) else make_model
    compiled = isinstance(model, keras.Model) and getattr(model, "optimizer", None) is not None
    if not compiled or not callable(make_model):
        raise TypeError(
            "make_model must be a function without arguments that gives a compiled keras.Model. "
            f"Received: {make_model!r}, which gave {model!r}."
        )
    return model


def _when(always: bool, condition: tf.Tensor, action: Callable[[], Any]) -> None:
    if always:
        action()
        return

    def run() -> tf.Tensor:
        action()
        return tf.constant(0)

    tf.cond(condition, run, lambda: tf.constant(0))


def _turns(entries: Sequence[Entry]) -> np.ndarray:
    """Rows (worker, mini-batch or -1, pushes, fetches), each in this order of doing.

    A mini-batch is computed when its worker next sends or fetches: nobody sees it before.
    """
    rows: list[list[int]] = []
    pending: dict[int, list[int]] = {}
    unsent: dict[int, bool] = {}

    def step(m: int, push: bool) -> None:
        waiting = pending.pop(m, []) or [-1]
        rows.extend([m, b, 0, 0] for b in waiting if b >= 0 or push)
        unsent[m] = not push
        if push:
            rows[-1][2] = 1

    for entry in entries:
        m = entry.worker
        pending.setdefault(m, []).extend(entry.batches)
        if entry.action == "push":
            step(m, push=True)
        elif entry.action == "fetch":
            if pending[m]:
                step(m, push=False)
            if not rows or rows[-1][0] != m or rows[-1][3]:
                rows.append([m, -1, 0, 0])
            rows[-1][3] = 1
        elif entry.action == "flush":
            raise ValueError(f"A study cannot flush in the middle. Received: {entry}.")
    for m in sorted(m for m in {*pending, *unsent} if pending.get(m) or unsent.get(m)):
        step(m, push=True)
    return np.array(rows, np.int64).reshape(-1, 4)


def _segments(turns: np.ndarray) -> Iterator[tuple[bool, np.ndarray]]:
    """Runs of turns that step, push and fetch, and all else."""
    whole = (turns[:, 1] >= 0) & (turns[:, 2] > 0) & (turns[:, 3] > 0)
    ends = [*np.flatnonzero(np.diff(whole)) + 1, len(turns)]
    merged: list[list[Any]] = []
    for begin, end in itertools.pairwise([0, *ends]):
        is_whole = bool(whole[begin]) and end - begin >= _SHORT
        if merged and merged[-1][0] == is_whole:
            merged[-1][2] = end
        else:
            merged.append([is_whole, begin, end])
    for is_whole, begin, end in merged:
        yield is_whole, turns[begin:end]


class Timetable(list):
    """A schedule whose entries have times."""

    def __init__(self, entries: Iterable[Any], seconds: Iterable[float]):
        super().__init__(entries)
        self.seconds = list(seconds)
        """Of each entry, on the virtual clock, when the shard answers."""

    def until(self, seconds: float) -> Timetable:
        """What has happened by then."""
        count = bisect.bisect_right(self.seconds, seconds)
        return Timetable(self[:count], self.seconds[:count])


def timetable(cluster: SimulatedCluster, exchange: ExchangeRule, num_batches: int) -> Timetable:
    """The schedule by which a simulated cluster's workers do this many mini-batches.

    The simulator itself makes it, with nothing to compute.

    Returns:
        A list of the entries, with `seconds`, of each its time on the virtual clock, and
        `until(seconds)`, the part of it that has happened by then.

    Raises:
        ValueError, TypeError: for a wrong argument, naming it and what was received.
    """
    if not isinstance(cluster, SimulatedCluster):
        raise TypeError(f"cluster must be a tf_dsgd.SimulatedCluster. Received: {cluster!r}.")
    if not isinstance(exchange, ExchangeRule):
        raise TypeError(
            "exchange must be an ExchangeRule, such as a strategy's `algorithm.exchange`. "
            f"Received: {exchange!r}."
        )
    if cluster.network_bytes_per_second is not None:
        raise ValueError(
            "A timetable computes no messages, whose bytes would take time: leave "
            f"network_bytes_per_second out. Received: {cluster!r}."
        )
    if cluster.workers_can_leave:
        raise ValueError(
            "A timetable has all workers to the end, and no backup tasks: leave faults and "
            f"late_after_seconds out, or train on the cluster itself. Received: {cluster!r}."
        )
    positive_int("num_batches", num_batches)
    engine = cluster.make_engine(exchange)
    if isinstance(engine, ScheduledEngine):
        raise ValueError(
            "A cluster with a schedule has no delays of which a timetable could be made: give its "
            f"schedule to Study.run. Received: {cluster!r}."
        )
    engine.recorder = scribe = _Scribe(engine.num_workers, engine.clock)
    program, stream = _Nothing(engine.num_workers), _NoStream()
    for _ in range(num_batches):
        engine.grant(program, stream)  # type: ignore[arg-type]
    engine.drain()
    return Timetable(scribe.entries, scribe.seconds)


class _Scribe(Recorder):
    """A recorder for batches that nobody makes."""

    def __init__(self, num_workers: int, clock: Callable[[], float]):
        super().__init__(num_workers)
        self.seconds: list[float] = []
        self._clock = clock

    def take(self, worker: int, steps: int, source: Any) -> None:
        self._taken[worker].extend(range(self._next, self._next + steps))
        self._next += steps

    def stepped(self, worker: int, steps: int) -> None:
        super().stepped(worker, steps)
        self.seconds.append(self._clock())

    def note(self, worker: int, action: str, version: Any = None) -> None:
        self.entries.append((worker, action) if action == "fetch" else (worker, action, ()))
        self.seconds.append(self._clock())


class _NoStream:
    queue = pipelines = None
    batch_bytes = 0


class _Nothing:
    """A program whose functions do nothing."""

    flush = None
    ends_with_fetch = has_backup_tasks = False
    show = begin_anew = None
    running = types.SimpleNamespace(begin=lambda: None)
    lent = types.SimpleNamespace(take_back=lambda: None)

    def __init__(self, num_workers: int):
        self.fetch = self.work = [lambda *_: None] * num_workers
        self.collect = [lambda: ((), ())] * num_workers
        self._turns: dict[bool, list[Any]] = {
            True: [lambda *_: (None, (), ())] * num_workers,
            False: [lambda *_: (None,)] * num_workers,
        }

    def turn(self, fetches: bool, sends: bool, arrived: bool = False) -> list[Any]:
        return self._turns[sends]

    def deliver(self, heads: Any, message: Any) -> None: ...

    def forget_fetched(self) -> None: ...
