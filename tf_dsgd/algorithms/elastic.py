"""Elastic averaging SGD (Zhang, Choromanska, LeCun, NIPS 2015, algorithms 1 and 2).

    worker i:  every tau steps:   E = a (x_i - xc);   x_i <- x_i - E
               x_i <- optimizer_i(x_i, g)             slots of its own
    shard:     with the same E:   xc <- xc + E

tau = `average_every`, a = the elasticity, xc = the shard's weights (the paper's x tilde). EASGD:
the optimizer is SGD. EAMSGD: it is SGD with Nesterov momentum.

A worker sends x_i. The shard computes E, moves the center, and keeps E until that worker fetches,
so that the two move by the same E whatever others send between.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import tensorflow as tf

from tf_dsgd import algorithm, arithmetic
from tf_dsgd.algorithms.averaging import iterations_in
from tf_dsgd.arithmetic import Gradient


@dataclasses.dataclass(frozen=True)
class KeepWeights(algorithm.LocalRule):
    """The compiled optimizer runs on the worker, which keeps its weights and moves them by E."""

    sends = "state"
    keeps_weights = True

    def step(self, worker: algorithm.Worker, gradients: Sequence[Gradient]) -> None:
        """Nothing: the optimizer has already changed the worker's weights."""

    def message(self, worker: algorithm.Worker) -> list[Gradient]:
        _sent(worker).assign(1.0, read_value=False)
        return [tf.identity(weight.read_value()) for weight in worker.weights]

    def fetched(self, worker: algorithm.Worker, values: Sequence[Gradient]) -> None:
        # One that came back begins at the center: what its predecessor had sent is not its own.
        sent = tf.identity(_sent(worker).read_value())
        for weight, force in zip(worker.weights, values, strict=True):
            arithmetic.descend(weight, sent, force)
        _sent(worker).assign(0.0, read_value=False)


def _sent(worker: algorithm.Worker) -> tf.Variable:
    return worker.cell("sent", 0, shape=[], dtype=tf.float32)


@dataclasses.dataclass(frozen=True)
class Elastic(algorithm.ServerRule):
    """xc <- xc + E; E goes to the worker at its next fetch, once.

    `elasticity` is a; None for 0.9 / M.
    """

    elasticity: float | None = None

    def receive(self, shard: algorithm.Shard, message: algorithm.Message) -> bool:
        a = 0.9 / shard.num_workers if self.elasticity is None else self.elasticity
        for i, (center, sent) in enumerate(zip(shard.weights, message.tensors, strict=True)):
            wide = arithmetic.type_of_sums(sent.dtype)  # a difference of float16 may be no float16
            away = tf.cast(sent, wide) - tf.cast(center.read_value(), wide)
            force = tf.cast(a * away, sent.dtype)
            center.assign_add(force, read_value=False)
            arithmetic.set_row(_forces(shard, i), message.worker, force)
        shard.count_updates(iterations_in(shard, message.steps, shard.steps))
        return True

    def answer(self, shard: algorithm.Shard, worker: tf.Tensor, index: int) -> tf.Tensor:
        kept = _forces(shard, index)
        force = tf.identity(tf.gather(kept, worker))
        arithmetic.set_row(kept, worker, tf.zeros_like(force))
        return force


def _forces(shard: algorithm.Shard, index: int) -> tf.Variable:
    return shard.cell("force", index, per_worker=True)
