"""What a worker has of its own where workers send to one another, and how it takes in a message."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Protocol

import tensorflow as tf

from tf_dsgd.algorithm import Algorithm, Message, PeerRule, Worker
from tf_dsgd.engine.merged import Merged
from tf_dsgd.engine.shard import Shard
from tf_dsgd.engine.state import Replicated, Store
from tf_dsgd.engine.step import Step


class Parts(Protocol):
    """The other parts of a program, as far as they are needed here."""

    step: Step
    algorithm: Algorithm
    store: Store
    shards: list[Shard]
    merged: list[Merged]
    clock: Replicated

    @property
    def worker_view(self) -> Worker: ...
    @property
    def read_by_workers(self) -> list[Any]: ...
    @property
    def collection(self) -> Any: ...
    @property
    def wrapping(self) -> Any: ...
    @property
    def receiving(self) -> list[Any]: ...
    def unpacked(self, shard: int, parcel: Sequence[tf.Tensor]) -> Any: ...


class Copies:
    """Used while a program's functions are traced.

    Args:
        parts: the program's other parts.
        rule: what a worker does with a message.
    """

    def __init__(self, parts: Parts, rule: PeerRule):
        everybody, workers = list(range(parts.store.num_workers)), parts.store.num_workers
        for m in everybody:
            if list(rule.peers(m, workers)) != everybody:
                raise ValueError(
                    "Engines run peers that send to all workers, themselves included. Received: "
                    f"{rule!r}, by which worker {m} of {workers} sends to "
                    f"{list(rule.peers(m, workers))}."
                )
        self._parts = parts
        self._rule = rule

    @functools.cached_property
    def scalars(self) -> list[Any]:
        """Rates and counts, which are read at every fetch."""
        return [v for v in self._parts.read_by_workers if not v.shape.rank]

    @functools.cached_property
    def model(self) -> list[Any]:
        """What workers have of their own, all of one worker's: it can be shown."""
        changed = [each.variable for each in self._parts.merged]
        return [*self._parts.step.weights, *changed]

    @functools.cached_property
    def begun_with(self) -> list[Any]:
        """The model, and what else a worker has when it begins and does not change by itself."""
        return [*self.model, *(v for v in self._parts.read_by_workers if v.shape.rank)]

    def set_scalars(self, values: Sequence[tf.Tensor]) -> None:
        """A worker has read these."""
        for variable, value in zip(self.scalars, values, strict=True):
            variable.on_workers().template.assign(value, read_value=False)

    def begin(self, values: Sequence[tf.Tensor]) -> None:
        """Of `begun_with`, of a worker, these become the values."""
        for variable, value in zip(self.begun_with, values, strict=True):
            variable.on_workers().template.assign(value, read_value=False)

    def take_in(self, number: tf.Tensor, flat: Sequence[tf.Tensor]) -> None:
        """One message, before which there were so many."""
        parts = self._parts
        header, tensors, changes = parts.unpacked(0, flat)
        worker, _, _, version, steps = tf.unstack(header, 5)
        view = parts.worker_view
        codec = parts.algorithm.codec
        decoded = [codec.decode(view, i, sent) for i, sent in enumerate(tensors)]
        message = Message(worker, version, steps, number - version, decoded)
        parts.step.on_worker(lambda: self._rule.receive(view, message))
        for change, each in zip(changes, parts.merged, strict=True):
            each.take_in(change)

    def taken_in(self) -> None:
        """A worker's next mini-batches begin from here."""
        parts = self._parts
        values = [v.on_workers().template.read_value() for v in parts.step.weights]
        parts.step.on_worker(lambda: parts.algorithm.local.fetched(parts.worker_view, values))
        for each in parts.merged:
            each.begin()
