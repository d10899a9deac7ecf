"""`SimulatedCluster`: workers on a virtual clock."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from tf_dsgd import gpu
from tf_dsgd.algorithm import ExchangeRule
from tf_dsgd.checks import called, integer, positive_seconds
from tf_dsgd.cluster.base import Cluster, configure_process, late_after
from tf_dsgd.engine import devices
from tf_dsgd.engine import schedule as schedules
from tf_dsgd.engine.base import Engine
from tf_dsgd.engine.faults import FaultScript
from tf_dsgd.engine.links import Links
from tf_dsgd.engine.scheduled import ScheduledEngine
from tf_dsgd.engine.scheduler import Scheduler
from tf_dsgd.engine.simulator import SimulatorEngine
from tf_dsgd.engine.state import Store
from tf_dsgd.simulation.delays import Constant, bytes_per_second, delays
from tf_dsgd.simulation.faults import Fault
from tf_dsgd.simulation.faults import checked as checked_faults

_MOST_WORKERS, _MOST_SHARDS = 100_000, 10_000


_ELSEWHERE = {
    "tasks_per_worker": "Its workers take turns in this process, over whose devices a replica "
    "is laid: devices_per_worker. Tasks are of a tf_dsgd.TFCluster.",
}
"""Arguments that other clusters have: what to write instead."""


@called(elsewhere=_ELSEWHERE, examples={"num_workers": "4"})
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
        self._late_after = late_after(late_after_seconds)
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
        gpu.configure_by_default()

    def __repr__(self) -> str:
        return self._repr

    def configure(self) -> None:
        configure_process()
        devices.prepare(self.devices_per_worker, 1)

    def shard_devices(self) -> list[str]:
        return [tf.config.list_logical_devices("CPU")[0].name] * self._num_shards

    def make_engine(self, exchange: ExchangeRule) -> Engine:
        names = [device.name for device in tf.config.list_logical_devices("CPU")]
        of_parts = devices.of_parts(names, 1, self.devices_per_worker) * self.num_workers
        store = Store([d[0] for d in of_parts], self._num_shards, part_devices=of_parts)
        store.has_backup_tasks = self._late_after is not None
        scheduler = Scheduler(exchange, store.tasks, backup_after=self._late_after)
        if self._schedule is not None:
            return ScheduledEngine(store, scheduler, self._schedule)
        faults = None
        if self.workers_can_leave:
            faults = FaultScript(self._faults, self.num_workers, self._timeout)
        links = Links(self._network, self.network_bytes_per_second, store)
        return SimulatorEngine(store, scheduler, self._compute, links, self._seed, faults)


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
