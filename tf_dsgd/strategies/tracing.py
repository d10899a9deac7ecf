"""Which side of a step is being traced, in this thread, and what it touched."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from tf_dsgd import _tf
from tf_dsgd.console import before_training


class Trace:
    """Which side is being traced, and what it touched."""

    def __init__(self, side: str, shard: int = 0, *, compiled: bool = False):
        self.side, self.shard = side, shard
        self.compiled = compiled  # by XLA
        self.touched: dict[int, Any] = {}
        self.written: dict[int, Any] = {}
        self.values: dict[int, tf.Tensor] = {}
        """What is read in place of variables, by their ids."""
        self.rewritten: set[int] = set()
        self.assigned: set[int] = set()
        """Variables written otherwise than row by row; and those not only added to."""
        self.part: int | None = None
        """While a layer is traced that was placed on a part of the worker: which."""
        self.view: Any = None
        """While an optimizer's update of some rows is traced: those rows."""
        self.lookups: list[tuple[Any, tf.Tensor]] | None = None
        """Tables and ids that the step looks up, where a round reads all its rows before."""


class _Current(threading.local):
    trace: Trace | None = None
    undistributed = False


_current = _Current()


def current_trace() -> Trace | None:
    """What this thread traces now."""
    return _current.trace


@contextlib.contextmanager
def tracing(trace: Trace) -> Iterator[Trace]:
    """Makes every `ReplicaVariable` resolve to the traced side, in this thread."""
    before, _current.trace = _current.trace, trace
    try:
        yield trace
    finally:
        _current.trace = before


@contextlib.contextmanager
def given_what_is_not_distributed() -> Iterator[None]:
    """Within, an optimizer of this thread is refused: it would train where no worker takes part."""
    _current.undistributed = True
    try:
        yield
    finally:
        _current.undistributed = False


def check_distributed() -> None:
    """Raises a ValueError in an optimizer's `apply` within `given_what_is_not_distributed`."""
    if not _current.undistributed or _current.trace is not None:
        return
    if not isinstance(_tf.creating_object(), keras.optimizers.Optimizer):  # in its `apply`
        return
    with before_training():
        raise ValueError(
            "strategy.run was given a batch of a dataset that is not distributed, and its function "
            "trains: no worker would take part. Loop over strategy.experimental_distribute_dataset("
            "dataset), and pass its elements to strategy.run."
        )
