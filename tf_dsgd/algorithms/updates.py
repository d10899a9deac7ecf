"""Update-based asynchronous SGD (Strom, Interspeech 2015, without the compression).

    worker:  w_local <- optimizer_m(w_local, g)      slots of its own
             every n_push steps: push(dW), the change made since the last push
    server:  w <- w + lambda(tau) dW

A worker keeps `seen`, the weights less what it has not sent yet, so that dW = w_local - seen
whatever the two periods are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import tensorflow as tf

from tf_dsgd import algorithm, arithmetic
from tf_dsgd.arithmetic import Gradient


@dataclasses.dataclass(frozen=True)
class CompiledOptimizerOnWorker(algorithm.LocalRule):
    """Each worker runs the compiled optimizer and sends the change of the weights."""

    sends = "update"

    def step(self, worker: algorithm.Worker, gradients: Sequence[Gradient]) -> None:
        """Nothing: the optimizer has already changed the worker's weights."""

    def message(self, worker: algorithm.Worker) -> list[Gradient]:
        changes = []
        for i, weight in enumerate(worker.weights):
            seen = worker.cell("seen", i, copy_weight=True)
            now = tf.identity(weight.read_value())
            changes.append(now - seen.read_value())
            seen.assign(now, read_value=False)
        return changes

    def fetched(self, worker: algorithm.Worker, values: Sequence[Gradient]) -> None:
        for i, (weight, value) in enumerate(zip(worker.weights, values, strict=True)):
            seen = worker.cell("seen", i, copy_weight=True)
            unsent = arithmetic.difference(weight.read_value(), seen.read_value())
            weight.assign(value + unsent, read_value=False)
            seen.assign(value, read_value=False)


@dataclasses.dataclass(frozen=True)
class AddUpdate(algorithm.ServerRule):
    """w <- w + lambda(tau) dW."""

    scaling: Callable[[tf.Tensor], tf.Tensor] | None = None

    def receive(self, shard: algorithm.Shard, message: algorithm.Message) -> bool:
        factor = 1.0 if self.scaling is None else self.scaling(message.staleness)
        for weight, change in zip(shard.weights, message.tensors, strict=True):
            arithmetic.add(weight, arithmetic.scaled(change, factor))
        # The optimizer made an update at every mini-batch: its bias correction goes by that.
        shard.count_updates(message.steps)
        return True
