"""This process's connection, as the chief, to the tasks of a TensorFlow cluster."""

from __future__ import annotations

import os
import sys
import time

import tensorflow as tf
from absl import logging

from tf_dsgd import _tf, tasks

_LOOK_SECONDS = 0.2  # between two attempts to reach a task that is not there yet
_MESSAGE_SECONDS = 5.0  # between two messages that say what is waited for
_GRACE_SECONDS = 3.0  # for the other workers, once one is there
_PROBE_SECONDS = 1.0  # until a task that does not answer counts as absent
_HOST = "/job:chief/replica:0/task:0/device:CPU:0"


class Connection:
    """The devices of a cluster, and who of its workers is there.

    Made by `connect`. TensorFlow's own connecting blocks while a task is absent, so only tasks
    that listen are named to it, and workers that come later are added.

    Args:
        cluster: the tasks.
        timeout_seconds: how long to wait for every ps and one worker.
    """

    def __init__(self, cluster: tasks.Tasks, timeout_seconds: float):
        self.tasks = cluster
        self.workers = sorted(cluster.workers)
        self.ps = sorted(cluster.ps)
        self.host_device = _HOST
        if cluster.chief is not None:
            tasks.check_port(cluster)
            doubts = tasks.doubts_about_own_host(cluster)
            if doubts:
                say(doubts)
        here = self._wait(timeout_seconds)
        self._known = set(here)
        """Workers that TensorFlow was told of."""
        self._connect(here)
        for job, index in [*(("ps", i) for i in self.ps), *(("worker", i) for i in sorted(here))]:
            self._check_version(job, index)

    # -- devices ----------------------------------------------------------------------------

    def worker_devices(self) -> list[str]:
        """Where each worker computes: its first GPU, else its processor."""
        visible = {d.name for d in tf.config.list_logical_devices()}
        devices = []
        for index in self.workers:
            gpu = _device("worker", index, "GPU")
            devices.append(gpu if gpu in visible else _device("worker", index))
        return devices

    def shard_devices(self) -> list[str]:
        """Where each shard is."""
        return [_device("ps", index) for index in self.ps]

    # -- who is there -----------------------------------------------------------------------

    def worker_name(self, m: int) -> str:
        """Worker number m in words."""
        return self.tasks.name("worker", self.workers[m])

    def worker_listens(self, m: int) -> bool:
        """Whether worker number m can be reached."""
        return tasks.reachable(self.tasks.workers[self.workers[m]], _PROBE_SECONDS)

    def silent_ps(self) -> list[str]:
        """The ps tasks, in words, that cannot be reached."""
        return [
            self.tasks.name("ps", i)
            for i in self.ps
            if not tasks.reachable(self.tasks.ps[i], _PROBE_SECONDS)
        ]

    def present(self) -> list[bool]:
        """Which workers are there now; those that came, or came back, join."""
        return [self._is_present(m) for m in range(len(self.workers))]

    def _is_present(self, m: int) -> bool:
        if not self.worker_listens(m):
            return False
        index = self.workers[m]
        try:
            if index not in self._known:
                self.join(m)
                return True
            tasks.remote_version(_device("worker", index))
        except tf.errors.OpError:  # another process than the one that was there
            if self.worker_listens(m):
                self.join(m)
                return True
            return False
        return True

    def join(self, m: int) -> None:
        """Adds worker number m, which came or came back; it must listen."""
        index = self.workers[m]
        others = self._known - {index}
        absent = {i for i in others if not tasks.reachable(self.tasks.workers[i], _PROBE_SECONDS)}
        _tf.join_task("worker", index, self.tasks.workers[index], absent)
        self._known = (self._known - absent) | {index}
        self._check_version("worker", index, UnequalVersions)

    # -- connecting -------------------------------------------------------------------------

    def _wait(self, timeout_seconds: float) -> set[int]:
        """Waits until every ps and a worker listen; gives the workers that do."""
        start = said = time.monotonic()
        complete: float | None = None
        while True:
            workers = {i for i in self.workers if tasks.reachable(self.tasks.workers[i], 1.0)}
            absent = [
                self.tasks.name("ps", i)
                for i in self.ps
                if not tasks.reachable(self.tasks.ps[i], _PROBE_SECONDS)
            ]
            now = time.monotonic()
            if not absent and workers:
                complete = complete or now
                if len(workers) == len(self.workers) or now - complete > _GRACE_SECONDS:
                    return workers
            else:
                absent += [self.tasks.name("worker", i) for i in self.workers if i not in workers]
                if now - start > timeout_seconds:
                    raise TimeoutError(
                        f"After {timeout_seconds:g} s these tasks cannot be reached: "
                        f"{', '.join(absent)}. Every ps task and one worker are needed. Start "
                        "them with python -m tf_dsgd.serve, or correct their addresses."
                    )
                if now - said > _MESSAGE_SECONDS:
                    said = now
                    say(f"waiting for {', '.join(absent)}")
            time.sleep(_LOOK_SECONDS)

    def _connect(self, workers: set[int]) -> None:
        if _tf.devices_initialised():
            say(
                "TensorFlow was used before the strategy was made. Variables and tensors made "
                "until now cannot be used any more: make the strategy first."
            )
        for name, value in (
            # One call of a worker at a time, done when it returns; a lost task is an error at once.
            ("TF_ENABLE_EAGER_CLIENT_STREAMING_ENQUEUE", "False"),
            ("TF_PS_DISABLE_ASYNC_EXECUTOR_GLOBALLY", "True"),
            ("GRPC_FAIL_FAST", "use_caller"),
        ):
            os.environ.setdefault(name, value)
        present = {"worker": sorted(workers), "ps": self.ps}
        if self.tasks.chief is not None:
            present["chief"] = [0]
        filters = tf.config.experimental.ClusterDeviceFilters()
        for index in self.workers:  # workers do not need each other, nor each other's faults
            filters.set_device_filters("worker", index, ["/job:ps", "/job:chief"])
        for index in self.ps:
            filters.set_device_filters("ps", index, ["/job:worker", "/job:chief"])
        tf.config.experimental_connect_to_cluster(
            self.tasks.cluster_spec(present),
            job_name="chief",
            protocol="grpc",
            cluster_device_filters=filters,
        )

    def _check_version(
        self, job: str, index: int, error: type[RuntimeError] = RuntimeError
    ) -> None:
        import tf_dsgd

        theirs = tasks.remote_version(_device(job, index))
        if theirs is None:
            logging.warning(
                "tf_dsgd: %s was not started by tf_dsgd.serve; its version is not known",
                self.tasks.name(job, index),
            )
        elif theirs != tf_dsgd.__version__:
            raise error(
                f"{self.tasks.name(job, index)} runs tf_dsgd {theirs}, the chief "
                f"{tf_dsgd.__version__}. Install one version on all tasks and restart them."
            )


class UnequalVersions(RuntimeError):
    """A task runs another version of the package than the chief."""


_connection: Connection | None = None


def connect(cluster: tasks.Tasks, timeout_seconds: float) -> Connection:
    """The connection to a cluster; there is one per process.

    Raises:
        RuntimeError: if this process is connected to another cluster: TensorFlow would invalidate
            every variable made on the first one.
        TimeoutError: if tasks are missing after `timeout_seconds`, naming them.
    """
    global _connection
    if _connection is None:
        _connection = Connection(cluster, timeout_seconds)
    elif _connection.tasks.jobs != cluster.jobs:
        raise RuntimeError(
            "This process is connected to another cluster, and TensorFlow allows one per process. "
            f"Connected: {_connection.tasks.jobs}. Received: {cluster.jobs}. Start a new process."
        )
    return _connection


def say(message: str, version: str = "") -> None:
    """Writes a line for whoever watches the job."""
    who = f"tf_dsgd {version}" if version else "tf_dsgd"
    print(f"{who}: {message}", file=sys.stderr, flush=True)


def _device(job: str, index: int, kind: str = "CPU") -> str:
    return f"/job:{job}/replica:0/task:{index}/device:{kind}:0"
