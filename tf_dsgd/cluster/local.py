"""`LocalCluster`: threads of this process."""

from __future__ import annotations

import os

import tensorflow as tf
from absl import logging

from tf_dsgd import _tf, gpu
from tf_dsgd.algorithm import ExchangeRule
from tf_dsgd.checks import called, positive_int
from tf_dsgd.cluster.base import Cluster, configure_process
from tf_dsgd.console import say
from tf_dsgd.engine import devices, local
from tf_dsgd.engine.base import Engine
from tf_dsgd.engine.scheduler import Scheduler
from tf_dsgd.engine.state import Store
from tf_dsgd.engine.threads import ThreadsEngine

_MOST_THREADS = 1024
_INTRA_OP, _INTER_OP = "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS"
_MANY_ON_ONE = 16  # threads on a core or GPU: more gain nothing


_ELSEWHERE = {
    "tasks_per_worker": "Its workers are threads, over whose devices a replica is laid: "
    "devices_per_worker. Tasks are of a tf_dsgd.TFCluster.",
    "num_shards": "All weights are on one shard. tf_dsgd.SimulatedCluster has num_shards; a "
    "tf_dsgd.TFCluster has one for each ps task.",
}
"""Arguments that other clusters have: what to write instead."""


@called(elsewhere=_ELSEWHERE)
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

    batches_a_call = 2  # one takes a millisecond, whatever is in it

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
        gpu.configure_by_default()

    def __repr__(self) -> str:
        given = f", num_workers={self.num_workers}" if self.num_workers else ""
        return f"LocalCluster({(given + devices.shown(self.devices_per_worker))[2:]})"

    def _count(self) -> int:
        if self.num_workers is not None:
            return self.num_workers
        return max(1, _devices() // self.devices_per_worker)

    def configure(self) -> None:
        configure_process()
        if tf.config.get_visible_devices("GPU"):
            return
        opened = _tf.devices_initialised()
        devices.prepare(self.devices_per_worker, self._count())
        if opened:
            return
        workers, threading = self._count(), tf.config.threading
        at_once = workers * self.devices_per_worker
        if not (threading.get_intra_op_parallelism_threads() or os.environ.get(_INTRA_OP)):
            threading.set_intra_op_parallelism_threads(max(1, _cores() // at_once))
        if not (threading.get_inter_op_parallelism_threads() or os.environ.get(_INTER_OP)):
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


def _hint_at_many(workers: int) -> None:
    """No error: workers may wait for their data, or a script may be tried before a larger run."""
    if workers > _MANY_ON_ONE * _devices():
        say(
            f"{workers} workers share {_devices()} cores or GPUs, and each has a copy of the "
            "model. To study many workers, take tf_dsgd.SimulatedCluster."
        )


def _devices() -> int:
    """GPUs that TensorFlow may use, or else cores."""
    return len(tf.config.get_visible_devices("GPU")) or _cores()


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
