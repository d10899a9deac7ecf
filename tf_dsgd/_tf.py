"""The only module that touches private TensorFlow or Keras names.

Each name says why it is needed and in which versions it was seen to work
(TensorFlow 2.21.0, Keras 3.15.1). Everything else in the package uses public API.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

# A callable that gives the object which opened Keras's innermost name scope: it is how the
# strategy knows whether a variable belongs to an optimizer, a seed generator or a layer. TF 2.21
# tells a variable creator nothing of the caller. Keras 3.15.1.
from keras.src.backend.common import global_state as _keras_state

# `tf.distribute.ReplicaContext` is public; `StrategyExtendedV1` is exported only under compat.v1,
# and Keras asks its `_use_merge_call`. TF 2.21.
from tensorflow.python.distribute import distribute_lib as _distribute_lib

# The eager context tells whether devices are initialised, which no public call does. TF 2.21.
from tensorflow.python.eager import context as _context

# A variable whose handle depends on who is traced needs the base class that implements all
# operations on a handle; `tf.Variable` itself cannot be subclassed that way. TF 2.21.
from tensorflow.python.ops import resource_variable_ops as _resource_variable_ops

BaseResourceVariable = _resource_variable_ops.BaseResourceVariable
StrategyExtended = _distribute_lib.StrategyExtendedV1
CompositeTensor = tf.__internal__.CompositeTensor


def make_variable(
    value: Any, *, device: str | None, dtype: Any = None, shape: Any = None, name: str = "cell"
) -> tf.Variable:
    """Creates a plain variable, untouched by any variable creator (our own strategy's included).

    `tf.Variable` would ask the strategy whose scope is open; the class itself does not.
    """
    with tf.init_scope(), tf.device(device):
        return _resource_variable_ops.ResourceVariable(
            value, trainable=False, dtype=dtype, shape=shape, name=name
        )


def make_variable_while_tracing(**options: Any) -> tf.Variable:
    """Creates the variable that a creator was asked for, at once, although a step is being traced.

    `tf.function` would put its creation off until after the trace; a worker's copy needs it now.
    """
    options.pop("use_resource", None)
    with tf.init_scope():
        return _resource_variable_ops.ResourceVariable(**options)


def unique_id(variable: tf.Variable) -> str:
    """The id by which Keras optimizers find a variable's slots (`_unique_id`)."""
    return variable._unique_id


def handle_name(variable: tf.Variable) -> str:
    """The name without the output index that `BaseResourceVariable` appends itself."""
    return variable.name.rsplit(":", 1)[0]


def creating_object() -> Any:
    """The Keras object (optimizer, layer, metric, seed generator) now creating a variable."""
    stack = _keras_state.get_global_attribute("name_scope_stack")
    return stack[-1].caller if stack else None


def devices_initialised() -> bool:
    """Whether TensorFlow has opened its devices, so that memory and thread settings are final."""
    ctx = _context.context_safe()
    return bool(ctx is not None and ctx._initialized)


class BoundFunction:
    """A traced function called with other captures than those it was traced with.

    One trace serves every worker: the trace captured the first worker's variables, and a call
    passes another worker's handles in their place. `ConcreteFunction._call_flat` takes the captured
    inputs as an argument; no public call does.
    """

    def __init__(self, concrete: Any, captures: Sequence[tf.Tensor]):
        self._concrete = concrete
        self.outputs = concrete.structured_outputs
        self._captures = list(captures)

    def __call__(self, *tensors: tf.Tensor) -> Any:
        return self._concrete._call_flat(list(tensors), self._captures)


@contextlib.contextmanager
def method_replaced(target: Any, name: str, replacement: Callable[..., Any]) -> Iterator[None]:
    """Lets one *object* answer `target.name(...)` with `replacement` while a step is traced.

    No class of Keras is changed. The entry is made in the object's own dictionary, past Keras's
    attribute tracking, and removed at the end.
    """
    target.__dict__[name] = replacement
    try:
        yield
    finally:
        target.__dict__.pop(name, None)


def follow_steps(optimizer: keras.optimizers.Optimizer, steps: tf.Variable) -> None:
    """Makes an optimizer's learning-rate schedule follow mini-batch steps.

    Keras evaluates a schedule at `optimizer.iterations`, which counts applied updates (bias
    correction needs that). With a push every 20 mini-batches a schedule would run 20 times too
    slowly. The optimizer object gets its own `_get_current_learning_rate`; its configuration and
    what is saved stay as they were.
    """
    schedule = getattr(optimizer, "_learning_rate", None)
    if isinstance(schedule, keras.optimizers.schedules.LearningRateSchedule):
        optimizer.__dict__["_get_current_learning_rate"] = lambda: schedule(steps)


def iterations_variable(optimizer: keras.optimizers.Optimizer) -> tf.Variable:
    """The counter itself: `optimizer.iterations` is an expression under gradient accumulation."""
    return optimizer._iterations.value


def is_learning_rate(optimizer: keras.optimizers.Optimizer, variable: tf.Variable) -> bool:
    """Whether `variable` holds the optimizer's learning rate."""
    rate = getattr(optimizer, "_learning_rate", None)
    return isinstance(rate, keras.Variable) and rate.value is variable


def clip(optimizer: keras.optimizers.Optimizer, gradients: Sequence[Any]) -> list[Any]:
    """Clips as the optimizer was configured to (`clipnorm`, `global_clipnorm`, `clipvalue`)."""
    return list(optimizer._clip_gradients(list(gradients)))


def is_keras_predict_step(fn: Callable[..., Any]) -> bool:
    """Whether `fn` is the wrapper that `Model.predict` hands to `strategy.run`."""
    wrapped = getattr(fn, "__wrapped__", fn)
    return "make_predict_function" in getattr(wrapped, "__qualname__", "")


def set_initial_epoch(model: keras.Model, epoch: int) -> None:
    """Where the next `fit` starts; the place `keras.callbacks.BackupAndRestore` uses."""
    model._initial_epoch = epoch


def built_variables(optimizer: keras.optimizers.Optimizer) -> list[keras.Variable]:
    """The weights an optimizer was built for; used where `apply` is called without variables."""
    return list(optimizer._trainable_variables)
