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

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tf_dsgd import _tf
from tf_dsgd.algorithm import PeerRule
from tf_dsgd.engine.copies import Copies, Parts
from tf_dsgd.engine.log import Log, Messages
from tf_dsgd.engine.shard import Shard
from tf_dsgd.engine.state import WORKER, clock_parts


class PeerParts:
    """Used while a program's functions are traced.

    Args:
        parts: the program's other parts.
        rule: what a worker does with a message.
    """

    def __init__(self, parts: Parts, rule: PeerRule):
        self._copies = Copies(parts, rule)
        self._parts = parts
        self._messages: Messages | None = None
        with tf.init_scope():
            owner = _tf.unique_id(parts.step.weights[0])
            self._edition = parts.store.replicate(
                lambda _: np.int64(-1), dtype=tf.int64, name="edition", owner=owner
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
        self._parts.step.count_steps(0, steps)
        return True

    @property
    def _stored(self) -> Messages:
        _ = self._parts.receiving  # which shows what a message is
        if self._messages is None:
            raise RuntimeError("No message was traced.")
        return self._messages

    # -- worker -----------------------------------------------------------------------------

    def fetching(self) -> tf.Tensor:
        """Traces that a worker takes in all messages that are there; gives the last one's version.

        It waits for nobody: what is there has a number that was read under the lock.
        """
        parts, log, messages = self._parts, self._log, self._stored
        clock = parts.clock.template.read_value()
        read = clock_parts(clock, 1)[2]
        edition = self._edition.template.read_value()

        def ask(arrived: Sequence[tf.Tensor]) -> tuple[Any, ...]:
            worker, known, last = arrived
            now, shown = log.edition.read_value(), log.shown.read_value()
            anew = tf.not_equal(now, known)
            after = tf.where(anew, shown, last)
            checked = log.reads(worker, after)
            with tf.control_dependencies([checked]):
                after = tf.identity(after)
            scalars = [v.primary.read_value() for v in self._copies.scalars]
            return anew, now, after, self._shard.version.read_value(), scalars

        anew, now, after, end, scalars = self._shard.locked([clock[WORKER], edition, read[0]], ask)
        self._copies.set_scalars(scalars)
        begun_with = tf.cond(anew, self._begin_anew, lambda: False)
        self._edition.template.assign(now, read_value=False)
        with tf.control_dependencies([begun_with]):
            after = tf.identity(after)

        def take(number: tf.Tensor) -> list[tf.Tensor]:
            self._copies.take_in(number, messages.get(number + 1))
            return [number + 1]

        (last,) = tf.while_loop(lambda number: number < end, take, [after], parallel_iterations=1)
        with tf.control_dependencies([last]):
            self._copies.taken_in()
        parts.store.set_clock(clock, fetched=last[None])
        return tf.identity(last)

    def _begin_anew(self) -> bool:
        """All that a worker has of the model becomes what is read outside."""
        self._copies.begin([v.primary.read_value() for v in self._copies.begun_with])
        return True

    # -- the model that is read outside -----------------------------------------------------

    def showing(self) -> None:
        """Traces that a worker's model is what is read outside, at the version that it has."""
        read = clock_parts(self._parts.clock.template.read_value(), 1)[2]
        for variable in self._copies.model:
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
