"""n-softsync (Zhang, Gupta, Lian, Liu, Staleness-Aware Async-SGD, IJCAI 2016; alpha: eq. 6).

    worker:  w_local <- fetch();  push(gradient(w_local));  and so on, waiting for nobody
    server:  collect c messages, then  w <- w - (1/c) sum_l alpha(tau_l) g_l,  version += 1
             c = floor(lambda / n),  alpha(tau) = alpha_0 f(tau),  f(tau) = 1 / tau, and 1 at 0

c = `gradients_per_update`, f = `scaling`, tau_l = (version when l arrives) - (version that its
gradient was computed on). The paper's optimizer is linear in the gradient. For any other the same
sum is split into a gradient and a step size,

    g = sum_l f(tau_l) g_l / sum_l f(tau_l),        step times (1/c) sum_l f(tau_l),

of which the product is the paper's: an optimizer that divides a gradient's scale out again
(Adagrad, RMSprop, Adam) sees the weighted mean, and makes a smaller step for a staler collection.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import tensorflow as tf

from tf_dsgd import algorithm, arithmetic
from tf_dsgd.algorithms.downpour import inverse_staleness, merged_rows
from tf_dsgd.arithmetic import Gradient


@dataclasses.dataclass(frozen=True)
class CollectGradients(algorithm.ServerRule):
    """One update by the compiled optimizer for every c messages, each weighted by f(tau)."""

    gradients_per_update: int
    scaling: Callable[[tf.Tensor], tf.Tensor] | None = inverse_staleness

    @property
    def messages_per_update(self) -> int:
        return self.gradients_per_update

    def receive(self, shard: algorithm.Shard, message: algorithm.Message) -> tf.Tensor | bool:
        factor = None
        if self.scaling is not None:
            factor = tf.cast(self.scaling(message.staleness), tf.float32)
            _factors(shard).assign_add(factor, read_value=False)
        for i in range(len(shard.weights)):
            _collect(shard, i, message.tensors[i], factor)
        _collected(shard).assign_add(1, read_value=False)
        full = _collected(shard).read_value() >= self.gradients_per_update
        return tf.cond(full, lambda: self._update(shard), lambda: False)

    def flush(self, shard: algorithm.Shard) -> tf.Tensor | bool:
        """An update with the messages that are there, c being their number."""
        some = _collected(shard).read_value() > 0
        return tf.cond(some, lambda: self._update(shard), lambda: False)

    def _update(self, shard: algorithm.Shard) -> bool:
        total = count = tf.cast(_collected(shard).read_value(), tf.float32)
        if self.scaling is not None:
            total = _factors(shard).read_value()
            _factors(shard).assign(0.0, read_value=False)
        gradients = [_take(shard, i, total) for i in range(len(shard.weights))]
        shard.optimize(gradients, 1.0 if self.scaling is None else total / count)
        _collected(shard).assign(0, read_value=False)
        return True


def _collected(shard: algorithm.Shard) -> tf.Variable:
    return shard.counter("collected")


def _factors(shard: algorithm.Shard) -> tf.Variable:
    return shard.counter("factors", tf.float32)


def _collect(shard: algorithm.Shard, i: int, gradient: Gradient, factor: tf.Tensor | None) -> None:
    """sum += f(tau) g; of a sparse gradient only its rows are kept."""
    if not shard.is_sparse(i):
        total = shard.cell("sum", i)
        if factor is None:
            arithmetic.add(total, gradient)
        else:
            arithmetic.descend(total, -factor, gradient)
        return
    if factor is not None:
        gradient = arithmetic.scaled(gradient, factor)
    rows, values = _sparse_cells(shard, i)
    rows.assign(tf.concat([rows.read_value(), tf.cast(gradient.indices, tf.int64)], 0))
    values.assign(tf.concat([values.read_value(), gradient.values], 0))


def _take(shard: algorithm.Shard, i: int, divisor: tf.Tensor) -> Gradient:
    """The sum by `divisor`; starts a new one."""
    if not shard.is_sparse(i):
        total = shard.cell("sum", i)
        mean = _divided(total.read_value(), divisor)
        total.assign(tf.zeros_like(mean), read_value=False)
        return mean
    rows, values = _sparse_cells(shard, i)
    shape = shard.weights[i].shape.as_list()
    collected = tf.IndexedSlices(values.read_value(), rows.read_value(), tf.constant(shape))
    # Each row once, so that an optimizer squares its mean, as it does with a dense gradient.
    merged = merged_rows(collected)
    rows.assign(tf.zeros([0], tf.int64))
    values.assign(tf.zeros([0, *shape[1:]], values.dtype))
    return tf.IndexedSlices(_divided(merged.values, divisor), merged.indices, merged.dense_shape)


def _divided(total: tf.Tensor, divisor: tf.Tensor) -> tf.Tensor:
    """total / divisor; 0 where every factor was 0: the step is 0 then, whatever the gradient."""
    return tf.math.divide_no_nan(total, tf.cast(divisor, total.dtype))


def _sparse_cells(shard: algorithm.Shard, i: int) -> tuple[tf.Variable, tf.Variable]:
    row = shard.weights[i].shape.as_list()[1:]
    rows = shard.cell("sum_rows", i, shape=[None], dtype=tf.int64)
    return rows, shard.cell("sum_values", i, shape=[None, *row])
