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

from tf_dsgd import algorithm
from tf_dsgd.accumulators import Accumulator
from tf_dsgd.algorithms.downpour import inverse_staleness


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
            factor = tf.cast(self.scaling(message.staleness), tf.float64)
            _factors(shard).assign_add(factor, read_value=False)
        for total, gradient in zip(_sums(shard), message.tensors, strict=True):
            total.add(gradient, factor)
        _collected(shard).assign_add(1, read_value=False)
        full = _collected(shard).read_value() >= self.gradients_per_update
        return tf.cond(full, lambda: self._updated(shard), lambda: False)

    def flush(self, shard: algorithm.Shard) -> tf.Tensor | bool:
        """An update with the messages that are there, c being their number."""
        some = _collected(shard).read_value() > 0
        return tf.cond(some, lambda: self._updated(shard), lambda: False)

    def _updated(self, shard: algorithm.Shard) -> tf.Tensor:
        return shard.once("update", lambda: self._update(shard))

    def _update(self, shard: algorithm.Shard) -> bool:
        total = count = tf.cast(_collected(shard).read_value(), tf.float64)
        if self.scaling is not None:
            total = _factors(shard).read_value()
            _factors(shard).assign(0.0, read_value=False)
        # 0 where every factor was 0: the step is 0 then, whatever the gradient.
        gradients = [each.take(total) for each in _sums(shard)]
        shard.optimize(gradients, 1.0 if self.scaling is None else total / count)
        _collected(shard).assign(0, read_value=False)
        return True


def _collected(shard: algorithm.Shard) -> tf.Variable:
    return shard.counter("collected")


def _factors(shard: algorithm.Shard) -> tf.Variable:
    return shard.counter("factors", tf.float64)


def _sums(shard: algorithm.Shard) -> list[Accumulator]:
    return [Accumulator(shard, "sum", i) for i in range(len(shard.weights))]
