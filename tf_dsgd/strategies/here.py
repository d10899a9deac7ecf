"""Steps that run here, in the main thread, on data of their own: no worker takes part."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from tf_dsgd import _tf
from tf_dsgd.strategies.capture import Optimizers
from tf_dsgd.strategies.refused import check_step
from tf_dsgd.strategies.step import is_train_step
from tf_dsgd.strategies.tracing import given_what_is_not_distributed
from tf_dsgd.strategies.variable import ReplicaVariable


def run_here(
    run: Callable[[], Any], fn: Any, has_data: bool, optimizers: Optimizers, steps: ReplicaVariable
) -> Any:
    """Runs a step here, at once.

    Args:
        run: runs it.
        fn: the step; Keras's training step is `train_on_batch`'s.
        has_data: whether it is given any.
        optimizers: the strategy's.
        steps: mini-batches, which schedules follow.
    """
    if not is_train_step(fn):
        with given_what_is_not_distributed() if has_data else contextlib.nullcontext():
            return run()
    check_step(fn, optimizers)
    for optimizer in optimizers:
        _tf.follow_steps(optimizer, steps)
    outputs = run()
    steps.assign_add(1)
    return outputs
