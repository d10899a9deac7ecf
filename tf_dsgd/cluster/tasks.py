"""`TFCluster`: tasks of a TensorFlow cluster."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tf_dsgd import _version, gpu
from tf_dsgd.algorithm import ExchangeRule
from tf_dsgd.checks import called, positive_seconds
from tf_dsgd.cluster.base import Cluster, configure_process, late_after
from tf_dsgd.console import before_training, say
from tf_dsgd.engine import devices, remote
from tf_dsgd.engine.base import Engine
from tf_dsgd.engine.scheduler import Scheduler
from tf_dsgd.engine.threads import ThreadsEngine
from tf_dsgd.transport import cluster_spec, listening
from tf_dsgd.transport.connection import Connection, connect

_ELSEWHERE = {
    "num_workers": "TF_CONFIG, or the ClusterSpec, says how many tasks there are; the launcher "
    "makes both: python -m tf_dsgd.launch --workers 4 --ps 1 train.py",
    "num_ps": "TF_CONFIG, or the ClusterSpec, says how many tasks there are; the launcher "
    "makes both: python -m tf_dsgd.launch --workers 4 --ps 1 train.py",
    "devices_per_worker": "A replica is laid over tasks: tasks_per_worker.",
}
"""Arguments that other clusters have: what to write instead."""


@called(elsewhere=_ELSEWHERE)
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

    Without ps tasks `tf_dsgd.CompressedAsyncStrategy` runs, whose workers have all weights each and
    send to one another. With `tf_dsgd.PeriodicAveragingStrategy` the weights are then on the
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
    reads_rows_by_round = True
    workers_can_leave = True
    runs_pipelines = True
    batches_a_call = 4  # one takes some milliseconds, whatever is in it
    most_bytes_of_a_variable = 2**31 - 2**16  # a message of protobuf has less than 2**31
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
        self._late_after = late_after(late_after_seconds)
        with before_training():
            listening.everywhere()  # whether it is right, before a server is started
            self.devices_per_worker = devices.tasks(tasks_per_worker)
            self._tasks = cluster_spec.grouped(_tasks(resolver), self.devices_per_worker)
        self._given = self._tasks
        self._connected: Connection | None = None
        if self._tasks.task_type in ("worker", "ps"):
            # Not before: `python -m tf_dsgd.serve` should be the first to import its module.
            from tf_dsgd.serve import serve

            serve(self._tasks)
        gpu.configure_by_default()

    def __repr__(self) -> str:
        number = self.devices_per_worker
        return f"TFCluster({self._tasks.jobs}{f', tasks_per_worker={number}' * (number > 1)})"

    @property
    def _connection(self) -> Connection:
        if self._connected is None or self._connected.tasks != self._tasks:
            self._connected = connect(self._tasks, self._connect_timeout, self._worker_timeout)
        return self._connected

    def configure(self) -> None:
        workers, ps = len(self._tasks.workers), len(self._tasks.ps)
        say(
            f"{self._tasks.name('chief', 0)} of {workers} worker and {ps} ps tasks "
            f"(pid {os.getpid()})",
            version=_version.__version__,
        )
        configure_process()
        with before_training():
            _ = self._connection

    def arrange(self, *, needs_ps: bool, between_workers: bool) -> None:
        with before_training():
            if needs_ps:
                cluster_spec.check_ps(self._tasks)
            self._tasks = cluster_spec.of_peers(self._given) if between_workers else self._given

    def shard_devices(self) -> list[str]:
        return self._connection.shard_devices()

    def host_device(self) -> str:
        return self._connection.host_device

    def make_engine(self, exchange: ExchangeRule) -> Engine:
        if exchange.in_turn:
            raise ValueError(
                f"{type(exchange).__name__} has workers send in turn, for which tasks of a "
                "cluster do not wait. Use tf_dsgd.LocalCluster or tf_dsgd.SimulatedCluster."
            )
        overlaps = exchange.push_every < exchange.fetch_every
        rounds = remote.RemoteRounds(self._connection, self._worker_timeout, overlaps)
        store = rounds.members.store
        store.has_backup_tasks = self._late_after is not None
        scheduler = Scheduler(
            exchange,
            store.tasks,
            longest_call=remote.LONGEST_CALL,
            backup_after=self._late_after,
        )
        engine = ThreadsEngine(store, scheduler, rounds)
        rounds.members.attend(engine)
        return engine

    def announce(self, shards: Sequence[tuple[int, int]], laid_out: bool) -> None:
        super().announce(shards, laid_out)
        if self._tasks.between_workers:
            ((variables, size),) = shards
            say(f"each worker holds {variables} variables, {size / 1e6:.1f} MB")
            return
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
