"""What touches private TensorFlow or Keras names, with the other modules named `_tf_...`.

Each name says why it is needed and in which versions it was seen to work
(TensorFlow 2.21.0, Keras 3.15.1). Everything else in the package uses public API.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

# A callable that gives the object which opened Keras's innermost name scope: it is how the
# strategy knows whether a variable belongs to an optimizer, a seed generator or a layer. TF 2.21
# tells a variable creator nothing of the caller. Keras 3.15.1.
from keras.src.backend.common import global_state as _keras_state

# The function that passes over every exception, a KeyboardInterrupt too. Keras 3.15.1.
from keras.src.utils.python_utils import pythonify_logs as _pythonify_logs

# The file in which an interrupt leaves the cache of a `tf.function` broken. TF 2.21.
from tensorflow.core.function.polymorphism import type_dispatch as _type_dispatch

# `tf.distribute.ReplicaContext` is public; `StrategyExtendedV1` is exported only under compat.v1,
# and Keras asks its `_use_merge_call`. TF 2.21.
from tensorflow.python.distribute import distribute_lib as _distribute_lib

# Keras's `fit` takes a distributed dataset only of a class of this name in TensorFlow's modules;
# the public `tf.distribute.DistributedDataset` is an interface of another. Keras 3.15.1, TF 2.21.
from tensorflow.python.distribute import input_lib as _input_lib

# The eager context tells whether devices are initialised, which no public call does. TF 2.21.
from tensorflow.python.eager import context as _context

# Gradient tapes watch variables, and what stands in a variable's place only if they are told of it;
# else there is no gradient, without a word. TF 2.21.
from tensorflow.python.eager import tape as _tape

# Whether operations are to be deterministic, for which no public name asks. TF 2.21.
from tensorflow.python.framework import config as _config

# A variable whose handle depends on who is traced needs the base class that implements all
# operations on a handle; `tf.Variable` itself cannot be subclassed that way. TF 2.21.
from tensorflow.python.ops import resource_variable_ops as _resource_variable_ops

BaseResourceVariable = _resource_variable_ops.BaseResourceVariable
DistributedDataset = _input_lib.DistributedDataset
StrategyExtended = _distribute_lib.StrategyExtendedV1
# What a `tf.function` takes apart into tensors and a TypeSpec: the token that stands for a batch is
# one, so that steps are traced once for each element spec and not for each token. TF 2.21.
CompositeTensor = tf.__internal__.CompositeTensor


def is_harmed_by_interrupts(code: types.CodeType) -> bool:
    """Whether what Python raises in this code breaks a `tf.function`, or is swallowed by Keras."""
    return code.co_filename == _type_dispatch.__file__ or code is _pythonify_logs.__code__


def make_variable(
    value: Any, *, device: str | None, dtype: Any = None, shape: Any = None, name: str = "cell"
) -> Any:
    """Creates a plain variable, untouched by any variable creator (our own strategy's included).

    `tf.Variable` would ask the strategy whose scope is open; the class itself does not.
    """
    with tf.init_scope():
        value = _here(value, dtype)
        if shape is not None and not tf.TensorShape(shape).is_fully_defined():
            return SizeChangingVariable(value, device=device, dtype=dtype, shape=shape, name=name)
        with tf.device(device):
            return _resource_variable_ops.ResourceVariable(
                value, trainable=False, dtype=dtype, shape=shape, name=name
            )


def _here(value: Any, dtype: Any = None) -> tf.Tensor:
    """A tensor of this process, whatever device was asked for.

    On another task TensorFlow would make a constant by a call of its own, and hold Python's lock
    until that one answers.
    """
    with tf.device(None), tf.device("CPU:0"):
        return tf.convert_to_tensor(value() if callable(value) else value, dtype)


def make_variable_there(value: Callable[[], tf.Tensor], *, device: str, name: str) -> Any:
    """As `make_variable`, of a value that a `tf.function` makes on the device and nowhere else."""
    with tf.init_scope(), tf.device(device):
        return _resource_variable_ops.ResourceVariable(value, trainable=False, name=name)


class SizeChangingVariable:
    """A variable whose value may have any size, in place of one of shape `[None, ...]`.

    Passing the handle of such a variable to a function in another process ends that process: the
    other side takes the handle's shape for a complete one (`DeserializeRemoteTensorHandle`,
    TF 2.21). So this is a scalar variant that holds a list of one tensor, or of several, which
    make up the value one behind the other.
    """

    def __init__(
        self, value: Any, *, device: str | None, dtype: Any, shape: Any, name: str = "cell"
    ):
        self.dtype = tf.as_dtype(dtype)
        self.shape = tf.TensorShape(shape)
        with tf.init_scope():
            value, any_size = _here(value, dtype), _here(-1)
            with tf.device(device):
                first = self._wrapped(value, any_size)
                self._variable = _resource_variable_ops.ResourceVariable(
                    first, trainable=False, name=name
                )

    @property
    def handle(self) -> tf.Tensor:
        """The resource."""
        return self._variable.handle

    def _wrapped(self, value: Any, any_size: Any = -1) -> tf.Tensor:
        empty = tf.raw_ops.EmptyTensorList(
            element_shape=any_size, max_num_elements=any_size, element_dtype=self.dtype
        )
        return tf.raw_ops.TensorListPushBack(
            input_handle=empty, tensor=tf.convert_to_tensor(value, self.dtype)
        )

    def read_value(self) -> tf.Tensor:
        """The value."""
        kept = {"input_handle": self._variable.read_value(), "element_dtype": self.dtype}
        if self.shape.rank:
            shape = [-1, *(-1 if d is None else d for d in self.shape[1:])]
            value, _ = tf.raw_ops.TensorListConcatV2(
                **kept, element_shape=shape, leading_dims=tf.zeros([0], tf.int64)
            )
        else:
            value = tf.raw_ops.TensorListGetItem(**kept, index=0, element_shape=-1)
        return tf.ensure_shape(value, self.shape)

    def assign(self, value: Any, read_value: bool = True) -> None:
        """Sets the value."""
        del read_value
        self._variable.assign(self._wrapped(value), read_value=False)

    def append(self, value: tf.Tensor) -> None:
        """Adds to the value along its first axis; what there was is not copied."""
        longer = tf.raw_ops.TensorListPushBack(
            input_handle=self._variable.read_value(), tensor=value
        )
        self._variable.assign(longer, read_value=False)


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


def variable_being_created(initial_value: Any) -> tuple[keras.Variable, Any] | None:
    """The `keras.Variable` for which a variable is made, and its initializer, if that is known.

    They are in the closure that Keras passes as the initial value, and calling it would make the
    value (`Variable._initialize_with_initializer`). Keras 3.15.1.
    """
    closure = getattr(initial_value, "__closure__", None)
    if not closure:
        return None
    names = initial_value.__code__.co_freevars
    cells = {name: cell.cell_contents for name, cell in zip(names, closure, strict=True)}
    variable = cells.get("self")
    return (variable, cells["initializer"]) if isinstance(variable, keras.Variable) else None


def in_place_of(variable: keras.Variable) -> Any:
    """What a `keras.Variable` holds (`_value`), not cast to the type a layer computes in."""
    return variable._value


def autocast(variable: Any, value: tf.Tensor) -> tf.Tensor:
    """What was read of a `keras.Variable`, in the type that the layer computes in."""
    return variable._maybe_autocast(value) if isinstance(variable, keras.Variable) else value


def is_in_branch_or_loop() -> bool:
    """Whether operations made now are of a branch of `tf.cond`, or in a loop. TF 2.21."""
    graph = type(tf.compat.v1.get_default_graph()).__name__
    return graph in ("CondBranchFuncGraph", "WhileBodyFuncGraph")


def note_access(variable: Any) -> None:
    """Has gradient tapes watch what stands in a variable's place; they ask for its `handle`."""
    _tape.variable_accessed(variable)


