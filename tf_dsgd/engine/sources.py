"""Where mini-batches that the chief handed out are drawn from, one queue for all workers."""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tf_dsgd.engine.work import ANY_NUMBER


class Queue:
    """A queue of `tf.variant`s; what lost workers had drawn comes first.

    A mini-batch is in it before it is handed out, so that drawing waits for nobody: a worker draws
    what it takes in the same moment, and there is none that somebody has taken and nobody holds.

    Args:
        queue: the resource.
        here: gives a context within which tensors are made by this process.
        stacked: whether a part is one tensor, or a list.
    """

    def __init__(
        self,
        queue: tf.Tensor,
        here: Callable[[], contextlib.AbstractContextManager[Any]],
        *,
        stacked: bool,
    ):
        self._queue = queue
        self._here = here
        self._stacked = stacked
        self._returned: collections.deque[tf.Tensor] = collections.deque()

    is_shared = False

    def limit(self, worker: int, others: Sequence[int]) -> int:
        return ANY_NUMBER

    def draw(self, worker: int, steps: int, others: Sequence[int]) -> Any:
        again = [self._returned.popleft() for _ in range(min(steps, len(self._returned)))]
        with self._here():
            drawn = None
            if len(again) < steps:
                try:
                    (drawn,) = tf.raw_ops.QueueDequeueManyV2(
                        handle=self._queue, n=steps - len(again), component_types=[tf.variant]
                    )
                except tf.errors.OpError:
                    self._returned.extend(again)
                    raise
                if self._stacked and not again:
                    return drawn
            # TensorFlow joins variants by stacking only.
            apart = [*again, *([] if drawn is None else tf.unstack(drawn))]
            return tf.stack(apart) if self._stacked else apart

    def apart(self, part: Any) -> list[Any]:
        if not self._stacked:
            return [[one] for one in part]
        with self._here():
            return [one[None] for one in tf.unstack(part)]

    def give_back(self, parts: list[Any]) -> None:
        with self._here():
            for part in parts:
                self._returned.extend(tf.unstack(part) if self._stacked else part)
