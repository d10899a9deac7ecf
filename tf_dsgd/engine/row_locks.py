"""Locks of rows: whoever changes some rows holds the locks of these, and nobody those of all.

There are fewer locks than rows: row r of table t has lock (r + 131 t) mod 1024, which it shares
with other rows. All that a message needs are taken in ascending order, so that no two messages wait
for each other, and given back together. Nothing is waited for while they are held but what the
body computes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

import tensorflow as tf

from tf_dsgd import _tf_order
from tf_dsgd.engine.mutexes import mutexes

T = TypeVar("T")

_LOCKS = 1024
_BETWEEN_TABLES = 131


class RowLocks:
    """Locks of the rows of all tables on one shard.

    Args:
        device: where the shard is.
    """

    def __init__(self, device: str | None):
        self._device = device
        with tf.init_scope(), tf.device(device):
            self._handles = tf.stack(mutexes(self, _LOCKS, device))

    def held(self, rows: Mapping[int, tf.Tensor], body: Callable[[], T]) -> T:
        """Traces `body`, which runs while it holds the locks of these rows.

        Args:
            rows: by the number of a table, which of its rows; int32 or int64.
            body: traces what is done under the locks; they are given back when all of its
                operations are done, used or not.
        """
        if not rows:
            return body()
        with tf.device(self._device):
            wanted = tf.concat([_locks_of(table, r) for table, r in rows.items()], 0)
            ascending = tf.sort(tf.unique(wanted)[0])
            taken = self._take(ascending)
            result, created = _tf_order.traced(body)
            _tf_order.begin_after(taken.op, created)
            with tf.control_dependencies(created):
                _give_back(tf.identity(taken))
            return result

    def _take(self, numbers: tf.Tensor) -> tf.Tensor:
        """A list of the locks with these numbers, which are held once it is there."""

        def take(place: tf.Tensor, held: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            lock = tf.raw_ops.MutexLock(mutex=tf.gather(self._handles, numbers[place]))
            return place + 1, tf.raw_ops.TensorListPushBack(input_handle=held, tensor=lock)

        nothing = tf.raw_ops.EmptyTensorList(
            element_shape=tf.constant([], tf.int32),
            max_num_elements=-1,
            element_dtype=tf.variant,
        )
        return tf.while_loop(
            lambda place, _: place < tf.size(numbers), take, [0, nothing], parallel_iterations=1
        )[1]


def _locks_of(table: int, rows: tf.Tensor) -> tf.Tensor:
    return tf.cast((tf.cast(rows, tf.int64) + _BETWEEN_TABLES * table) % _LOCKS, tf.int32)


def _give_back(held: tf.Tensor) -> None:
    def give(left: tf.Tensor, held: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        held, lock = tf.raw_ops.TensorListPopBack(
            input_handle=held, element_shape=tf.constant([], tf.int32), element_dtype=tf.variant
        )
        tf.raw_ops.ConsumeMutexLock(mutex_lock=lock)
        return left - 1, held

    number = tf.raw_ops.TensorListLength(input_handle=held)
    tf.while_loop(lambda left, _: left > 0, give, [number, held], parallel_iterations=1)
