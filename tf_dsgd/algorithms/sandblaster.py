"""Sandblaster's shards and workers (Dean et al., NIPS 2012, section 4.2, algorithm 1.2).

    worker:  fetch w once per evaluation;  takes portions of the batch while there are any
             sum <- sum + n g     for a portion of n examples, whose mean loss has the gradient g
             push(sum)            once per evaluation
    shard:   adds up the sums; the coordinator has it do dot products, scalings and axpy on its part

One message per worker and evaluation, because a message is as large as the model: a worker that is
lost takes its sum along, and its portions, which were its open lease, go to others. A straggler has
taken few portions, as others take those that are left; a backup task computes just these.

Loss and gradient are sums over examples of n times a portion's mean, divided by the number of all
examples. Whatever the portion adds once to its mean, as regularisation, is then in the mean of all
once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tf_dsgd import algorithm, arithmetic
from tf_dsgd.algorithms.downpour import AccrueGradient

_WHOLE_PASS = 1 << 16
_AT_ONCE = 1 << 16
"""Elements of a shard's vectors, all rows together, of which dot products are taken at a time."""


@dataclasses.dataclass(frozen=True)
class SumGradient(AccrueGradient):
    """Downpour's, without a local step, of gradients that count as often as there are examples."""

    rate: float | None = 0.0
    push_every: int = _WHOLE_PASS
    fetch_every: int = _WHOLE_PASS


