"""Workers and shards that a test makes and calls itself, where no engine runs a rule yet."""

from __future__ import annotations

import tensorflow as tf


class Place:
    """Eager memory; of a shard the weights may be every `step`-th row of whole ones."""

    def __init__(self, values, first=0, step=1):
        self.weights = [tf.Variable(value) for value in values]
        self._first, self._step = first, step
        self._cells = {}
        self.said = {}

    def cell(self, name, index, *, shape=None, dtype=None, copy_weight=False):
        weight = self.weights[index]
        if (name, index) not in self._cells:
            empty = tf.zeros(weight.shape if shape is None else shape, dtype or weight.dtype)
            self._cells[name, index] = tf.Variable(weight if copy_weight else empty)
        return self._cells[name, index]

    def encoded(self, index, emitted, square):
        self.said[index] = int(emitted), float(square)

    def is_sparse(self, index):
        return False

    def is_copied(self, index):
        return True

    def rows(self, index):
        count = self.weights[index].shape[0]
        return range(self._first, self._first + self._step * count, self._step)
