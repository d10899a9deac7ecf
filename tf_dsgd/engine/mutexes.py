"""Locks that are operations of TensorFlow, on a device."""

from __future__ import annotations

import contextlib
import uuid
import weakref

import tensorflow as tf


def mutexes(owner: object, number: int, device: str | None) -> list[tf.Tensor]:
    """Makes locks, which live as long as their owner.

    TensorFlow gives each a thread of its own, and ends that only when it is told to.
    """
    with tf.init_scope(), tf.device(device):
        made = [
            tf.raw_ops.MutexV2(shared_name=f"tf_dsgd_{uuid.uuid4().hex}") for _ in range(number)
        ]
    weakref.finalize(owner, _destroy, made).atexit = False
    return made


def _destroy(handles: list[tf.Tensor]) -> None:
    # Those of a task that is gone are gone, too.
    with contextlib.suppress(tf.errors.OpError), tf.init_scope():
        for handle in handles:
            tf.raw_ops.DestroyResourceOp(resource=handle, ignore_lookup_error=True)
