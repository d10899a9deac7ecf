"""Logs of a simulated epoch's first steps: none, before a mini-batch was computed.

On threads and tasks `fit` waits for the first one. A simulated worker computes a round at once when
all of its mini-batches are there, and `fit`, which hands them out one by one, cannot wait for that.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import keras


def leave_logs_out(callbacks: Any, until: Callable[[], bool]) -> None:
    """Has a `fit` tell its callbacks, the progress bar among them, of no metrics until then.

    Args:
        callbacks: its `CallbackList`; something else if there is none.
        until: whether there are metrics to show.
    """
    if not isinstance(callbacks, keras.callbacks.CallbackList):
        return
    if "on_train_batch_end" in vars(callbacks):
        return
    end = callbacks.on_train_batch_end

    @functools.wraps(end)
    def told(batch: int, logs: Mapping[str, Any] | None = None) -> None:
        end(batch, logs if until() else {})

    callbacks.on_train_batch_end = told
