"""What each worker owns: one variable per worker, and functions bound to them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tf_dsgd import _tf

# A worker's clock, whose first five numbers are the header of its next message.
WORKER, INCARNATION, SEQUENCE, VERSION, STEPS, FETCHED = range(6)
CLOCK_LENGTH = 6


class Replicated:
    """One variable per worker. Functions are traced with the first and bound to the others."""

    def __init__(self, copies: Sequence[tf.Variable]):
        self.copies = list(copies)

    @property
    def template(self) -> tf.Variable:
        return self.copies[0]


class Store:
    """All variables that workers own, and the binding of traced functions to a worker."""

    def __init__(self, worker_devices: Sequence[str]):
        self.worker_devices = list(worker_devices)
        self._by_handle: dict[int, Replicated] = {}
        self._cells: dict[Any, Replicated] = {}
        self.clock = self.replicate(
            lambda m: np.array([m, *[0] * (CLOCK_LENGTH - 1)]), dtype=tf.int64, name="clock"
        )
        """Each worker's clock: the header of its next message, and the version it fetched."""

    @property
    def num_workers(self) -> int:
        return len(self.worker_devices)

    def replicate(
        self, value: Callable[[int], Any], *, dtype: Any = None, shape: Any = None, name: str
    ) -> Replicated:
        """Creates a variable on every worker's device; worker m's is `value(m)`."""
        copies = [
            _tf.make_variable(value(m), device=device, dtype=dtype, shape=shape, name=name)
            for m, device in enumerate(self.worker_devices)
        ]
        replicated = Replicated(copies)
        self._by_handle[id(replicated.template.handle)] = replicated
        return replicated

    def cell(self, key: Any, make: Callable[[], Replicated]) -> Replicated:
        """The replicated variable known by `key`, created when first asked for."""
        if key not in self._cells:
            with tf.init_scope():
                self._cells[key] = make()
        return self._cells[key]

    def bind(self, concrete: Any) -> list[_tf.BoundFunction]:
        """One callable per worker from a function traced with the first worker's variables."""
        captures = concrete.captured_inputs
        owners = [self._by_handle.get(id(c)) for c in captures]
        return [
            _tf.BoundFunction(
                concrete,
                [
                    c if owner is None else owner.copies[m].handle
                    for c, owner in zip(captures, owners, strict=True)
                ],
            )
            for m in range(self.num_workers)
        ]

    def sequences(self) -> list[int]:
        """Messages that each worker has numbered so far."""
        return [int(copy.numpy()[SEQUENCE]) for copy in self.clock.copies]

    def restore_sequences(self, sequences: Sequence[int]) -> None:
        """Makes workers number their next messages from a checkpoint on."""
        for copy, number in zip(self.clock.copies, sequences, strict=True):
            clock = copy.numpy()
            clock[SEQUENCE] = number
            copy.assign(clock)
