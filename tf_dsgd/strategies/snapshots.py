"""What each worker last fetched of a variable, kept on the variable's shard."""

from __future__ import annotations

import functools

import tensorflow as tf

from tf_dsgd import _tf


class Snapshots:
    """One value per worker of one variable; `[workers, ...]`, on the same device.

    A table that a worker fetches by rows is copied by the same rows, so that at every moment a
    worker's snapshot is of the moment at which that worker's copy was fetched, row by row.
    Its first values are never used: a worker fetches before it computes.
    """

    def __init__(self, variable: tf.Variable, num_workers: int):
        self._variable = variable
        shape = [num_workers, *variable.shape.as_list()]
        self._values = _tf.make_variable(
            functools.partial(tf.zeros, shape, variable.dtype),
            device=variable.device,
            dtype=variable.dtype,
            shape=shape,
            name="fetched_by_workers",
        )

    def take(self, worker: tf.Tensor, rows: tf.Tensor | None) -> None:
        """Copies the variable, or some of its rows, for a worker that fetches it now."""
        if rows is None:
            value = self._variable.read_value()[None]
            self._values.scatter_update(tf.IndexedSlices(value, worker[None]))
        else:
            value = self._variable.sparse_read(rows)
            self._values.scatter_nd_update(_places(worker, rows), value)

    def of(self, worker: tf.Tensor, rows: tf.Tensor | None) -> tf.Tensor:
        """What a worker last fetched of the variable, or of some of its rows."""
        if rows is None:
            return self._values.sparse_read(worker)
        return self._values.gather_nd(_places(worker, rows))

    @property
    def bytes(self) -> int:
        """Memory that all of them take."""
        return self._values.shape.num_elements() * self._values.dtype.size


def _places(worker: tf.Tensor, rows: tf.Tensor) -> tf.Tensor:
    return tf.stack([tf.fill(tf.shape(rows), worker), rows], 1)
