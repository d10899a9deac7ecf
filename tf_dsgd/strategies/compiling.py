"""`jit_compile=True`: XLA compiles workers' steps, and not what Keras makes around them.

Keras would compile its whole step. Under a strategy that one takes a token, from a queue, and shows
all workers' metrics: XLA compiles no queues, and nothing that is on several devices. So Keras's
own functions are made without XLA, by its public methods, and what the model was compiled with says
how workers' steps are traced (`step.py`).
"""

from __future__ import annotations

import weakref
from typing import Any

import keras

from tf_dsgd.strategies.caller import model_that_calls
from tf_dsgd.strategies.here import predict_function_of_keras
from tf_dsgd.strategies.showing import step_of_keras

# Keras calls a strategy in each of them before it makes a function: to distribute data, or to build
# the model in the scope.
_METHODS = ("fit", "evaluate", "predict", "train_on_batch", "test_on_batch")
_MADE: weakref.WeakKeyDictionary[keras.Model, tuple[Any, ...]] = weakref.WeakKeyDictionary()
"""Of each model the functions that were made here, weakly: they hold the model."""


def make_functions_without_xla() -> None:
    """Has the model for which Keras calls make its functions anew, if XLA would compile them."""
    model = model_that_calls(*_METHODS)
    if model is None or not model.jit_compile:
        return
    made = _MADE.get(model)
    if made is not None and tuple(reference() for reference in made) == _functions(model):
        return
    jit_compile, model.jit_compile = model.jit_compile, False
    try:
        model.make_train_function(force=True)
        model.make_test_function(force=True)
        model.make_predict_function(force=True)
    finally:
        model.jit_compile = jit_compile
    _MADE[model] = tuple(weakref.ref(function) for function in _functions(model))


def _functions(model: keras.Model) -> tuple[Any, ...]:
    return step_of_keras(model), model.test_function, predict_function_of_keras(model)
