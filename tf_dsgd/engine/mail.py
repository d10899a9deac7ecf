"""What rounds are made of where workers in several processes send to one another.

    rounds(*where, *scalars, *batches)   worker   takes in messages, local steps, leaves a message
    fetch(*where, *scalars)              worker   takes in messages
    collect(key)                         worker   leaves a message
    model(), begin(version, *model)      worker   its model, or what becomes it
    count(header)                        chief    admission and counters
    show(version, *model)                chief    a worker's model becomes what is read outside

Each runs in one place. `where` are the key of the message that is left, (key, number) of those that
are taken in, keys of those that never count, and the number of the last one that is in the model
then; the chief says all that (`engine.post`). A message is in a table of the worker's device until
the worker takes it in. Of one, the chief sees the header.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tf_dsgd import _tf
from tf_dsgd.algorithm import PeerRule
from tf_dsgd.engine.copies import Copies, Parts
from tf_dsgd.engine.log import Messages
from tf_dsgd.engine.shard import WITHDRAWN, Shard
from tf_dsgd.engine.state import INCARNATION, traced
from tf_dsgd.engine.timing import Laps

KEY = tf.TensorSpec([], tf.int64)
TAKEN = (tf.TensorSpec([None, 2], tf.int64), tf.TensorSpec([None], tf.int64), KEY)
"""(key, number) of messages, keys of those that are thrown away, the last number."""


class MailParts:
    """Functions of a program whose messages go from worker to worker.

    Args:
        parts: the program's other parts.
        rule: what a worker does with a message.
        bind: traces a function with one worker's variables, and binds it to each.
    """

    def __init__(self, parts: Parts, rule: PeerRule, bind: Callable[..., list[_tf.BoundFunction]]):
        self._copies = Copies(parts, rule)
        self._parts = parts
        self._bind = bind

    @property
    def _shard(self) -> Shard:
        return self._parts.shards[0]

    @functools.cached_property
    def messages(self) -> Messages:
        """Each worker's table of messages, where the function that names it runs."""
        parcel = self._parts.wrapping.structured_outputs[0]
        return Messages([tf.TensorSpec(t.shape, t.dtype) for t in parcel], None)

    @property
    def _of_scalars(self) -> list[tf.TensorSpec]:
        return [_spec(variable) for variable in self._copies.scalars]

    # -- worker -----------------------------------------------------------------------------

    @functools.cached_property
    def _fetched(self) -> Any:
        """(taken, thrown, version, *scalars) -> version."""

        def fetched(
            taken: tf.Tensor, thrown: tf.Tensor, version: tf.Tensor, *scalars: tf.Tensor
        ) -> tf.Tensor:
            parts, messages = self._parts, self.messages
            clock = parts.clock.template.read_value()
            self._copies.set_scalars(scalars)

            done = [
                _for_each(thrown, messages.take),
                _for_each(
                    taken, lambda row: self._copies.take_in(row[1] - 1, messages.take(row[0]))
                ),
            ]
            with tf.control_dependencies(done):
                self._copies.taken_in()
                version = tf.identity(version)
            parts.store.set_clock(clock, fetched=version[None])
            return version

        return traced(fetched, *TAKEN, *self._of_scalars)

    @functools.cached_property
    def fetch(self) -> list[_tf.BoundFunction]:
        """(taken, thrown, version, *scalars) -> version; at rest, when nothing is left then."""

        def fetch(*where: tf.Tensor) -> tf.Tensor:
            version = self._fetched(*where)
            with tf.control_dependencies([version]):
                self.messages.clear()  # but of calls that had failed, and of whose end nobody heard
            return version

        return self._bind(fetch, *TAKEN, *self._of_scalars)

    def rounds(
        self, work: list[_tf.BoundFunction], specs: Sequence[Any]
    ) -> list[_tf.BoundFunction]:
        """(key, taken, thrown, version, *scalars, *inputs of work) -> header."""
        number = len(TAKEN) + len(self._of_scalars)

        def whole_round(key: tf.Tensor, *inputs: Any) -> tf.Tensor:
            laps = Laps()
            fetched = self._fetched(*inputs[:number])
            laps.lap()
            # A step that fails leaves no message half taken in.
            with tf.control_dependencies([fetched]):
                work[0].traced(*inputs[number:])
                laps.lap()
                header = self._left(key)
            laps.add_to(self._parts.store.laps.template)
            return header

        return self._bind(whole_round, KEY, *TAKEN, *self._of_scalars, *specs)

    @functools.cached_property
    def collect(self) -> list[_tf.BoundFunction]:
        """(key) -> header."""
        return self._bind(self._left, KEY)

    def _left(self, key: tf.Tensor) -> tf.Tensor:
        heads, message = self._parts.collection()
        (parcel,) = self._parts.wrapping(heads, message)
        self.messages.put(key, parcel)
        return tf.identity(heads[0])

    @functools.cached_property
    def model(self) -> list[_tf.BoundFunction]:
        """() -> the worker's model, and what else it begins with."""

        def model() -> list[tf.Tensor]:
            template = [v.on_workers().template for v in self._copies.begun_with]
            return [variable.read_value() for variable in template]

        return self._bind(model)

    @functools.cached_property
    def begin(self) -> list[_tf.BoundFunction]:
        """(version, *model) -> nothing."""

        def begin(version: tf.Tensor, *values: tf.Tensor) -> None:
            clock = self._parts.clock.template.read_value()
            self._copies.begin(values)
            self._parts.store.set_clock(clock, fetched=version[None])

        return self._bind(begin, KEY, *map(_spec, self._copies.begun_with))

    @functools.cached_property
    def clear(self) -> list[_tf.BoundFunction]:
        """() -> nothing; the worker's table is empty."""

        def clear() -> None:
            self.messages.clear()

        return self._bind(clear)

    def sending(self, source: str, target: str) -> Any:
        """Traces (key) -> nothing: a message goes from one worker's table to another's."""

        def send(key: tf.Tensor) -> None:
            found = self.messages.get(key, source)
            self.messages.put(key, found, target)

        return traced(send, KEY)

    # -- chief ------------------------------------------------------------------------------

    @functools.cached_property
    def scalars(self) -> Any:
        """() -> rates and counts, at one moment."""

        def scalars() -> list[tf.Tensor]:
            return self._shard.locked(
                [], lambda _: [v.primary.read_value() for v in self._copies.scalars]
            )

        return traced(scalars)

    @functools.cached_property
    def count(self) -> Any:
        """(header) -> whether the message is new, and counted."""

        def apply(content: Any, staleness: tf.Tensor) -> bool:
            step = self._parts.step
            step.on_shard(0, lambda: step.count_updates(0, content[0][4]))
            step.count_steps(0, content[0][4])
            return True

        def count(header: tf.Tensor) -> tf.Tensor:
            return self._shard.receive([header], list, apply)

        return traced(count, tf.TensorSpec([5], tf.int64))

    def withdraw(self, header: tf.Tensor) -> None:
        """A message counts as failed."""
        places = tf.one_hot(INCARNATION, 5, on_value=True, off_value=False)
        self.count(tf.where(places, tf.constant(WITHDRAWN, tf.int64), header))

    @functools.cached_property
    def shown(self) -> Any:
        """() -> (version, model) that is read outside."""

        def shown() -> tuple[tf.Tensor, list[tf.Tensor]]:
            values = [v.primary.read_value() for v in self._copies.begun_with]
            return self.log.shown.read_value(), values

        return traced(shown)

    @functools.cached_property
    def show(self) -> Any:
        """(version, *model) -> nothing; it becomes what is read outside."""

        def show(version: tf.Tensor, *values: tf.Tensor) -> None:
            for variable, value in zip(self._copies.model, values, strict=False):
                variable.primary.assign(value, read_value=False)
            self.log.shown.assign(version, read_value=False)

        return traced(show, KEY, *map(_spec, self._copies.begun_with))

    @property
    def log(self) -> Any:
        """Of what is read outside: its version, and how often all had to begin with it."""
        return self._shard.log


def _for_each(rows: tf.Tensor, body: Callable[[tf.Tensor], Any]) -> tf.Tensor:
    """Traces `body` for each row, in order; gives what tells that it is done."""

    def one(i: tf.Tensor) -> list[tf.Tensor]:
        body(rows[i])
        return [i + 1]

    number = tf.shape(rows)[0]
    (end,) = tf.while_loop(lambda i: i < number, one, [tf.constant(0)], parallel_iterations=1)
    return end


def _spec(variable: Any) -> tf.TensorSpec:
    return tf.TensorSpec(variable.shape, variable.dtype)
