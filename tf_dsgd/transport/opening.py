"""Connecting to the tasks of a cluster that are there: TensorFlow opens its devices by that."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import time
from collections.abc import Set

import tensorflow as tf

from tf_dsgd import _tf_remote
from tf_dsgd.membership import deadlines
from tf_dsgd.transport import channels, listening, names, probing
from tf_dsgd.transport.aside import Aside
from tf_dsgd.transport.cluster_spec import Tasks

CHIEF = "localhost"
"""TensorFlow's own name for a process in no cluster: what was made before stays where it is."""


def place(job: str, index: int) -> str:
    """A task, as TensorFlow's devices name it."""
    return f"/job:{job}/replica:0/task:{index}"


def connect(tasks: Tasks, workers: Set[int], seconds: float, silent_seconds: float) -> None:
    """Connects this process, as the chief, to all ps tasks and to these worker tasks.

    Raises:
        TimeoutError: if one does not answer for `silent_seconds`, or that takes `seconds`.
    """
    for name, value in (
        # One call of a worker at a time, done when it returns; a lost task is an error at once.
        ("TF_ENABLE_EAGER_CLIENT_STREAMING_ENQUEUE", "False"),
        ("TF_PS_DISABLE_ASYNC_EXECUTOR_GLOBALLY", "True"),
        (channels.FAIL_FAST, "use_caller"),
    ):
        os.environ.setdefault(name, value)
    present = {"worker": sorted(workers), "ps": sorted(tasks.ps)}
    jobs = tasks.cluster_spec(present).as_dict()
    own = tasks.chief or _own_place(tasks)
    if own is not None:
        jobs[CHIEF] = [own]
    tf.config.experimental_connect_to_cluster(
        tf.train.ClusterSpec(jobs),
        job_name=CHIEF,
        protocol="grpc",
        cluster_device_filters=_filters(tasks),
    )
    _open(tasks, sorted(workers), seconds, silent_seconds)
    listening.keep_to(_tf_remote.own_address())


def _own_place(tasks: Tasks) -> str | None:
    """An address and a free port of this process, where others reach a chief without a name.

    It is that from which a task of another machine was reached, or else one of this machine. None
    where all tasks are on its loopback, as TensorFlow does it then.
    """
    here: str | None = None
    for address in (*tasks.ps.values(), *tasks.workers.values()):
        for family, *_, (its, port, *_) in names.places(address):
            if ipaddress.ip_address(its).is_loopback or ipaddress.ip_address(its).is_link_local:
                continue
            with contextlib.suppress(OSError):
                with socket.create_connection((its, port), deadlines.PROBE_SECONDS) as way:
                    own = way.getsockname()[0]
                if own != its:
                    return _with_a_free_port(family, own)
                here = here or _with_a_free_port(family, own)
    return here


def _with_a_free_port(family: int, host: str) -> str:
    with socket.socket(family, socket.SOCK_STREAM) as free:
        free.bind(("", 0))
        port = free.getsockname()[1]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _filters(tasks: Tasks) -> tf.config.experimental.ClusterDeviceFilters:
    """Who may talk to whom: a worker's tasks to each other and to all shards.

    Beside ps tasks workers do not need each other, nor each other's faults. Without, they hold the
    shards, or send to one another.
    """
    filters = tf.config.experimental.ClusterDeviceFilters()
    shards = "/job:ps" if tasks.ps else "/job:worker"
    for group in tasks.groups:
        for index in group:
            partners = [place("worker", other) for other in group if other != index]
            seen = [shards, f"/job:{CHIEF}", *partners]
            filters.set_device_filters("worker", index, seen)
    for index in tasks.ps:
        filters.set_device_filters("ps", index, ["/job:worker", f"/job:{CHIEF}"])
    return filters


def _open(tasks: Tasks, workers: list[int], seconds: float, silent_seconds: float) -> None:
    """Opens the devices, and with them this process's server.

    TensorFlow waits without end for a task that was stopped since it was asked whether it is there,
    and before it was connected to.
    """
    opening = Aside(tf.config.list_logical_devices, "tf_dsgd connects")
    addresses = [*tasks.ps.values(), *(tasks.workers[index] for index in workers)]
    limit = time.monotonic() + seconds
    while not opening.wait(deadlines.RETRY_SECONDS):
        silent = probing.not_answering(addresses, silent_seconds)
        if silent:
            names = ", ".join(tasks.name_at(address) for address in sorted(silent))
            raise TimeoutError(
                f"{names} stopped answering {silent_seconds:g} s ago, while this process "
                "connected to it, and TensorFlow waits for it. Start this script again."
            )
        if time.monotonic() > limit:
            names = ", ".join(tasks.name_at(address) for address in addresses)
            raise TimeoutError(
                f"TensorFlow has not connected to {names} within {seconds:g} s, though all of "
                "them answer. Is each a server of the same TensorFlow, and reached by no proxy? "
                "Start python -m tf_dsgd.serve on them again, then this script."
            )
    opening.result()
