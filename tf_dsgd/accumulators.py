"""Sums of gradients, kept beside a weight; of sparse gradients only the rows that came."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tf_dsgd import arithmetic
from tf_dsgd.arithmetic import Gradient
from tf_dsgd.places import Place


class Accumulator:
    """The sum called `name` for weight `index` of a worker or a shard; at first zero.

    A table of a million rows is not copied for the hundred of which gradients came: of a sparse
    gradient its rows are kept, one after the other, until the sum is taken.
    """

    def __init__(self, place: Place, name: str, index: int):
        self._shape = place.weights[index].shape.as_list()
        self._dtype = place.weights[index].dtype
        self._wide = wide = arithmetic.type_of_sums(self._dtype)
        self._is_sparse = place.is_sparse(index)
        if self._is_sparse:
            row = self._shape[1:]
            self._rows = place.cell(f"{name}_rows", index, shape=[None], dtype=tf.int64)
            self._values = place.cell(f"{name}_values", index, shape=[None, *row], dtype=wide)
        else:
            self._total = place.cell(name, index, dtype=wide)

    @property
    def rows(self) -> tf.Tensor:
        """Rows of a sparse weight of which there are gradients in the sum; some repeatedly."""
        return self._rows.read_value()

    def put(self, gradient: Gradient) -> None:
        """sum := g."""
        gradient = arithmetic.cast(gradient, self._wide)
        if self._is_sparse:
            self._rows.assign(tf.cast(gradient.indices, tf.int64), read_value=False)
            self._values.assign(gradient.values, read_value=False)
        else:
            self._total.assign(gradient, read_value=False)

    def add(self, gradient: Gradient, factor: Any = None) -> None:
        """sum += factor g; without a factor, sum += g."""
        gradient = arithmetic.cast(gradient, self._wide)
        if self._is_sparse:
            if factor is not None:
                gradient = arithmetic.scaled(gradient, factor)
            indices = tf.cast(gradient.indices, tf.int64)
            self._rows.append(indices)
            self._values.append(gradient.values)
        elif factor is None:
            arithmetic.add(self._total, gradient)
        else:
            arithmetic.descend(self._total, -factor, gradient)

    def get(self) -> Gradient:
        """The sum.

        Each row is named once, so that an optimizer squares the sum of a row's gradients, as it
        does with a dense gradient.
        """
        return arithmetic.cast(self._sum(), self._dtype)

    def take(self, divisor: tf.Tensor | None = None) -> Gradient:
        """The sum, or its quotient by `divisor`, 0 where that is; it then begins anew from zero.

        The quotient is in the weight's type, which may hold a mean whose sum it cannot.
        """
        total = self._sum()
        if not self._is_sparse:
            self._total.assign(tf.zeros(tf.shape(total), self._wide), read_value=False)
        else:
            self._rows.assign(tf.zeros([0], tf.int64), read_value=False)
            empty = tf.zeros([0, *self._shape[1:]], self._wide)
            self._values.assign(empty, read_value=False)
        if divisor is not None:
            total = arithmetic.quotient(total, divisor)
        return arithmetic.cast(total, self._dtype)

    def _sum(self) -> Gradient:
        if not self._is_sparse:
            return tf.identity(self._total.read_value())
        values, rows = tf.identity(self._values.read_value()), tf.identity(self.rows)
        return arithmetic.merged_rows(tf.IndexedSlices(values, rows, tf.constant(self._shape)))
