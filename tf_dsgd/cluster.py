"""Where workers and shards are."""

from __future__ import annotations

import abc
import os
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import tensorflow as tf
from absl import logging

from tf_dsgd import _tf, _version, floods, gpu, resuming
from tf_dsgd._tf_errors import FAILED, FLOOD_GREETINGS, FLOOD_HEADS, FLOOD_RAISED, FLOOD_TAILS
from tf_dsgd.algorithm import ExchangeRule
from tf_dsgd.checks import integer, positive_int, positive_seconds
from tf_dsgd.console import before_training, end_scripts_in_a_line, say
from tf_dsgd.engine import devices, local, remote
from tf_dsgd.engine import schedule as schedules
from tf_dsgd.engine.base import Engine
from tf_dsgd.engine.faults import FaultScript
from tf_dsgd.engine.links import Links
from tf_dsgd.engine.scheduled import ScheduledEngine
from tf_dsgd.engine.scheduler import Scheduler
from tf_dsgd.engine.simulator import SimulatorEngine
from tf_dsgd.engine.state import Store
from tf_dsgd.engine.threads import ThreadsEngine
from tf_dsgd.simulation.delays import Constant, bytes_per_second, delays
from tf_dsgd.simulation.faults import Fault
from tf_dsgd.simulation.faults import checked as checked_faults
from tf_dsgd.transport import cluster_spec, listening
from tf_dsgd.transport.connection import Connection, connect
from tf_dsgd.transport.ending import spare_what_is_imported


class Cluster(abc.ABC):
    """Makes the engine on which a strategy runs."""

    @abc.abstractmethod
    def configure(self) -> None:
        """Sets what must be set before TensorFlow opens its devices."""

    locked_in_graph: ClassVar[bool] = False
    """Whether functions of several processes act on a shard."""
    workers_can_leave: bool = False
    """Whether a worker, and what it owns, can be lost, or a straggler, while others go on."""
    runs_pipelines: ClassVar[bool] = False
    """Whether workers can run input pipelines of their own."""
    devices_per_worker: int = 1
    """Over how many devices a worker's replica can be laid."""
    gives_devices: ClassVar[str] = "devices_per_worker"
    """The argument that says so."""

    @abc.abstractmethod
    def shard_devices(self) -> list[str]:
        """Where each shard's variables are."""

    def host_device(self) -> str:
        """A device of this process."""
        return self.shard_devices()[0]

    @abc.abstractmethod
    def make_engine(self, exchange: ExchangeRule) -> Engine:
        """The engine for an exchange rule."""

    def check_ps(self) -> None:
        """Called for strategies that need ps tasks, where there may be some."""

    def announce(self, shards: Sequence[tuple[int, int]]) -> None:
        """Says how many variables, and bytes, each shard holds, where that is of interest."""


_MOST_THREADS = 1024
_MANY_ON_ONE = 16  # threads on a core or GPU: more gain nothing
_MOST_WORKERS, _MOST_SHARDS = 100_000, 10_000  # that a simulated cluster has


