"""Locks that are operations of TensorFlow, on a device."""

from __future__ import annotations

import contextlib
import functools
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import tensorflow as tf

from tf_dsgd import _tf, _tf_order
from tf_dsgd.membership import deadlines

T = TypeVar("T")

_NEVER_STALE = 1 << 62
_LOOK_SECONDS = 0.05


def mutexes(owner: object, number: int, device: str | None) -> list[tf.Tensor]:
    """Makes mutexes, which live as long as their owner, for calls that nobody gives up.

    TensorFlow gives each a thread of its own, and ends that only when it is told to. A call that is
    given up while it waits for a mutex gives it free, whoever has it: see `Locks`. TF 2.21.
    """
    with tf.init_scope(), tf.device(device):
        made = [tf.raw_ops.MutexV2(shared_name=_name()) for _ in range(number)]
    weakref.finalize(owner, _destroy, made).atexit = False
    return made


class Locks:
    """Locks on a device, for calls that are given up, too, as those of a process that is lost.

    A lock is a token, an accumulator's count: who gives up waiting for it leaves nothing, and
    nothing may wait from then on until it is given back, not even for another lock: a call that is
    given up there would leave it behind, as does an operation that ends with an error. After any
    error, `mend`.

    Args:
        number: how many.
        device: where they are.
    """

    def __init__(self, number: int, device: str | None):
        self._device = device
        self._mending = threading.Lock()
        self._turns = _tf.make_variable(tf.zeros([number], tf.int64), device=device, name="turns")
        with tf.init_scope(), tf.device(device):
            self._tokens = [
                tf.raw_ops.ResourceConditionalAccumulator(
                    dtype=tf.float32, shape=[], shared_name=_name(), reduction_type="SUM"
                )
                for _ in range(number)
            ]
            for token in self._tokens:
                _give(token)
        weakref.finalize(self, _destroy, self._tokens).atexit = False

    def held(
        self,
        arrived: Sequence[tf.Tensor],
        body: Callable[..., T],
        number: Callable[[Sequence[tf.Tensor]], tf.Tensor] | None = None,
    ) -> T:
        """Traces `body(arrived)` on the device, under a lock.

        The lock is asked for when everything in `arrived` that `body` uses is on the device, and
        given back when every operation of `body` is done, used or not.

        Args:
            arrived: what the body needs.
            body: from that to a result.
            number: from `arrived` to a number: the lock's, modulo the number of locks; None for the
                first.
        """
        with tf.device(self._device):
            arrived = [tf.identity(tensor) for tensor in arrived]
            place, token = tf.zeros([], tf.int64), self._tokens[0]
            if number is not None:
                place = number(arrived) % len(self._tokens)
                token = tf.gather(tf.stack(self._tokens), place)
            taken = tf.raw_ops.ResourceAccumulatorTakeGradient(
                handle=token, num_required=1, dtype=tf.float32
            )

            def counted() -> T:
                self._turns.scatter_add(tf.IndexedSlices(tf.ones([1], tf.int64), place[None]))
                return body(arrived)

            result, created = _tf_order.traced(counted)
            needed = _tf_order.leading_to([taken.op, *created], result)
            for tensor in arrived:
                if tensor.op in needed:  # else the body would wait for a sign that it may begin
                    _tf_order.begin_after(tensor.op, [taken.op])
            _tf_order.begin_after(taken.op, created)
            with tf.control_dependencies(created):
                _give(token)
            return result

    def mend(self) -> None:
        """After an error: gives back what was not, so that nobody waits for it for ever.

        That is a lock that nobody takes or gives back for `deadlines.LOCK_SECONDS`, of which only
        those count in which the device answers.
        """
        with self._mending:
            given, turns = self._standing()
            lost = {k for k, number in enumerate(given.numpy()) if not number}
            quiet, last = 0.0, time.monotonic()
            while lost and quiet < deadlines.LOCK_SECONDS:
                threading.Event().wait(_LOOK_SECONDS)
                now, then = self._standing(), turns.numpy()
                lost = {k for k in lost if not now[0].numpy()[k] and now[1].numpy()[k] == then[k]}
                quiet += min(time.monotonic() - last, 2 * _LOOK_SECONDS)
                last = time.monotonic()
            for k in lost:
                self._give_back(tf.constant(k))

    def prepare(self) -> None:
        """Traces here what `mend` calls."""
        _ = self._standing, self._give_back

    @functools.cached_property
    def _give_back(self) -> Any:
        """(k) -> None: one more token."""

        def body(k: tf.Tensor) -> None:
            _give(tf.gather(tf.stack(self._tokens), k))

        with tf.init_scope(), tf.device(self._device):
            return tf.function(
                body, autograph=False, input_signature=[tf.TensorSpec([], tf.int32)]
            ).get_concrete_function()

    @functools.cached_property
    def _standing(self) -> Any:
        """() -> (whether each lock is free, how often each was taken)."""

        def body() -> tuple[tf.Tensor, tf.Tensor]:
            counts = [
                tf.raw_ops.ResourceAccumulatorNumAccumulated(handle=token) for token in self._tokens
            ]
            return tf.stack(counts), self._turns.read_value()

        with tf.init_scope(), tf.device(self._device):
            return tf.function(body, autograph=False).get_concrete_function()


def _give(token: tf.Tensor) -> tf.Operation:
    return tf.raw_ops.ResourceAccumulatorApplyGradient(
        handle=token, local_step=tf.constant(_NEVER_STALE, tf.int64), gradient=tf.constant(0.0)
    )


def _name() -> str:
    return f"tf_dsgd_{uuid.uuid4().hex}"


def _destroy(handles: list[tf.Tensor]) -> None:
    # Those of a task that is gone are gone, too.
    with contextlib.suppress(tf.errors.OpError), tf.init_scope():
        for handle in handles:
            tf.raw_ops.DestroyResourceOp(resource=handle, ignore_lookup_error=True)
