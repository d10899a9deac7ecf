"""Metrics that are the chief's at rest, and are lent to their shards while workers work.

Workers' messages change metrics on a shard, under its lock. At rest they are read, reset and
written by Keras and by users' own functions, one variable at a time: to a shard in another process
each of these is a call. So such a variable is in the chief's process, and a shard has one of its
own (`on_shard`). Before a worker begins all that were changed are sent, and when the last one is
done all are brought back, by one call each.

A function of the user's may change one while it is lent, too: what it has added is added; another
value than a number, such as a string, stays as it was set.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tf_dsgd.arithmetic import is_number
from tf_dsgd.engine.bundles import Bundle
from tf_dsgd.engine.state import traced


class Lent:
    """Metrics of one program that are lent; at first they are at rest. For the main thread.

    Args:
        variables: each with `primary`, the chief's, `shard`, on which is another of them, and
            `known_there`, what that one is at rest, or None. Several programs may have one.
        shard_devices: where shards are.
    """

    def __init__(self, variables: Sequence[Any], shard_devices: Sequence[str | None]):
        self._variables = list(variables)
        self._devices = list(shard_devices)
        self._are_lent = False

    def lend(self) -> None:
        """Before workers begin: shards get what is not what they have."""
        if self._are_lent or not self._variables:
            return
        with tf.init_scope():
            now = self._at_home()
            there = [variable.known_there for variable in self._variables]
            if not all(map(_same, now, there)):
                self._know([None] * len(now))  # until the call has come to its end
                self._send()
                self._know(now)
        self._are_lent = True

    def take_back(self) -> None:
        """At rest: the chief has what shards have."""
        if not self._are_lent:
            return
        with tf.init_scope():
            there = [value.numpy() for value in self._bring()]
            for variable, new, now in zip(self._variables, there, self._at_home(), strict=True):
                if _same(now, variable.known_there):
                    variable.primary.assign(new)
                elif is_number(variable.primary.dtype):
                    variable.primary.assign(new + (now - variable.known_there))
            self._know(there)
        self._are_lent = False

    def _know(self, there: Sequence[Any]) -> None:
        for variable, value in zip(self._variables, there, strict=True):
            variable.known_there = value

    def _at_home(self) -> list[np.ndarray]:
        return [variable.primary.numpy() for variable in self._variables]

    def _of_shards(self) -> list[list[int]]:
        """The variables of each shard that has any."""
        found: dict[int, list[int]] = {}
        for i, variable in enumerate(self._variables):
            found.setdefault(variable.shard, []).append(i)
        return list(found.values())

    @functools.cached_property
    def _send(self) -> Any:
        def send() -> None:
            for places in self._of_shards():
                variables = [self._variables[i] for i in places]
                with tf.device(variables[0].primary.device):
                    values = [v.primary.read_value() for v in variables]
                    bundle = Bundle.of(values)
                    sent = bundle.pack(values)
                with tf.device(self._devices[variables[0].shard]):
                    for variable, value in zip(variables, bundle.unpack(sent), strict=True):
                        variable.on_shard(variable.shard).assign(value, read_value=False)

        return traced(send)

    @functools.cached_property
    def _bring(self) -> Any:
        """() -> what shards have, on the chief."""

        def bring() -> list[tf.Tensor]:
            brought: dict[int, tf.Tensor] = {}
            for places in self._of_shards():
                variables = [self._variables[i] for i in places]
                with tf.device(self._devices[variables[0].shard]):
                    values = [v.on_shard(v.shard).read_value() for v in variables]
                    bundle = Bundle.of(values)
                    sent = bundle.pack(values)
                with tf.device(variables[0].primary.device):
                    values = bundle.unpack([tf.identity(each) for each in sent])
                    brought |= zip(places, map(tf.identity, values), strict=True)
            return [brought[i] for i in range(len(self._variables))]

        return traced(bring)


def _same(one: Any, other: Any) -> bool:
    """Entry by entry, where NaN is NaN; what is not known is like nothing."""
    return bool(np.all((one == other) | ((one != one) & (other != other))))
