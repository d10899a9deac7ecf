"""Two algorithms written against the contract, to show that it holds them."""

from __future__ import annotations

import dataclasses

import tensorflow as tf

from tf_dsgd import algorithm, arithmetic
from tf_dsgd.algorithms.downpour import AccrueGradient, Periods, inverse_staleness


@dataclasses.dataclass(frozen=True)
class Softsync(algorithm.ServerRule):
    """Zhang et al., IJCAI 2016: w -= (1/c) sum_l alpha(tau_l) g_l, when c gradients are there."""

    gradients_per_update: int

    def receive(self, shard, message):
        count = shard.counter("collected")
        sums = [shard.cell("sum", i) for i in range(len(shard.weights))]
        factor = inverse_staleness(message.staleness)
        for total, gradient in zip(sums, message.tensors, strict=True):
            arithmetic.add(total, arithmetic.scaled(gradient, factor))
        count.assign_add(1)
        return tf.cond(
            count.read_value() >= self.gradients_per_update,
            lambda: self.use(shard, sums, count),
            lambda: False,
        )

    def use(self, shard, sums, count):
        number = tf.cast(count.read_value(), tf.float32)
        shard.optimize([s.read_value() / number for s in sums])
        for total in sums:
            total.assign(tf.zeros_like(total))
        count.assign(0)
        return True

    def flush(self, shard):
        count = shard.counter("collected")
        sums = [shard.cell("sum", i) for i in range(len(shard.weights))]
        return tf.cond(count.read_value() > 0, lambda: self.use(shard, sums, count), lambda: False)


@dataclasses.dataclass(frozen=True)
class AdaptiveRevision(algorithm.ServerRule):
    """McMahan, Streeter, NIPS 2014, as in ALGORITHMS: gbar_old is kept per worker on the shard."""

    alpha: float

    def receive(self, shard, message):
        for i, (x, g) in enumerate(zip(shard.weights, message.tensors, strict=True)):
            gbar, z, top = (shard.cell(name, i) for name in ("gbar", "z_less_1", "top_less_1"))
            seen = shard.cell("gbar_old", i, per_worker=True)
            backlog = gbar - tf.gather(seen, message.worker)
            eta_old = self.alpha / tf.sqrt(1.0 + top)
            z.assign_add(g * g + 2.0 * g * backlog)
            top.assign(tf.maximum(z, top))
            eta = self.alpha / tf.sqrt(1.0 + top)
            x.assign_add(-eta * g + (eta_old - eta) * backlog)
            gbar.assign_add(g)
        shard.count_updates()
        return True

    def fetched(self, shard, worker):
        for i in range(len(shard.weights)):
            seen = shard.cell("gbar_old", i, per_worker=True)
            seen.scatter_update(
                tf.IndexedSlices(shard.cell("gbar", i).read_value()[None], worker[None])
            )
        return False


def softsync(c: int) -> algorithm.Algorithm:
    return algorithm.Algorithm(AccrueGradient(rate=0.0), Periods(), Softsync(c))


def adaptive_revision(alpha: float) -> algorithm.Algorithm:
    return algorithm.Algorithm(AccrueGradient(rate=0.0), Periods(), AdaptiveRevision(alpha))
