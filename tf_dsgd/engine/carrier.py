"""A program's rounds where workers in several processes send to one another: see `engine.post`."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tf_dsgd import _tf
from tf_dsgd.engine.mail import MailParts
from tf_dsgd.engine.members import Members
from tf_dsgd.engine.post import Post
from tf_dsgd.engine.wire import ClusterWire


class PostCarrier:
    """What an engine calls of a program: in place of a function, calls to several workers.

    Args:
        mail: the program's functions.
        members: the workers.
    """

    def __init__(self, mail: MailParts, members: Members):
        self._mail = mail
        self._wire = ClusterWire(mail, members)
        self._post = post = Post(self._wire, members.engine.changed, members.tasks)
        workers = range(len(members.tasks))
        self.fetch: Sequence[Any] = [functools.partial(post.fetch, m) for m in workers]
        self.push: Sequence[Any] = [functools.partial(self._push, m) for m in workers]
        self.show: Sequence[Any] = [functools.partial(post.show, m) for m in workers]

    def rounds(self, work: list[_tf.BoundFunction], specs: Sequence[Any]) -> Sequence[Any]:
        """As `Carrier.rounds`."""
        functions = self._mail.rounds(work, specs)
        return [functools.partial(self._round, m, each) for m, each in enumerate(functions)]

    def _round(self, m: int, function: _tf.BoundFunction, *inputs: Any) -> None:
        self._post.round(m, functools.partial(self._wire.round, function, inputs))

    def _push(self, m: int, valid: tf.Tensor) -> None:
        self._post.push(m, bool(valid))

    def begin_anew(self) -> None:
        """As `Carrier.begin_anew`."""
        self._mail.log.edition.assign_add(1)
