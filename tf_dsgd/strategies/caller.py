"""The Keras model on whose behalf TensorFlow calls a strategy, which it does not say."""

from __future__ import annotations

import inspect
from typing import Any

import keras
import tensorflow as tf

from tf_dsgd import _tf


def model_that_calls(*methods: str) -> keras.Model | None:
    """The model whose method of one of these names is being run; None if there is none."""
    return _innermost(methods)[0]


def model_that_fits(iterator: Any) -> keras.Model | None:
    """The model whose `fit` takes its mini-batches from an iterator; None if there is none.

    Not one whose `fit` looks at the type of the data, nor for which somebody iterates meanwhile.
    """
    model, names = _innermost(("fit",))
    return model if names.get(_tf.ITERATOR_OF_FIT) is iterator else None


def looks(iterator: Any) -> bool:
    """Whether a model's `evaluate` or `predict` goes through an iterator."""
    return _innermost(("evaluate", "predict"))[1].get(_tf.ITERATOR_OF_FIT) is iterator


def fit_that_runs() -> tuple[keras.Model | None, Any]:
    """Its model and its `CallbackList`; something else if there is none."""
    model, names = _innermost(("fit",))
    return model, names.get("callbacks")


def steps_per_epoch_of_fit() -> int | None:
    """What the `fit` that runs was told; None if it was not, or there is none."""
    found = _innermost(("fit",))[1].get("steps_per_epoch")
    return None if found is None else int(found)


def callbacks_given() -> list[Any]:
    """The callbacks that were given to a model's method that is being run."""
    _, names = _innermost(("fit", "evaluate", "predict"))
    given = names.get("callbacks")
    return [c for c in tf.nest.flatten(getattr(given, "callbacks", given)) if c is not None]


def _innermost(methods: tuple[str, ...]) -> tuple[keras.Model | None, dict[str, Any]]:
    """A model, and the local names of the method that is being run."""
    frame = inspect.currentframe()
    while frame is not None:
        # Of no other frames: `f_locals` is a copy that a frame keeps as long as it runs.
        if frame.f_code.co_name in methods:
            names = frame.f_locals
            if isinstance(names.get("self"), keras.Model):
                return names["self"], names
        frame = frame.f_back
    return None, {}
