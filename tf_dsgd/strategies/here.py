"""Steps that run here, in the main thread, on data of their own: no worker takes part."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_dsgd import _tf
from tf_dsgd.strategies.caller import model_that_calls
from tf_dsgd.strategies.capture import Optimizers
from tf_dsgd.strategies.dataset import Token
from tf_dsgd.strategies.refused import check_step
from tf_dsgd.strategies.schedules import Schedules
from tf_dsgd.strategies.step import is_train_step
from tf_dsgd.strategies.tracing import given_what_is_not_distributed


class AtRest:
    """Takes the place of a model's `predict_function`: before a batch of its own comes a drain.

    Such a batch is `predict_on_batch`'s; before all others, and in `test_on_batch` and
    `train_on_batch`, which reset metrics, there is one anyway.

    Args:
        strategy: the model's.
        function_of_keras: what was in that place.
    """

    def __init__(self, strategy: Any, function_of_keras: Any):
        self._strategy = strategy
        self.function_of_keras = function_of_keras

    def __call__(self, data: Any) -> Any:
        if not any(isinstance(x, Token) for x in tf.nest.flatten(data)):
            self._strategy.settle()
        return self.function_of_keras(data)


def predict_function_of_keras(model: keras.Model) -> Any:
    """The function by which Keras would run predictions; None if none was made."""
    function = model.predict_function
    return function.function_of_keras if isinstance(function, AtRest) else function


def _drain_before_predictions(strategy: Any) -> None:
    """Of the model for which Keras traces its own step, and runs it next."""
    with tf.init_scope():
        tf.autograph.experimental.do_not_convert(strategy.settle)()
    model = model_that_calls("predict", "predict_on_batch")
    if model is not None and _tf.is_keras_predict_step(model.predict_function):
        model.predict_function = AtRest(strategy, model.predict_function)


def run_here(
    run: Callable[[], Any], fn: Any, has_data: bool, optimizers: Optimizers, schedules: Schedules
) -> Any:
    """Runs a step here, at once.

    Args:
        run: runs it.
        fn: the step; Keras's training step is `train_on_batch`'s.
        has_data: whether it is given any.
        optimizers: the strategy's.
        schedules: theirs.
    """
    strategy = schedules.steps.distribute_strategy
    if _tf.is_keras_predict_step(fn):
        _drain_before_predictions(strategy)
    if not is_train_step(fn):
        with given_what_is_not_distributed() if has_data else contextlib.nullcontext():
            return run()
    check_step(fn, optimizers)
    schedules.follow()
    with schedules.counted_here() as applied:
        outputs = run()
        _check_not_owned(strategy, applied)  # now that optimizers are built
    return outputs


def _check_not_owned(strategy: Any, applied: Sequence[keras.optimizers.Optimizer]) -> None:
    """Refuses a step here on what is the workers' own: it would know and change none of theirs."""
    local = strategy.algorithm.local
    kinds = {kind for each in applied for kind, _ in _tf.optimizer_variables(each)}
    kinds -= {"count", "rate"}
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