OpDispatcher = tf.__internal__.dispatch.OpDispatcher
"""What TensorFlow asks where an operation cannot take an argument: the lookup of rows of a table
that is no tensor. Overriding a layer would serve that layer only. TF 2.21."""

ITERATOR_OF_FIT = "iterator"
"""The local name by which Keras's `fit` has the iterator that it trains on. Keras 3.15.1."""

LOOKS_AT_DATA = "_maybe_symbolic_build"
"""The method of a Keras model that takes an element to look at its type alone. Keras 3.15.1."""


def devices_initialised() -> bool:
    """Whether TensorFlow has opened its devices, so that memory and thread settings are final."""
    ctx = _context.context_safe()
    return bool(ctx is not None and ctx._initialized)


Around = Callable[[], contextlib.AbstractContextManager[None]]


class BoundFunction:
    """A traced function called with other captures than those it was traced with.

    One trace serves every worker: the trace captured the first worker's variables, and a call
    passes another worker's handles in their place. `ConcreteFunction._call_flat` takes the captured
    inputs as an argument; no public call does.

    A call is made within what `around` gives, such as `_tf_prepared.fewer_passes`.
    """

    def __init__(
        self, concrete: Any, captures: Sequence[tf.Tensor], around: Around = contextlib.nullcontext
    ):
        self._concrete = concrete
        self._around = around
        self.traced = concrete
        """The function itself, to be called in another's trace."""
        self.outputs = concrete.structured_outputs
        self.captures = list(captures)

    def __call__(self, *tensors: tf.Tensor) -> Any:
        with self._around():
            return self._concrete._call_flat(list(tensors), self.captures)


