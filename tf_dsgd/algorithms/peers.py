"""Compressed SGD between peers (Strom, Interspeech 2015, algorithm 1): there is no server.

    every worker k, for each mini-batch:
        for each message that came, its own among them, in one order:   w_k <- w_k + sent
        dw <- optimizer_k(w_k, g) - w_k          slots of its own
        send C(dw) to all                        C holds back a residual, worker by worker

A worker's weights are what it began with and all messages that it has taken in; its own step is
seen by it, too, as what it has sent of it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import tensorflow as tf

from tf_dsgd import algorithm, arithmetic
from tf_dsgd.arithmetic import Gradient

MOST_AHEAD = 16
"""Messages that a worker may have sent more than the slowest: those wait in memory for that one."""


@dataclasses.dataclass(frozen=True)
class SendChange(algorithm.LocalRule):
    """The compiled optimizer's change of the weights is sent, and taken out again."""

    sends = "update"

    def step(self, worker: algorithm.Worker, gradients: Sequence[Gradient]) -> None:
        """Nothing: the optimizer has already changed the worker's weights."""

    def message(self, worker: algorithm.Worker) -> list[Gradient]:
        changes = []
        for i, weight in enumerate(worker.weights):
            before = worker.cell("before", i, copy_weight=True).read_value()
            changes.append(weight.read_value() - before)
            weight.assign(before, read_value=False)
        # Before a codec looks at a change, which it may find not to be finite.
        with tf.control_dependencies([weight.read_value() for weight in worker.weights]):
            return [tf.identity(change) for change in changes]

    def fetched(self, worker: algorithm.Worker, values: Sequence[Gradient]) -> None:
        for i, value in enumerate(values):
            worker.cell("before", i, copy_weight=True).assign(value, read_value=False)


@dataclasses.dataclass(frozen=True)
class AddToOwn(algorithm.PeerRule):
    """w_k <- w_k + sent."""

    def receive(self, worker: algorithm.Worker, message: algorithm.Message) -> None:
        for weight, change in zip(worker.weights, message.tensors, strict=True):
            arithmetic.add(weight, change)
