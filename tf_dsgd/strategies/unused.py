"""Says once that a strategy was made, and that a model trains without it; refuses half of one.

Keras knows no hook of a `fit` outside of all scopes. But each asks TensorFlow's default strategy to
distribute its data, and that one is a Python object, which tells us.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any

import tensorflow as tf

from tf_dsgd.console import say
from tf_dsgd.strategies.caller import model_that_calls
from tf_dsgd.strategies.capture import Optimizers
from tf_dsgd.strategies.refused import of_two_scopes

_optimizers: weakref.WeakSet[Optimizers] = weakref.WeakSet()
"""Of each strategy, those that were created in its scope."""
_unused: weakref.WeakSet[Any] = weakref.WeakSet()
"""Strategies in whose scope nothing was made yet."""


def made(strategy: Any, optimizers: Optimizers) -> None:
    """Tells of a `fit` without any strategy, until something is made in this one's scope."""
    _optimizers.add(optimizers)
    _unused.add(strategy)
    if tf.distribute.has_strategy():
        return
    default = tf.distribute.get_strategy()
    distribute = default.experimental_distribute_dataset
    if getattr(distribute, "tells_tf_dsgd", False):
        return

    @functools.wraps(distribute)
    def told(*args: Any, **kwargs: Any) -> Any:
        model = model_that_calls("fit")
        optimizer = getattr(model, "optimizer", None)
        if optimizer is not None and any(optimizer in own for own in _optimizers):
            raise of_two_scopes(model)
        if _unused and model is not None:
            _say()
        return distribute(*args, **kwargs)

    told.tells_tf_dsgd = True  # type: ignore[attr-defined]
    default.experimental_distribute_dataset = told


def used(strategy: Any) -> None:
    """Something was made in its scope."""
    _unused.discard(strategy)


def _say() -> None:
    names = " and ".join(sorted({type(strategy).__name__ for strategy in _unused}))
    _unused.clear()
    say(
        f"{names} was made, but the model that fit trains now was not made in its scope: it trains "
        "as without it, in this process alone. Create and compile the model inside "
        "`with strategy.scope():`."
    )