class LocalCluster(Cluster):
    """Workers are threads of this process; nothing is started.

    Use it to train asynchronously on one machine. Worker m computes on GPU m modulo the number of
    GPUs; without a GPU all workers share the processor. The shard is in this process's memory, on
    the GPU if there is just one, else on the CPU.

    If TensorFlow has not opened its devices yet and no thread counts were set, each worker gets its
    share of the cores (`intra_op_parallelism_threads` = cores / workers), which is what makes
    two workers on two cores faster than one; and GPU memory growth is switched on
    (`tf_dsgd.gpu.configure_memory`).

    Args:
        num_workers: number of workers, 1 to 1,024. By default one per GPU; without GPUs one per
            core this process may run on.
        devices_per_worker: devices of each worker, 1 to 64, over which `model_parallel=` of a
            strategy lays its replica: GPUs where there are any, else logical CPU devices, which
            TensorFlow makes when it opens its devices.

    Raises:
        ValueError: if `num_workers` is not an integer from 1 to 1,024. More than 16 on a core or
            GPU are taken, with a hint. In a strategy, if there are fewer GPUs than one worker's.
        RuntimeError: in a strategy, if TensorFlow has opened its devices, and they are too few.

    Example:

    >>> tf_dsgd.LocalCluster(num_workers=2)
    LocalCluster(num_workers=2)
    """

    def __init__(self, num_workers: int | None = None, devices_per_worker: int = 1):
        self.devices_per_worker = devices.checked(devices_per_worker)
        if num_workers is not None:
            num_workers = positive_int(
                "num_workers", num_workers, "or None, for one per GPU or core"
            )
            if num_workers > _MOST_THREADS:
                raise ValueError(
                    f"num_workers must be at most {_MOST_THREADS}: every local worker is a thread "
                    f"with a copy of the model. Received: {num_workers}. For more use "
                    "tf_dsgd.SimulatedCluster."
                )
            _hint_at_many(num_workers)
        self.num_workers = num_workers

    def __repr__(self) -> str:
        given = f", num_workers={self.num_workers}" if self.num_workers else ""
        return f"LocalCluster({(given + devices.shown(self.devices_per_worker))[2:]})"

    def _count(self) -> int:
        if self.num_workers is not None:
            return self.num_workers
        return max(1, _devices() // self.devices_per_worker)

    def configure(self) -> None:
        _configure_process()
        if tf.config.list_physical_devices("GPU"):
            return
        opened = _tf.devices_initialised()
        devices.prepare(self.devices_per_worker, self._count())
        if opened:
            return
        workers, threading = self._count(), tf.config.threading
        at_once = workers * self.devices_per_worker
        if not threading.get_intra_op_parallelism_threads():
            threading.set_intra_op_parallelism_threads(max(1, _cores() // at_once))
        if not threading.get_inter_op_parallelism_threads():
            # A worker's function must find a thread while others compute.
            threading.set_inter_op_parallelism_threads(max(_cores(), at_once) + 2)
        logging.info(
            "tf_dsgd: %d workers, %d threads within an operation",
            workers,
            threading.get_intra_op_parallelism_threads(),
        )

    def shard_devices(self) -> list[str]:
        gpus = tf.config.list_logical_devices("GPU")
        return [(gpus if len(gpus) == 1 else tf.config.list_logical_devices("CPU"))[0].name]

    def make_engine(self, exchange: ExchangeRule) -> Engine:
        names = [
            d.name
            for d in tf.config.list_logical_devices("GPU") or tf.config.list_logical_devices("CPU")
        ]
        of_parts = devices.of_parts(names, self._count(), self.devices_per_worker)
        store = Store([first for first, *_ in of_parts], part_devices=of_parts)
        scheduler = Scheduler(exchange, store.tasks, longest_call=local.LONGEST_CALL)
        return ThreadsEngine(store, scheduler, local.LocalRounds())


def _configure_process() -> None:
    gpu.configure_by_default()
    end_scripts_in_a_line(resuming.ENDS_TRAINING, FAILED)
    floods.sift(FLOOD_HEADS, FLOOD_TAILS, FLOOD_RAISED, FLOOD_GREETINGS)


def _hint_at_many(workers: int) -> None:
    """No error: workers may wait for their data, or a script may be tried before a larger run."""
    if workers > _MANY_ON_ONE * _devices():
        say(
            f"{workers} workers share {_devices()} cores or GPUs, and each has a copy of the "
            "model. To study many workers, take tf_dsgd.SimulatedCluster."
        )


def _devices() -> int:
    """GPUs, or else cores."""
    return len(tf.config.list_physical_devices("GPU")) or _cores()


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class TFCluster(Cluster):
    """Worker and ps processes of a TensorFlow cluster; this process is their chief.

    Use it to train on several processes or machines. The weights and the optimizer's slots are on
    the ps tasks, balanced by bytes; workers compute; batches come from the chief's dataset. Start
    the other tasks with `python -m tf_dsgd.serve`, or everything on one machine with `python -m
    tf_dsgd.launch`. A script started with a worker's or ps's TF_CONFIG serves that task: making
    the cluster then does not return.

    Training starts when every ps and one worker are there. Workers may come later, be lost, and
    come back: each fetches first, and the batches that a lost one had not finished go to others,
    so that every example is still used exactly once an epoch. A lost ps ends training with an
    error. A process can be connected to one cluster only.

    Without ps tasks, which `tf_dsgd.PeriodicAveragingStrategy` allows, the weights are on the
    workers, each of which then holds a part of them. All must be there, and a lost worker
    ends training with an error, as a lost ps does.

    Args:
        resolver: a `tf.distribute.cluster_resolver.ClusterResolver`, a `tf.train.ClusterSpec`, or
            None for the environment variable TF_CONFIG.
        connect_timeout_seconds: how long to wait for every ps and one worker; above 0, below 1e9.
        worker_timeout_seconds: how long training waits when all workers are lost; and for a task
            that is there and does not answer (stopped, or behind a network that swallows packets),
            which then counts as lost; above 0, below 1e9.
        late_after_seconds: when a backup task is run for a straggler; above 0, below 1e9; None:
            never. Where workers wait for the slowest one (averaging, `max_staleness`, the end of
            an epoch), a worker that has waited for so long, and for as long as its own last message
            took, computes the straggler's message again and sends it in the straggler's name; of
            the two messages the second is refused. There is no backup task, and the workers wait,
            where a message depends on what only the straggler has (`optimizer_state="local"`,
            `local_rule="optimizer"`, elastic averaging), or travels during the next round
            (`push_every` below `fetch_every`). Where no rule waits, a straggler that answers
            nothing then counts as lost some seconds later.

        tasks_per_worker: worker tasks that are one worker, 1 to 64, over which `model_parallel=` of
            a strategy lays its replica: task 0 to n - 1 are worker 0, part p on task p, and so on.
            By default what `launch --tasks_per_worker` said, else 1. If one of them is lost the
            worker is lost, and joins again when all of them are there. Their number must be a
            multiple of it, and there must be ps tasks.

    Raises:
        ValueError, TypeError: for a wrong configuration: what, where, and what to write instead.
        TimeoutError: if tasks are missing after `connect_timeout_seconds`, or one has not answered
            for `worker_timeout_seconds` while it was connected to, naming them.
        RuntimeError: if a task runs another version of the package, or this process is connected
            to another cluster.
        OSError: if the chief's port is in use.

    Example:

    >>> spec = tf.train.ClusterSpec({"worker": ["10.0.0.1:2222"], "ps": ["10.0.0.2:2222"]})
    >>> cluster = tf_dsgd.TFCluster(spec)  # the strategy connects
    >>> cluster
    TFCluster({'worker': {0: '10.0.0.1:2222'}, 'ps': {0: '10.0.0.2:2222'}})
    >>> strategy = tf_dsgd.DownpourStrategy(cluster)  # doctest: +SKIP
    """

    locked_in_graph = True
    workers_can_leave = True
    runs_pipelines = True
    gives_devices = "tasks_per_worker"

    def __init__(
        self,
        resolver: Any = None,
        *,
        connect_timeout_seconds: float = 600.0,
        worker_timeout_seconds: float = 60.0,
        late_after_seconds: float | None = 10.0,
        tasks_per_worker: int | None = None,
    ):
        self._connect_timeout = positive_seconds("connect_timeout_seconds", connect_timeout_seconds)
        self._worker_timeout = positive_seconds("worker_timeout_seconds", worker_timeout_seconds)
        self._late_after = _late_after(late_after_seconds)
        with before_training():
            listening.everywhere()  # whether it is right, before a server is started
            self.devices_per_worker = devices.tasks(tasks_per_worker)
            self._tasks = cluster_spec.grouped(_tasks(resolver), self.devices_per_worker)
        self._connected: Connection | None = None
        if self._tasks.task_type in ("worker", "ps"):
            # Not before: `python -m tf_dsgd.serve` should be the first to import its module.
            from tf_dsgd.serve import serve

            serve(self._tasks)

    def __repr__(self) -> str:
        number = self.devices_per_worker
        return f"TFCluster({self._tasks.jobs}{f', tasks_per_worker={number}' * (number > 1)})"

    @property
    def _connection(self) -> Connection:
        if self._connected is None:
            spare_what_is_imported()
            self._connected = connect(self._tasks, self._connect_timeout, self._worker_timeout)
        return self._connected

    def configure(self) -> None:
        workers, ps = len(self._tasks.workers), len(self._tasks.ps)
        say(
            f"{self._tasks.name('chief', 0)} of {workers} worker and {ps} ps tasks "
            f"(pid {os.getpid()})",
            version=_version.__version__,
        )
        _configure_process()
        with before_training():
            _ = self._connection

    def check_ps(self) -> None:
        with before_training():
            cluster_spec.check_ps(self._tasks)

    def shard_devices(self) -> list[str]:
        return self._connection.shard_devices()

    def host_device(self) -> str:
        return self._connection.host_device

    def make_engine(self, exchange: ExchangeRule) -> Engine:
        overlaps = exchange.push_every < exchange.fetch_every
        rounds = remote.RemoteRounds(self._connection, self._worker_timeout, overlaps)
        store = rounds.members.store
        store.may_be_late = self._late_after is not None
        scheduler = Scheduler(
            exchange,
            store.tasks,
            longest_call=remote.LONGEST_CALL,
            backup_after=self._late_after,
        )
        engine = ThreadsEngine(store, scheduler, rounds)
        rounds.members.attend(engine)
        return engine

    def announce(self, shards: Sequence[tuple[int, int]]) -> None:
        names = [self._tasks.name(job, index) for job, index in self._tasks.of_shards]
        for name, (variables, size) in zip(names, shards, strict=True):
            say(f"{name} holds {variables} variables, {size / 1e6:.1f} MB")


def _tasks(resolver: Any) -> cluster_spec.Tasks:
    if resolver is None:
        return cluster_spec.from_tf_config()
    if isinstance(resolver, tf.train.ClusterSpec):
        return cluster_spec.from_cluster_spec(resolver)
    if isinstance(resolver, tf.distribute.cluster_resolver.ClusterResolver):
        return cluster_spec.from_resolver(resolver)
    raise TypeError(
        "resolver must be a ClusterResolver, a tf.train.ClusterSpec, or None for TF_CONFIG. "
        f"Received: {resolver!r}."
    )


class SimulatedCluster(Cluster):
    """Workers that take turns on a virtual clock: the same run every time.

    Use it to study an algorithm under any number of workers and any delays, or to test one. The
    same script as on a real cluster runs on it, one turn at a time: gradients are computed for real
    (on what a worker had fetched), time is not. Runs with one seed, one script and one machine
    give the same weights, bit for bit.

    A round of a worker, from virtual time t: it fetches the weights the shard has at t, which takes
    one network time; computes its mini-batches, one compute time each; and sends, which takes
    one network time, after which the shard applies the message. Turns at one instant run in
    the order in which they came up, workers in order at first.

    Args:
        num_workers: number of workers, 1 to 100,000; a thousand are fine for a small model.
        compute_seconds: virtual time of one mini-batch: a number, `tf_dsgd.Exponential(mean)`,
            `tf_dsgd.LogNormal`, `tf_dsgd.Pareto`, `tf_dsgd.Straggler`, or a sequence of these, one
            per worker.
        network_seconds: virtual time of a message one way, likewise.
        network_bytes_per_second: of each worker's own link, for what it sends and what it fetches,
            each of which takes `network_seconds` + bytes / this; above 0. None where bytes take no
            time. Not with a schedule.
        seed: integer of at least 0; seeds the delays, and nothing else.
        schedule: who fetches, steps and sends in which order, in place of delays and of what the
            algorithm's periods and `max_staleness` would say: a list of entries
            `(worker, action)` or `(worker, action, what)`, see below; what `strategy.recording()`
            gave is one.
        num_shards: number of shards among which the weights are divided, as among ps tasks; 1 to
            10,000. With more shards than variables some stay empty.
        faults: workers that die or stop, ps tasks that die; see `tf_dsgd.faults`. Not with a
            schedule.
        worker_timeout_seconds: virtual seconds that a worker may be stopped until it counts as
            lost; above 0, below 1e9.
        late_after_seconds: virtual seconds that a worker waits for the slowest before it does that
            one's work again, as on `TFCluster`; by default it waits. Not with a schedule.
        devices_per_worker: as of `LocalCluster`, on the CPU; all workers, who take turns, have the
            same ones.

    The entries of a schedule, mini-batches being numbered from 0 in the order of the data, on
    through all epochs::

        (m, "fetch")                worker m fetches
        (m, "step", (3, 4))         it computes gradients on the mini-batches 3 and 4
        (m, "push", (3, 4))         the same, and sends what it has accrued
        (m, "push", ())             it only sends
        (m, "step"), (m, "push")    on the next mini-batch that no entry before it named
        (m, "flush")                the shard uses what its rule has collected so far

    A worker fetches before its first step; at most `push_every` mini-batches go into a message and
    at most `fetch_every` are computed on one fetch, since that is what the rules were traced for.
    At the end of an epoch, and where a callback reads weights, every mini-batch handed out must
    have been used, and what is accrued is sent. A fetch may name the version that it must find,
    `(m, "fetch", version)`.

    Raises:
        ValueError: for a wrong number, naming it; in training, for a schedule that does not fit,
            naming the entry.

    Example:

    >>> tf_dsgd.SimulatedCluster(2, compute_seconds=[1.0, 3.0], network_seconds=0.0, seed=0)
    SimulatedCluster(2, compute_seconds=[1.0, 3.0], network_seconds=0.0, seed=0)
    """

    def __init__(
        self,
        num_workers: int,
        *,
        compute_seconds: Any = 1.0,
        network_seconds: Any = 0.0,
        network_bytes_per_second: float | None = None,
        seed: int = 0,
        schedule: Iterable[Any] | None = None,
        num_shards: int = 1,
        faults: Iterable[Fault] = (),
        worker_timeout_seconds: float = 60.0,
        late_after_seconds: float | None = None,
        devices_per_worker: int = 1,
    ):
        self.devices_per_worker = devices.checked(devices_per_worker)
        self.num_workers = integer("num_workers", num_workers, 1, below=_MOST_WORKERS + 1)
        self._num_shards = integer("num_shards", num_shards, 1, below=_MOST_SHARDS + 1)
        self._faults = checked_faults(faults, self.num_workers, self._num_shards)
        self._timeout = positive_seconds("worker_timeout_seconds", worker_timeout_seconds)
        self._late_after = _late_after(late_after_seconds)
        self.workers_can_leave = bool(self._faults) or self._late_after is not None
        self._compute = delays("compute_seconds", compute_seconds, self.num_workers)
        self._network = delays("network_seconds", network_seconds, self.num_workers)
        self.network_bytes_per_second = bytes_per_second(network_bytes_per_second)
        self._seed = integer("seed", seed, 0, below=1 << 128)
        self._schedule = None
        if schedule is not None:
            _check_alone(
                {
                    "faults": self._faults,
                    "late_after_seconds": self._late_after,
                    "network_bytes_per_second": self.network_bytes_per_second,
                },
                compute_seconds=(compute_seconds, set(self._compute) != {Constant(1.0)}),
                network_seconds=(network_seconds, set(self._network) != {Constant(0.0)}),
                seed=(seed, self._seed != 0),
            )
            self._schedule = schedules.checked(schedule, self.num_workers)
        rate = self.network_bytes_per_second
        self._repr = (
            f"SimulatedCluster({num_workers}, compute_seconds={compute_seconds}, "
            f"network_seconds={network_seconds}"
            f"{'' if rate is None else f', network_bytes_per_second={rate:g}'}, seed={seed}"
            f"{devices.shown(self.devices_per_worker)})"
        )

    def __repr__(self) -> str:
        return self._repr

    def configure(self) -> None:
        _configure_process()
        devices.prepare(self.devices_per_worker, 1)

    def shard_devices(self) -> list[str]:
        return [tf.config.list_logical_devices("CPU")[0].name] * self._num_shards

    def make_engine(self, exchange: ExchangeRule) -> Engine:
        names = [device.name for device in tf.config.list_logical_devices("CPU")]
        of_parts = devices.of_parts(names, 1, self.devices_per_worker) * self.num_workers
        store = Store([d[0] for d in of_parts], self._num_shards, part_devices=of_parts)
        store.may_be_late = self._late_after is not None
        scheduler = Scheduler(exchange, store.tasks, backup_after=self._late_after)
        if self._schedule is not None:
            return ScheduledEngine(store, scheduler, self._schedule)
        faults = None
        if self.workers_can_leave:
            faults = FaultScript(self._faults, self.num_workers, self._timeout)
        links = Links(self._network, self.network_bytes_per_second, store)
        return SimulatorEngine(store, scheduler, self._compute, links, self._seed, faults)


def _late_after(value: Any) -> float | None:
    return None if value is None else positive_seconds("late_after_seconds", value)


def _check_alone(impossible: dict[str, Any], **given: tuple[Any, bool]) -> None:
    """Checks that a schedule comes without what it takes the place of: name=(value, whether)."""
    for name, value in impossible.items():
        if value:
            raise ValueError(f"{name} cannot be put into a schedule: leave one of the two out.")
    found = [f"{name}={value!r}" for name, (value, is_set) in given.items() if is_set]
    if found:
        raise ValueError(
            "A schedule takes the place of compute_seconds, network_seconds and seed: leave them "
            f"out. Received: {', '.join(found)}."
        )


def resolve(cluster: Any) -> Cluster:
    """The cluster that a strategy's `cluster` argument stands for."""
    if isinstance(cluster, Cluster):
        return cluster
    if isinstance(cluster, (tf.distribute.cluster_resolver.ClusterResolver, tf.train.ClusterSpec)):
        return TFCluster(cluster)
    if cluster is not None:
        number = isinstance(cluster, int) and not isinstance(cluster, bool)
        raise TypeError(
            "cluster must be a tf_dsgd.LocalCluster, TFCluster or SimulatedCluster, a "
            f"ClusterResolver, a ClusterSpec, or None. Received: {cluster!r}."
            + f" For {cluster} workers: tf_dsgd.LocalCluster({cluster})."
            * number
        )
    return TFCluster() if os.environ.get("TF_CONFIG", "").strip() else LocalCluster()