@dataclasses.dataclass(frozen=True)
class OncePerEvaluation(algorithm.ExchangeRule):
    """A worker fetches as a pass over the data begins, and sends as it ends.

    Meanwhile it takes `at_once` portions at a time, so that the others have the rest.
    """

    push_every: int = _WHOLE_PASS
    fetch_every: int = _WHOLE_PASS
    at_once: int = 1

    def steps_to_event(self, step: int) -> int:
        return min(self.at_once, super().steps_to_event(step))

    def share(self, steps: int, left: int, workers: int) -> int:
        """Fewer towards the end of a pass, so that all workers end at about the same time."""
        return min(steps, -(-left // workers))


@dataclasses.dataclass(frozen=True)
class AddUp(algorithm.ServerRule):
    """Adds up what workers send; weights change by the coordinator's word alone."""

    def receive(self, shard: algorithm.Shard, message: algorithm.Message) -> bool:
        for i, tensor in enumerate(message.tensors):
            arithmetic.add(shard.cell("sum", i), tensor)
        return False


@dataclasses.dataclass(frozen=True)
class ShardVectors:
    """A shard's part of all vectors: what the coordinator has it do, between two evaluations.

    `rows` is m. Each method is traced for a shard; what it gives is that shard's part of a sum.
    """

    rows: int

    def _history(self, shard: algorithm.Shard, name: str, i: int) -> tf.Variable:
        return shard.cell(name, i, shape=[self.rows, *shard.weights[i].shape.as_list()])

    def moved(self, shard: algorithm.Shard) -> tf.Tensor:
        """Whether the weights are others than the coordinator has left.

        Sums of a pass that was not finished are forgotten.
        """
        moved = tf.constant(False)
        for i, weight in enumerate(shard.weights):
            same = weight.read_value() == shard.cell("base", i).read_value()
            moved |= tf.logical_not(tf.reduce_all(same))
            total = shard.cell("sum", i)
            total.assign(tf.zeros_like(total), read_value=False)
        return moved

    def measure(self, shard: algorithm.Shard, examples: tf.Tensor) -> tf.Tensor:
        """(g'd, g'g) of the mean gradient that a pass has left; keeps it."""
        slope = square = tf.zeros([], tf.float64)
        for i in range(len(shard.weights)):
            total = shard.cell("sum", i)
            gradient = total.read_value() / tf.cast(examples, total.dtype)
            shard.cell("tried", i).assign(gradient, read_value=False)
            total.assign(tf.zeros_like(total), read_value=False)
            slope += _dot(gradient, shard.cell("direction", i).read_value())
            square += _dot(gradient, gradient)
        return tf.stack([slope, square])

    def begin(self, shard: algorithm.Shard) -> tf.Tensor:
        """An iteration begins at the weights as they are, with the gradient measured last."""
        for i, weight in enumerate(shard.weights):
            shard.cell("base", i).assign(weight.read_value(), read_value=False)
            shard.cell("gradient", i).assign(shard.cell("tried", i).read_value(), read_value=False)
        return tf.zeros([])

    def aim(self, shard: algorithm.Shard, coefficients: tf.Tensor) -> tf.Tensor:
        """d <- sum_j c_j b_j."""
        m = self.rows
        for i in range(len(shard.weights)):
            gradient = shard.cell("gradient", i).read_value()
            c = tf.cast(coefficients, gradient.dtype)
            direction = c[2 * m] * gradient
            if m:
                direction += tf.tensordot(c[:m], self._history(shard, "s", i), 1)
                direction += tf.tensordot(c[m : 2 * m], self._history(shard, "y", i), 1)
            shard.cell("direction", i).assign(direction, read_value=False)
        return tf.zeros([])

    def move(self, shard: algorithm.Shard, step: tf.Tensor) -> tf.Tensor:
        """w <- w_0 + a d."""
        for i, weight in enumerate(shard.weights):
            direction = shard.cell("direction", i).read_value()
            place = shard.cell("base", i).read_value() + tf.cast(step, weight.dtype) * direction
            weight.assign(place, read_value=False)
        return tf.zeros([])

    def take(self, shard: algorithm.Shard, slot: tf.Tensor) -> tf.Tensor:
        """Row `slot` becomes (s, y) of the point evaluated last; dot products of those and g."""
        m = self.rows
        count = 3 if m else 1
        dots = tf.zeros([count, 2 * m + 1], tf.float64)
        for i, weight in enumerate(shard.weights):
            base, gradient = shard.cell("base", i), shard.cell("gradient", i)
            new = shard.cell("tried", i).read_value()
            vectors = [new]
            if m:
                s = weight.read_value() - base.read_value()
                y = new - gradient.read_value()
                vectors = [s, y, new]
                for name, row in (("s", s), ("y", y)):
                    arithmetic.set_row(self._history(shard, name, i), slot, row)
            base.assign(weight.read_value(), read_value=False)
            gradient.assign(new, read_value=False)
            dots += self._dots(shard, i, vectors)
        return dots

    def take_out(self, shard: algorithm.Shard) -> list[tf.Tensor]:
        """Of each weight the gradient, and the history: for a checkpoint between iterations."""
        return [cell.read_value() for cell in self._kept(shard)]

    def put_back(self, shard: algorithm.Shard, *values: tf.Tensor) -> tf.Tensor:
        """What `take_out` gave, at the weights as they are."""
        for cell, value in zip(self._kept(shard), values, strict=True):
            cell.assign(value, read_value=False)
        for i, weight in enumerate(shard.weights):
            shard.cell("base", i).assign(weight.read_value(), read_value=False)
        return tf.zeros([])

    def _kept(self, shard: algorithm.Shard) -> list[tf.Variable]:
        cells = []
        for i in range(len(shard.weights)):
            cells.append(shard.cell("gradient", i))
            if self.rows:
                cells += [self._history(shard, name, i) for name in ("s", "y")]
        return cells

    def _dots(self, shard: algorithm.Shard, i: int, vectors: list[tf.Tensor]) -> tf.Tensor:
        """`[vectors, 2m + 1]`."""
        last = products(vectors, vectors[-1][None])
        if not self.rows:
            return last
        histories = [self._history(shard, name, i).read_value() for name in ("s", "y")]
        return tf.concat([*(products(vectors, rows) for rows in histories), last], 1)


def products(vectors: Sequence[tf.Tensor], rows: tf.Tensor) -> tf.Tensor:
    """Dot products in double precision of each of `vectors` with each of `rows`.

    Of some thousand elements at a time, which stay in the processor's cache: all rows in double
    would be read from memory again and again, and take twice the memory of the history.
    """
    vectors = [tf.reshape(vector, [-1]) for vector in vectors]
    rows = tf.reshape(rows, [rows.shape[0], -1])
    size = rows.shape[1]
    at_once = max(_AT_ONCE // rows.shape[0], 1 << 13)

    def of_some(begin: Any, end: Any) -> tf.Tensor:
        part = tf.cast(rows[:, begin:end], tf.float64)
        # Faster than one matmul, which takes a matrix of three rows apart first.
        return tf.stack(
            [tf.linalg.matvec(part, tf.cast(v[begin:end], tf.float64)) for v in vectors]
        )

    if size <= at_once:
        return of_some(0, size)
    return tf.while_loop(
        lambda begin, _: begin < size,
        lambda begin, total: (
            begin + at_once,
            total + of_some(begin, tf.minimum(begin + at_once, size)),
        ),
        (tf.constant(0), tf.zeros([len(vectors), rows.shape[0]], tf.float64)),
        parallel_iterations=1,
    )[1]


def _dot(a: tf.Tensor, b: tf.Tensor) -> tf.Tensor:
    return products([a], b[None])[0, 0]
