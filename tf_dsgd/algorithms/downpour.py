"""Downpour SGD (Dean et al., Large Scale Distributed Deep Networks, NIPS 2012, algorithm 1.1).

    worker:  if step % n_fetch == 0:  w_local <- fetch()
             g <- gradient(w_local);  accrued <- accrued + g;  w_local <- w_local - alpha g
             step <- step + 1
             if step % n_push == 0:   push(accrued);  accrued <- 0
    server:  w <- optimizer(w, accrued)          (the paper's: Adagrad)

n_push = `push_every`, n_fetch = `fetch_every`, alpha = the local rate.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import tensorflow as tf

from tf_dsgd import algorithm, arithmetic
from tf_dsgd.accumulators import Accumulator
from tf_dsgd.arithmetic import Gradient


@dataclasses.dataclass(frozen=True)
class AccrueGradient(algorithm.LocalRule):
    """Accrues gradients; between fetches the local copy makes plain SGD steps.

    `rate` is alpha: a number, None for the compiled optimizer's rate, 0 for no local step.
    """

    rate: float | None = None
    push_every: int = 1
    fetch_every: int = 1

    repeatable = True

    def step(self, worker: algorithm.Worker, gradients: Sequence[Gradient]) -> None:
        for i, gradient in enumerate(gradients):
            accrued = _accrued(worker, i)
            if self.push_every == 1:
                accrued.put(gradient)  # every message holds one
            else:
                accrued.add(gradient)
        # Nobody would see a step that the next fetch overwrites.
        if self.rate != 0 and self.fetch_every > 1:
            for i, gradient in enumerate(worker.local_gradients(gradients)):
                alpha = worker.rate(i) if self.rate is None else self.rate
                arithmetic.descend(worker.weights[i], alpha, gradient)

    def message(self, worker: algorithm.Worker) -> list[Gradient]:
        sums = [_accrued(worker, i) for i in range(len(worker.weights))]
        return [accrued.get() if self.push_every == 1 else accrued.take() for accrued in sums]

    def fetched(self, worker: algorithm.Worker, values: Sequence[Gradient]) -> None:
        for weight, value in zip(worker.weights, values, strict=True):
            arithmetic.write(weight, value)

    def unsent_rows(self, worker: algorithm.Worker, index: int) -> tf.Tensor | None:
        return _accrued(worker, index).rows if self.rate != 0 else None


def _accrued(worker: algorithm.Worker, index: int) -> Accumulator:
    return Accumulator(worker, "accrued", index)


@dataclasses.dataclass(frozen=True)
class Periods(algorithm.ExchangeRule):
    """Downpour's exchange: two periods, a warm start, and optionally bounded staleness."""

    warm_start_steps: int = 0
    max_staleness: int | None = None

    def may_join(self, worker: int, steps: int) -> bool:
        return worker == 0 or steps >= self.warm_start_steps

    @property
    def bounds_staleness(self) -> bool:
        return self.max_staleness is not None

    def may_start(self, clock: int, slowest: int) -> bool:
        """Ho et al., NIPS 2013: at most `max_staleness` rounds ahead of the slowest worker."""
        return self.max_staleness is None or clock - slowest <= self.max_staleness


def inverse_staleness(staleness: tf.Tensor) -> tf.Tensor:
    """1 / tau, and 1 where tau is 0 (Zhang et al., IJCAI 2016, eq. 6)."""
    return 1.0 / tf.maximum(tf.cast(staleness, tf.float64), 1.0)


@dataclasses.dataclass(frozen=True)
class CompiledOptimizer(algorithm.ServerRule):
    """One update by the compiled Keras optimizer for every message, its step times f(tau)."""

    scaling: Callable[[tf.Tensor], tf.Tensor] | None = None

    def receive(self, shard: algorithm.Shard, message: algorithm.Message) -> bool:
        scale = 1.0 if self.scaling is None else self.scaling(message.staleness)
        shard.optimize(message.tensors, scale, message)
        return True

    def fetched(self, shard: algorithm.Shard, worker: tf.Tensor) -> bool:
        shard.remember(worker)
        return False
