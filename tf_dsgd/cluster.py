"""Where workers and shards are."""

from __future__ import annotations

import abc
import dataclasses
import os
from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from absl import logging

from tf_dsgd import _tf, gpu
from tf_dsgd.algorithm import ExchangeRule
from tf_dsgd.engine import simulator
from tf_dsgd.engine.base import Engine
from tf_dsgd.engine.threads import ThreadsEngine


class Cluster(abc.ABC):
    """Makes the engine on which a strategy runs."""

    @abc.abstractmethod
    def configure(self) -> None:
        """Sets what must be set before TensorFlow opens its devices."""

    @abc.abstractmethod
    def shard_device(self) -> str:
        """Where the shard's variables are."""

    @abc.abstractmethod
    def make_engine(self, exchange: ExchangeRule) -> Engine:
        """The engine for an exchange rule."""


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
        num_workers: number of workers, at least 1. By default one per GPU; without GPUs one per
            core this process may run on.

    Raises:
        ValueError: if `num_workers` is not a positive integer.

    Example:

    >>> tf_dsgd.LocalCluster(num_workers=2)
    LocalCluster(num_workers=2)
    """

    def __init__(self, num_workers: int | None = None):
        if num_workers is not None:
            positive_int("num_workers", num_workers, "or None, for one per GPU or core")
        self.num_workers = num_workers

    def __repr__(self) -> str:
        return f"LocalCluster(num_workers={self.num_workers})"

    def _count(self) -> int:
        if self.num_workers is not None:
            return self.num_workers
        return len(tf.config.list_physical_devices("GPU")) or _cores()

    def configure(self) -> None:
        gpu.configure_by_default()
        if _tf.devices_initialised() or tf.config.list_physical_devices("GPU"):
            return
        threading = tf.config.threading
        workers = self._count()
        if not threading.get_intra_op_parallelism_threads():
            threading.set_intra_op_parallelism_threads(max(1, _cores() // workers))
        if not threading.get_inter_op_parallelism_threads():
            # A worker's function must find a thread while others compute.
            threading.set_inter_op_parallelism_threads(max(_cores(), workers) + 2)
        logging.info(
            "tf_dsgd: %d workers, %d threads within an operation",
            workers,
            threading.get_intra_op_parallelism_threads(),
        )

    def shard_device(self) -> str:
        gpus = tf.config.list_logical_devices("GPU")
        return gpus[0].name if len(gpus) == 1 else tf.config.list_logical_devices("CPU")[0].name

    def make_engine(self, exchange: ExchangeRule) -> Engine:
        devices = [
            d.name
            for d in tf.config.list_logical_devices("GPU") or tf.config.list_logical_devices("CPU")
        ]
        count = self._count()
        return ThreadsEngine([devices[m % len(devices)] for m in range(count)], exchange)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclasses.dataclass(frozen=True)
class Exponential:
    """An exponentially distributed delay, drawn anew each time.

    Args:
        mean_seconds: the mean, in virtual seconds; at least 0.

    Example:

    >>> tf_dsgd.Exponential(0.1)
    Exponential(mean_seconds=0.1)
    """

    mean_seconds: float

    def __post_init__(self) -> None:
        _seconds("mean_seconds", self.mean_seconds)


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
        num_workers: number of workers, at least 1; a thousand are fine for a small model.
        compute_seconds: virtual time of one mini-batch: a number, `tf_dsgd.Exponential(mean)`, or
            a sequence of these, one per worker.
        network_seconds: virtual time of a message one way, likewise.
        seed: integer; seeds the delays, and nothing else.
        faults: must be empty in this version.

    Raises:
        ValueError: for a wrong number, naming it.

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
        seed: int = 0,
        faults: Sequence[Any] = (),
    ):
        self.num_workers = positive_int("num_workers", num_workers)
        self._repr = (
            f"SimulatedCluster({num_workers}, compute_seconds={compute_seconds}, "
            f"network_seconds={network_seconds}, seed={seed})"
        )
        self._compute = _delays("compute_seconds", compute_seconds, num_workers)
        self._network = _delays("network_seconds", network_seconds, num_workers)
        if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
            raise ValueError(f"seed must be an integer of at least 0. Received: {seed!r}.")
        self._seed = seed
        if faults is not None and not (isinstance(faults, (tuple, list)) and not faults):
            raise ValueError(
                f"faults cannot be injected in this version: leave it empty. Received: {faults!r}."
            )

    def __repr__(self) -> str:
        return self._repr

    def configure(self) -> None:
        gpu.configure_by_default()

    def shard_device(self) -> str:
        return tf.config.list_logical_devices("CPU")[0].name

    def make_engine(self, exchange: ExchangeRule) -> Engine:
        return simulator.SimulatorEngine(
            simulator.on_cpu(self.num_workers), exchange, self._compute, self._network, self._seed
        )


def _delays(name: str, value: Any, num_workers: int) -> list[simulator.Delay]:
    if isinstance(value, Sequence) and not isinstance(value, str):
        if len(value) != num_workers:
            raise ValueError(
                f"{name} has one entry per worker or is one number. Received: {len(value)} entries "
                f"for {num_workers} workers."
            )
        return [_delay(f"{name}[{m}]", v) for m, v in enumerate(value)]
    return [_delay(name, value)] * num_workers


def _delay(name: str, value: Any) -> simulator.Delay:
    if isinstance(value, Exponential):
        return simulator.exponential(value.mean_seconds)
    return simulator.constant(_seconds(name, value))


def _seconds(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1e9:
        raise ValueError(
            f"{name} must be a number of virtual seconds of at least 0, or tf_dsgd.Exponential "
            f"(mean). Received: {value!r}."
        )
    return float(value)


def positive_int(name: str, value: Any, alternative: str = "") -> int:
    """Checks a count; also for numpy's integers."""
    return integer(name, value, 1, f", {alternative}" if alternative else "")


def integer(name: str, value: Any, least: int, alternative: str = "") -> int:
    """Checks an integer of at least `least` that fits in 31 bits."""
    if (
        isinstance(value, bool)
        or not hasattr(value, "__index__")
        or not least <= int(value) < 1 << 31
    ):
        raise ValueError(
            f"{name} must be an integer of at least {least}{alternative}, below 2**31. "
            f"Received: {value!r}."
        )
    return int(value)


def resolve(cluster: Any) -> Cluster:
    """The cluster that a strategy's `cluster` argument stands for."""
    if isinstance(cluster, Cluster):
        return cluster
    if isinstance(cluster, (tf.distribute.cluster_resolver.ClusterResolver, tf.train.ClusterSpec)):
        raise ValueError(
            f"Several processes are not supported in this version. Received: cluster={cluster!r}. "
            "Use tf_dsgd.LocalCluster() for workers on this machine."
        )
    if cluster is not None:
        raise TypeError(
            "cluster must be a tf_dsgd.LocalCluster, a tf_dsgd.SimulatedCluster or None. "
            f"Received: {cluster!r}."
        )
    if os.environ.get("TF_CONFIG"):
        raise ValueError(
            "TF_CONFIG is set, but several processes are not supported in this version. Unset it, "
            "or pass tf_dsgd.LocalCluster() to train on this machine alone."
        )
    return LocalCluster()
