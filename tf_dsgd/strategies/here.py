"""Steps that run here, in the main thread, on data of their own: no worker takes part."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import keras

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
    _check_not_owned(steps.distribute_strategy, fn.__self__)  # now that the optimizer is built
    steps.assign_add(1)
    return outputs


def _check_not_owned(strategy: Any, model: keras.Model) -> None:
    """Refuses a step here on what is the workers' own: it would know and change none of theirs."""
    local = strategy.algorithm.local
    kinds = {kind for kind, _ in _tf.optimizer_variables(model.optimizer)} - {"count", "rate"}
    own = kinds & {"scale"} if local.sends_slots else kinds
    if strategy.algorithm.between_peers is not None or local.keeps_weights:
        what = "weights"
    elif local.sends != "gradient" and own:
        what = "an optimizer's state"
    else:
        return
    raise ValueError(
        "train_on_batch makes a step in which no worker takes part, and under this "
        f"{type(strategy).__name__} each worker has {what} of its own: the step would not know "
        "what workers have learned, and they would not see all that it changes. Call model.fit("
        "x, y, batch_size=len(x)) in place of train_on_batch(x, y)."
    )