@contextlib.contextmanager
def method_replaced(target: Any, name: str, replacement: Callable[..., Any]) -> Iterator[None]:
    """Within, one *object* answers `target.name(...)` with `replacement`.

    No class of Keras or TensorFlow is changed. The entry is made in the object's own dictionary,
    past Keras's attribute tracking; at the end it is as before.
    """
    of_class = object()
    before = target.__dict__.get(name, of_class)
    target.__dict__[name] = replacement
    try:
        yield
    finally:
        target.__dict__.pop(name, None)
        if before is not of_class:
            target.__dict__[name] = before


def schedule_of(
    optimizer: keras.optimizers.Optimizer,
) -> keras.optimizers.schedules.LearningRateSchedule | None:
    """An optimizer's learning-rate schedule (`_learning_rate`); None where it has a rate."""
    schedule = getattr(optimizer, "_learning_rate", None)
    is_schedule = isinstance(schedule, keras.optimizers.schedules.LearningRateSchedule)
    return schedule if is_schedule else None


def follow_steps(optimizer: keras.optimizers.Optimizer, steps: tf.Variable) -> None:
    """Makes an optimizer's learning-rate schedule follow mini-batch steps.

    Keras evaluates a schedule at `optimizer.iterations`, which counts applied updates (bias
    correction needs that). With a push every 20 mini-batches a schedule would run 20 times too
    slowly. The optimizer object gets its own `_get_current_learning_rate`; its configuration and
    what is saved stay as they were.
    """
    schedule = schedule_of(optimizer)
    if schedule is not None:
        optimizer.__dict__["_get_current_learning_rate"] = lambda: schedule(steps)


def shift_schedules(optimizer: keras.optimizers.Optimizer, offset: tf.Variable) -> bool:
    """Makes an optimizer's learning-rate schedule follow `iterations + offset`; whether it has one.

    For when `iterations` begins anew, as bias correction then needs, while the schedule goes on.
    See `follow_steps` for how. A step that is traced already keeps what it was traced with.
    """
    schedule = schedule_of(optimizer)
    if schedule is None:
        return False
    count = optimizer._iterations
    optimizer.__dict__["_get_current_learning_rate"] = lambda: schedule(
        count + tf.cast(offset, count.dtype)
    )
    return True


def optimizer_variables(
    optimizer: keras.optimizers.Optimizer,
) -> list[tuple[str, keras.Variable]]:
    """All variables of an optimizer, and of those inside it, each with its kind.

    "count" (`_iterations`), "rate", "scale" (what `LossScaleOptimizer` itself has), "average" (EMA,
    `_model_variables_moving_average`), "accumulator" (`_accumulated_gradients`), and "slot", which
    is all else, with the scalars that some make past `add_variable` (Nadam's `_u_product`).
    """
    inner = [getattr(optimizer, "inner_optimizer", None), *getattr(optimizer, "optimizers", [])]
    inner = [each for each in inner if each is not None]
    found: dict[int, tuple[str, keras.Variable]] = {}

    def add(kind: str, variables: Iterable[Any]) -> None:
        for variable in variables:
            if isinstance(variable, keras.Variable):
                found.setdefault(id(variable), (kind, variable))

    for each in inner:
        for kind, variable in optimizer_variables(each):
            add(kind, [variable])
    add("count", [optimizer._iterations])
    add("rate", [optimizer._learning_rate])
    add("average", getattr(optimizer, "_model_variables_moving_average", None) or [])
    add("accumulator", getattr(optimizer, "_accumulated_gradients", None) or [])
    rest = "scale" if isinstance(optimizer, keras.optimizers.LossScaleOptimizer) else "slot"
    add(rest, optimizer.variables)
    add(rest, [value for value in vars(optimizer).values() if isinstance(value, keras.Variable)])
    return list(found.values())


