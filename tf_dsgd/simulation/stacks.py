"""What the workers of a study own."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from tf_dsgd import _tf


class Stack:
    """One variable of every worker, as rows; one of them at a time is in `copy`.

    Args:
        copy: takes the workers' places in turn.
        first: what the rows are at first.
    """

    def __init__(self, copy: tf.Variable, first: np.ndarray):
        self._copy, self._first = copy, copy.numpy()
        self._rows = _tf.make_variable(first, device="CPU:0", name="stack")

    def follow(self) -> None:
        """All rows are what the variable was given in place of its first value."""
        value = self._copy.numpy()
        if not np.array_equal(value, self._first):
            self._rows.assign(np.repeat(value[None], self._rows.shape[0], 0))

    def squares(self) -> np.ndarray:
        """Of each row the sum of its squares."""
        rows = self._rows.numpy()
        return np.sum(np.square(rows.reshape(len(rows), -1), dtype=np.float64), axis=1)

    def load(self, worker: tf.Tensor) -> None:
        """Takes a worker's row."""
        self._copy.assign(self._rows.sparse_read(worker), read_value=False)

    def store(self, worker: tf.Tensor) -> None:
        """Puts it back."""
        row = self._copy.read_value()[None]
        self._rows.scatter_update(tf.IndexedSlices(row, worker[None]))
