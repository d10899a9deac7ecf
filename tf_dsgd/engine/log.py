"""Messages between peers in one process: a log of them, and how far each worker has read it.

A message is in the log under the number of the update that it is: versions count from 1. Workers
read it in that order, each up to where it was when that worker's fetch began. Whoever appends
removes what all have read, so the log is as long as the slowest reader is behind, which an exchange
rule that bounds staleness bounds. At a drain all have read all of it.

What is read outside (the primaries) is the model of a worker at a version, `shown`; a worker that
begins anew, as after a drain or when it joins, begins with that.
"""

from __future__ import annotations

import functools
import uuid
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tf_dsgd import _tf

_AWAY = np.iinfo(np.int64).max


class Log:
    """Which messages are there, and who has read them; counted under the shard's lock.

    Args:
        num_workers: number of workers that read.
        device: where it is.
    """

    def __init__(self, num_workers: int, device: str | None):
        make = functools.partial(_tf.make_variable, device=device)
        self.read_by = make(np.zeros([num_workers], np.int64), name="read")
        """Of each worker the last message that it has surely taken in; of one that is away, all."""
        self.first = make(np.int64(1), name="first")
        """The oldest message that is there, or the next one."""
        self.shown = make(np.int64(0), name="shown")
        """The version of the model that is read outside."""
        self.edition = make(np.int64(0), name="edition")
        """How often workers had to begin anew with that."""

    # -- traced, under the lock -------------------------------------------------------------

    def append(self, messages: Messages, version: tf.Tensor, tensors: Sequence[tf.Tensor]) -> None:
        """Adds the message that makes this version, and removes what all have read."""
        added = messages.put(version, tensors)
        with tf.control_dependencies([added]):
            read_by_all = tf.minimum(tf.reduce_min(self.read_by.read_value()), version - 1)
            (first,) = tf.while_loop(
                lambda number: number <= read_by_all,
                lambda number: [messages.remove(number)],
                [self.first.read_value()],
                parallel_iterations=1,
            )
        self.first.assign(first, read_value=False)

    def reads(self, worker: tf.Tensor, after: tf.Tensor) -> tf.Tensor:
        """A worker will read what comes after that message. An error if some of it is gone."""
        self._note(worker, after)
        return tf.debugging.assert_less_equal(
            self.first.read_value(),
            after + 1,
            "A message was removed from the log before a worker read it. That is a defect of "
            "tf_dsgd; please report it.",
        )

    def leaves(self, worker: tf.Tensor) -> None:
        """A worker is lost: nothing is kept for it."""
        self._note(worker, tf.constant(_AWAY, tf.int64))

    def _note(self, worker: tf.Tensor, number: tf.Tensor) -> None:
        self.read_by.scatter_update(tf.IndexedSlices(number[None], worker[None]))

    def begin_anew(self, messages: Messages, version: tf.Tensor) -> tf.Operation:
        """At rest: all have read all, and begin anew with what is shown, which is this version."""
        read_by = self.read_by.read_value()
        away = tf.equal(read_by, _AWAY)
        self.read_by.assign(tf.where(away, read_by, version), read_value=False)
        self.first.assign(version + 1, read_value=False)
        self.edition.assign_add(1, read_value=False)
        return messages.clear()

    # -- by the host, at rest ---------------------------------------------------------------

    def joins(self, worker: int) -> None:
        """A worker comes, and begins with what is shown."""
        self.read_by.scatter_update(tf.IndexedSlices([self.shown.read_value()], [worker]))

    def restore(self, version: int) -> None:
        """After a checkpoint: what is shown is this version, and nothing is unread."""
        self.read_by.assign(np.where(self.read_by.numpy() == _AWAY, _AWAY, version))
        self.first.assign(version + 1)
        self.shown.assign(version)
        self.edition.assign_add(1)


class Messages:
    """The messages of one program, by number: their tensors, in the memory of a device.

    A tensor is kept as it is, not copied. None is asked for that is not there: that would wait.

    Args:
        specs: of a message's tensors.
        device: where they are; None for a table on each device on which a function is called that
            names them. `put` and `get` may name another one.
    """

    def __init__(self, specs: Sequence[tf.TensorSpec], device: str | None):
        self._specs = list(specs)
        self._device = device
        self._places = np.arange(len(self._specs), dtype=np.int32)
        self._table = {
            "dtypes": [spec.dtype for spec in self._specs],
            "shared_name": f"tf_dsgd_messages_{uuid.uuid4().hex}",
        }
        if device is not None:
            end = weakref.finalize(self, _clear, device, self._table)
            end.atexit = False

    def put(
        self, number: tf.Tensor, tensors: Sequence[tf.Tensor], device: str | None = None
    ) -> tf.Operation:
        """Traces that a message is there from now on."""
        with tf.device(device or self._device):
            return tf.raw_ops.MapStage(
                key=number, indices=self._places, values=list(tensors), **self._table
            )

    def get(self, number: tf.Tensor, device: str | None = None) -> list[tf.Tensor]:
        """Traces the tensors of a message, which stays there."""
        with tf.device(device or self._device):
            found = tf.raw_ops.MapPeek(key=number, indices=self._places, **self._table)
        return self._of_their_shapes(found)

    def take(self, number: tf.Tensor) -> list[tf.Tensor]:
        """Traces the tensors of a message, which is there no more."""
        with tf.device(self._device):
            found = tf.raw_ops.MapUnstage(key=number, indices=self._places, **self._table)
        return self._of_their_shapes(found)

    def _of_their_shapes(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        for tensor, spec in zip(tensors, self._specs, strict=True):
            tensor.set_shape(spec.shape)
        return list(tensors)

    def remove(self, number: tf.Tensor) -> tf.Tensor:
        """Traces that a message is removed; gives the next number."""
        with tf.control_dependencies(self.take(number)):
            return number + 1

    def clear(self) -> Any:
        """Traces that no message is left."""
        with tf.device(self._device):
            return tf.raw_ops.MapClear(**self._table)


def _clear(device: str | None, table: dict[str, Any]) -> None:
    """Gives back the memory of messages that nobody will read."""
    with tf.init_scope(), tf.device(device):
        tf.raw_ops.MapClear(**table)