def iterations_variable(optimizer: keras.optimizers.Optimizer) -> tf.Variable:
    """The counter itself: `optimizer.iterations` is an expression under gradient accumulation."""
    return optimizer._iterations.value


@contextlib.contextmanager
def counted_natively(optimizer: keras.optimizers.Optimizer, counts: bool = True) -> Iterator[None]:
    """Within, `optimizer.apply` counts by one operation, or, without `counts`, by none.

    Keras's own `assign_add` reads, then assigns: two that count at once, without a lock, would
    count once.
    """
    counter = optimizer._iterations

    def assign_add(value: Any) -> None:
        if counts:
            counter.value.assign_add(tf.cast(value, counter.value.dtype), read_value=False)

    with method_replaced(counter, "assign_add", assign_add):
        yield


@contextlib.contextmanager
def restricted(
    optimizer: keras.optimizers.Optimizer, keep: Callable[[Any], bool]
) -> Iterator[None]:
    """Lets `optimizer.apply` see only some of the variables it was built for, while it is traced.

    Keras averages (EMA), overwrites and resets accumulators of *all* variables the optimizer knows,
    whichever it was given gradients for. A shard changes only its own. The three lists are
    `_trainable_variables`, `_model_variables_moving_average`, which runs parallel to it, and
    `_accumulated_gradients`, which is indexed by variable and may hold None.
    """
    entries = optimizer.__dict__
    kept = [keep(v) for v in entries["_trainable_variables"]]
    if all(kept):
        yield
        return
    names = ("_trainable_variables", "_model_variables_moving_average", "_accumulated_gradients")
    before = {name: entries[name] for name in names if entries.get(name)}
    for name, values in before.items():
        pairs = zip(values, kept, strict=True)
        if name == "_accumulated_gradients":
            entries[name] = [v if k else None for v, k in pairs]
        else:
            entries[name] = [v for v, k in pairs if k]
    try:
        yield
    finally:
        entries.update(before)


def is_deterministic() -> bool:
    """Whether `tf.config.experimental.enable_op_determinism` was called."""
    return _config.is_op_determinism_enabled()


def own_scalars(optimizer: keras.optimizers.Optimizer) -> list[tf.Variable]:
    """Scalar variables an optimizer keeps as attributes, such as Nadam's `_u_product`.

    Some are made past `add_variable`, so that nothing at their creation tells whose they are.
    """
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    owned = [*vars(optimizer).values(), *vars(inner).values()]
    return [v.value for v in owned if isinstance(v, keras.Variable) and len(v.shape) == 0]


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


def compiled_as(model: keras.Model) -> tuple[Any, ...]:
    """Objects of which `compile` makes others each time."""
    names = ("optimizer", "_compile_loss", "_compile_metrics", "_loss_tracker")
    return tuple(getattr(model, name, None) for name in names)


def is_step_of_fit(function: Any) -> bool:
    """Whether Keras made it, to run a model's step on what an iterator gives."""
    name = getattr(function, "__qualname__", "")
    return bool(name.endswith("_make_function.<locals>.function"))


def set_initial_epoch(model: keras.Model, epoch: int) -> None:
    """Where the next `fit` starts; the place `keras.callbacks.BackupAndRestore` uses."""
    model._initial_epoch = epoch


def built_variables(optimizer: keras.optimizers.Optimizer) -> list[keras.Variable]:
    """The weights an optimizer was built for; used where `apply` is called without variables."""
    return list(optimizer._trainable_variables)


def decays(optimizer: keras.optimizers.Optimizer, variable: keras.Variable) -> bool:
    """Whether an optimizer's weight decay takes in a weight (`_use_weight_decay`)."""
    return bool(optimizer.weight_decay) and optimizer._use_weight_decay(variable)


def slot_index(optimizer: keras.optimizers.Optimizer, variable: Any) -> int:
    """A weight's place in the lists of variables that an optimizer keeps beside weights.

    Keras's guide to writing an optimizer uses this method.
    """
    return optimizer._get_variable_index(variable)
