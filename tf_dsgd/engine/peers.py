"""What rounds are made of where workers send to one another: see `PeerRule`.

    appending(content)    shard    in place of the server rule: a message joins the log
    fetching() -> version worker   takes in what the log has, in place of a fetch from shards
    showing()             worker   its model becomes what is read outside

A worker's copy is the state that it began with and all messages up to a number, its own among them:
a step's own changes are taken out again when they are sent. So copies that have taken in the same
messages are the same, to the bit. BatchNorm's moving statistics, and other state of layers, come
with the messages, and are composed as on a shard (`engine.merged`), in that same order.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import tensorflow as tf

from tf_dsgd import _tf
from tf_dsgd.algorithm import Algorithm, Message, PeerRule, Worker
from tf_dsgd.engine.log import Log, Messages
from tf_dsgd.engine.merged import Merged
from tf_dsgd.engine.shard import Shard
from tf_dsgd.engine.state import WORKER, Replicated, Store, clock_parts
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
    def receiving(self) -> list[Any]: ...
    def unpacked(self, shard: int, parcel: Sequence[tf.Tensor]) -> Any: ...
    def set_clock(
        self,
        changes: dict[int, tf.Tensor],
        fixed: tf.Tensor,
        versions: tf.Tensor,
        fetched: tf.Tensor,
    ) -> None: ...


class PeerParts:
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
        self._messages: Messages | None = None
        with tf.init_scope():
            self._edition = parts.store.replicate(
                lambda _: np.int64(-1), dtype=tf.int64, name="edition"
            )
        """With which model each worker began, as `Log.edition` counts; -1 where with none yet."""

    @property
    def _shard(self) -> Shard:
        return self._parts.shards[0]

    @property
    def _log(self) -> Log:
        if self._shard.log is None:
            raise RuntimeError(f"{self._shard!r} has no log.")
        return self._shard.log

    # -- shard ------------------------------------------------------------------------------

    def appending(self, content: Any) -> bool:
        """Traces that a message that was accepted joins the log; it is a new version."""
        flat = tf.nest.flatten(content, expand_composites=True)
        if self._messages is None:
            specs = [tf.TensorSpec(t.shape, t.dtype) for t in flat]
            self._messages = Messages(specs, self._shard.device)
        self._log.append(self._messages, self._shard.version.read_value() + 1, flat)
        steps = content[0][4]
        self._parts.step.on_shard(0, lambda: self._parts.step.count_updates(0, steps))
        return True

    @property
    def _stored(self) -> Messages:
        _ = self._parts.receiving  # which shows what a message is
        if self._messages is None:
            raise RuntimeError("No message was traced.")
        return self._messages

    # -- worker -----------------------------------------------------------------------------

    @functools.cached_property
    def _scalars(self) -> list[Any]:
        """Rates and counts, which are read at every fetch."""
        return [v for v in self._parts.read_by_workers if not v.shape.rank]

    @functools.cached_property
    def _model(self) -> list[Any]:
        """What workers have of their own, all of one worker's: it can be shown."""
        changed = [each.variable for each in self._parts.merged]
        return [*self._parts.step.weights, *changed]

    def fetching(self) -> tf.Tensor:
        """Traces that a worker takes in all messages that are there; gives the last one's version.

        It waits for nobody: what is there has a number that was read under the lock.
        """
        parts, log, messages = self._parts, self._log, self._stored
        clock = parts.clock.template.read_value()
        fixed, begun, read = clock_parts(clock, 1)
        edition = self._edition.template.read_value()

        def ask(arrived: Sequence[tf.Tensor]) -> tuple[Any, ...]:
            worker, known, last = arrived
            now, shown = log.edition.read_value(), log.shown.read_value()
            anew = tf.not_equal(now, known)
            after = tf.where(anew, shown, last)
            checked = log.reads(worker, after)
            with tf.control_dependencies([checked]):
                after = tf.identity(after)
            scalars = [v.primary.read_value() for v in self._scalars]
            return anew, now, after, self._shard.version.read_value(), scalars

        anew, now, after, end, scalars = self._shard.locked([clock[WORKER], edition, read[0]], ask)
        for variable, value in zip(self._scalars, scalars, strict=True):
            variable.on_workers().template.assign(value, read_value=False)
        begun_with = tf.cond(anew, self._begin_anew, lambda: False)
        self._edition.template.assign(now, read_value=False)
        with tf.control_dependencies([begun_with]):
            after = tf.identity(after)

        def take(number: tf.Tensor) -> list[tf.Tensor]:
            self._take_in(number, messages.get(number + 1))
            return [number + 1]

        (last,) = tf.while_loop(lambda number: number < end, take, [after], parallel_iterations=1)
        with tf.control_dependencies([last]):
            self._taken_in()
        parts.set_clock({}, fixed, begun, last[None])
        return tf.identity(last)

    def _begin_anew(self) -> bool:
        """All that a worker has of the model becomes what is read outside."""
        others = [v for v in self._parts.read_by_workers if v.shape.rank]
        for variable in [*self._model, *others]:
            variable.on_workers().template.assign(variable.primary.read_value(), read_value=False)
        return True

    def _take_in(self, number: tf.Tensor, flat: Sequence[tf.Tensor]) -> None:
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

    def _taken_in(self) -> None:
        """A worker's next mini-batches begin from here."""
        parts = self._parts
        values = [v.on_workers().template.read_value() for v in parts.step.weights]
        parts.step.on_worker(lambda: parts.algorithm.local.fetched(parts.worker_view, values))
        for each in parts.merged:
            each.begin()

    # -- the model that is read outside -----------------------------------------------------

    def showing(self) -> None:
        """Traces that a worker's model is what is read outside, at the version that it has."""
        read = clock_parts(self._parts.clock.template.read_value(), 1)[2]
        for variable in self._model:
            variable.primary.assign(variable.on_workers().template.read_value(), read_value=False)
        self._log.shown.assign(read[0], read_value=False)

    def resting(self) -> Callable[[], Any]:
        """At rest, once a model was shown: what makes all workers begin anew with it."""

        def rest() -> tf.Tensor:
            version = self._shard.version.read_value()
            with tf.control_dependencies([self._log.begin_anew(self._stored, version)]):
                return tf.identity(version)

        concrete = tf.function(rest, autograph=False).get_concrete_function()
        return _tf.BoundFunction(concrete, concrete.captured_inputs)
