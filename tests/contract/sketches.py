"""Three algorithms written against the contract, to show that it holds them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

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
        return ()


@dataclasses.dataclass(frozen=True)
class SendState(algorithm.LocalRule):
    """Local SGD: the compiled optimizer on the worker; weights and slots are sent and taken."""

    sends = "update"

    def step(self, worker, gradients):
        pass

    def message(self, worker):
        return [tf.identity(v.read_value()) for v in [*worker.weights, *_floats(worker.slots)]]

    def fetched(self, worker, values, extras):
        for weight, value in zip(worker.weights, values, strict=True):
            weight.assign(value)
        started = extras[0]
        for slot, value in zip(_floats(worker.slots), extras[1:], strict=True):
            slot.assign(tf.where(started, value, slot))


def _floats(slots: Sequence[tf.Variable]) -> list[tf.Variable]:
    return [s for s in slots if s.dtype.is_floating]


@dataclasses.dataclass(frozen=True)
class Mean(algorithm.ServerRule):
    """The mean of all workers' weights and slots, once all have sent; fewer at a drain."""

    num_slots: int

    def cells(self, shard):
        weights = len(shard.weights)
        names = [("weight", i) for i in range(weights)]
        names += [("slot", i) for i in range(self.num_slots)]
        return [shard.cell(f"sum_{n}", i) for n, i in names], [
            shard.cell(f"mean_{n}", i) for n, i in names
        ]

    def receive(self, shard, message):
        sums, means = self.cells(shard)
        for total, tensor in zip(sums, message.tensors, strict=True):
            total.assign_add(tensor)
        count = shard.counter("arrived")
        count.assign_add(1)
        return tf.cond(
            count.read_value() >= shard.num_workers,
            lambda: self.use(shard, sums, means, count),
            lambda: False,
        )

    def use(self, shard, sums, means, count):
        number = tf.cast(count.read_value(), tf.float32)
        for total, mean in zip(sums, means, strict=True):
            mean.assign(total / number)
            total.assign(tf.zeros_like(total))
        for weight, mean in zip(shard.weights, means, strict=False):
            weight.assign(mean)
        count.assign(0)
        shard.counter("rounds").assign_add(1)
        return True

    def fetched(self, shard, worker):
        started = shard.counter("rounds").read_value() > 0
        return [started, *[m.read_value() for m in self.cells(shard)[1][len(shard.weights) :]]]

    def flush(self, shard):
        sums, means = self.cells(shard)
        count = shard.counter("arrived")
        return tf.cond(
            count.read_value() > 0, lambda: self.use(shard, sums, means, count), lambda: False
        )


@dataclasses.dataclass(frozen=True)
class Barrier(algorithm.ExchangeRule):
    """A fetch is answered when the mean that the worker has sent to is there."""

    waits_for_version = True

    def may_fetch(self, pushed_at, version):
        return version > pushed_at


def softsync(c: int) -> algorithm.Algorithm:
    return algorithm.Algorithm(AccrueGradient(rate=0.0), Periods(), Softsync(c))


def adaptive_revision(alpha: float) -> algorithm.Algorithm:
    return algorithm.Algorithm(AccrueGradient(rate=0.0), Periods(), AdaptiveRevision(alpha))


def averaging(every: int, num_slots: int) -> algorithm.Algorithm:
    return algorithm.Algorithm(SendState(), Barrier(every, every), Mean(num_slots))
