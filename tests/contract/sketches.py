"""Algorithms and a codec written against the contract, to show that it holds them."""

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


@dataclasses.dataclass(frozen=True)
class Hogwild(algorithm.ServerRule):
    """Recht et al., NIPS 2011, algorithm 1, with a server in place of shared memory.

    w -= rate g.
    """

    rate: float

    lock_free = (
        "The rule only subtracts. A dense gradient is subtracted from a variable as a whole; "
        "of rows that two messages share, a lost update is as rare as the sharing."
    )

    def receive(self, shard, message):
        for weight, gradient in zip(shard.weights, message.tensors, strict=True):
            step = arithmetic.scaled(gradient, self.rate)
            if isinstance(step, tf.IndexedSlices):
                weight.scatter_sub(step)
            else:
                weight.assign_sub(step, read_value=False)
        shard.count_updates()
        return True


@dataclasses.dataclass(frozen=True)
class Threshold(algorithm.Codec):
    """Strom, Interspeech 2015, without its one bit: only what has grown to tau travels.

    r <- r + g;  sent = r where |r| >= tau, else 0;  r <- r - sent. As (places, values): how many
    is known only when it runs.
    """

    tau: float

    repeatable = False  # r is the worker's own

    def encode(self, worker, index, tensor):
        residual = worker.cell("residual", index)
        grown = tf.reshape(residual.read_value() + tensor, [-1])
        large = tf.abs(grown) >= self.tau
        kept = tf.where(large, tf.zeros_like(grown), grown)
        residual.assign(tf.reshape(kept, tensor.shape), read_value=False)
        return [tf.where(large)[:, 0], tf.boolean_mask(grown, large)]

    def decode(self, place, index, sent):
        places, values = sent
        shape = place.weights[index].shape
        flat = tf.scatter_nd(places[:, None], values, [shape.num_elements()])
        return tf.reshape(flat, shape)


@dataclasses.dataclass(frozen=True)
class ByRow(algorithm.ServerRule):
    """A made-up rule that must know which rows it has.

    w_r -= g_r / (1 + r), r being counted in the whole table.
    """

    def receive(self, shard, message):
        for i, (weight, gradient) in enumerate(zip(shard.weights, message.tensors, strict=True)):
            rows = shard.rows(i)
            r = tf.cast(rows.start + rows.step * gradient.indices, weight.dtype)
            values = gradient.values / (1.0 + r)[:, None]
            weight.scatter_sub(tf.IndexedSlices(values, gradient.indices))
        return True


@dataclasses.dataclass(frozen=True)
class SubtractFromPeers(algorithm.PeerRule):
    """Strom, algorithm 1: every worker, the sender too, subtracts what was sent."""

    rate: float

    def receive(self, worker, message):
        for weight, sent in zip(worker.weights, message.tensors, strict=True):
            arithmetic.descend(weight, self.rate, sent)


def hogwild(rate: float, codec: algorithm.Codec | None = None) -> algorithm.Algorithm:
    """Workers send gradients at once, and make no step of their own."""
    rules = AccrueGradient(rate=0.0), Periods(), Hogwild(rate)
    return algorithm.Algorithm(*rules, codec or algorithm.Codec())


def peers(rate: float, codec: algorithm.Codec) -> algorithm.Algorithm:
    return algorithm.Algorithm(AccrueGradient(0.0), Periods(), SubtractFromPeers(rate), codec)


def softsync(c: int) -> algorithm.Algorithm:
    return algorithm.Algorithm(AccrueGradient(rate=0.0), Periods(), Softsync(c))


def adaptive_revision(alpha: float) -> algorithm.Algorithm:
    return algorithm.Algorithm(AccrueGradient(rate=0.0), Periods(), AdaptiveRevision(alpha))
