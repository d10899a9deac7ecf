"""The devices of workers of this process, each of which may have several."""

from __future__ import annotations

import os
from collections.abc import Sequence

import tensorflow as tf

from tf_dsgd import _tf
from tf_dsgd.checks import integer
from tf_dsgd.resuming import TASKS_PER_WORKER

_MOST = 64
"""Devices of a worker; and more logical devices than that are not made for all together."""


def checked(value: object, name: str = "devices_per_worker") -> int:
    """How many devices a worker has: an integer from 1 to 64."""
    return integer(name, value, 1, below=_MOST + 1)


def tasks(value: object) -> int:
    """`tasks_per_worker`: as `checked`, of processes; None: what the launcher says, or 1."""
    launched = os.environ.get(TASKS_PER_WORKER, "").strip()
    if value is None and launched:
        number = int(launched) if launched.isascii() and launched.isdecimal() else launched
        return checked(number, TASKS_PER_WORKER)
    return 1 if value is None else checked(value, "tasks_per_worker")


def shown(per_worker: int) -> str:
    """What a cluster's `repr` says of them; nothing of one device."""
    return "" if per_worker == 1 else f", devices_per_worker={per_worker}"


def prepare(per_worker: int, workers: int) -> None:
    """Has TensorFlow make as many logical CPU devices, if workers are to have several each.

    Where there are too many workers for that, some share devices.

    Raises:
        RuntimeError: if TensorFlow has opened its devices, and they are fewer than one worker's.
    """
    if per_worker == 1:
        return
    if _tf.devices_initialised():
        there = len(tf.config.list_logical_devices("CPU"))
        if there < per_worker:
            raise RuntimeError(
                f"devices_per_worker={per_worker} needs as many logical CPU devices, and "
                f"TensorFlow has opened {there}, which it does at the first operation. Make the "
                "strategy before anything else uses TensorFlow, or call, right after the imports, "
                "tf.config.set_logical_device_configuration(tf.config.list_physical_devices"
                f'("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * {per_worker * workers}).'
            )
        return
    cpu = tf.config.list_physical_devices("CPU")[0]
    wanted = per_worker * min(workers, max(1, _MOST // per_worker))
    if len(tf.config.get_logical_device_configuration(cpu) or ()) < wanted:
        tf.config.set_logical_device_configuration(
            cpu, [tf.config.LogicalDeviceConfiguration()] * wanted
        )


def of_parts(devices: Sequence[str], workers: int, per_worker: int) -> list[list[str]]:
    """Each worker's devices, of those that there are, in turn.

    Raises:
        ValueError: if they are fewer than one worker's.
    """
    if len(devices) < per_worker:
        raise ValueError(
            f"devices_per_worker={per_worker} needs as many devices of one kind. Received: "
            f"{len(devices)}, {', '.join(devices)}. Take fewer; or, where a GPU is to be cut, set "
            "logical devices on it by tf.config.set_logical_device_configuration."
        )
    turns = [range(m * per_worker, (m + 1) * per_worker) for m in range(workers)]
    return [[devices[i % len(devices)] for i in turn] for turn in turns]
