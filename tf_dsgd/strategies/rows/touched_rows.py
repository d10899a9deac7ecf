"""An optimizer's update of a table, on the rows that its sparse gradient names and no others.

Keras's optimizers turn a sparse gradient into work on the whole table: Adagrad adds the squares of
a thousand rows to a million, Adam decays the momenta of all. Where rows without a gradient keep
still anyway, the update of the rows that have one is the same update. Where they do not, leaving
the rest alone is another rule, `sparse="lazy"`, which users choose.

No optimizer is written anew. While Keras's own `update_step` is traced for a table, the table and
its slots *are* the rows in question: what is read are these rows, and what is assigned goes there.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from tf_dsgd import _tf, arithmetic
from tf_dsgd.checks import named
from tf_dsgd.console import say
from tf_dsgd.optimizers.delay import DelayTolerantOptimizer
from tf_dsgd.strategies.tracing import current_trace
from tf_dsgd.strategies.variable import ReplicaVariable

_ELEMENTWISE = {
    getattr(keras.optimizers, name)
    for name in (
        *("SGD", "RMSprop", "Adam", "AdamW", "Adadelta", "Adagrad", "Adamax", "Nadam", "Ftrl"),
        "Lion",
    )
}
"""Each entry's update depends on its own gradient and slots alone. Subclasses may do otherwise."""

# A table of as many rows is worth a hint when all of it is updated for each message.
_MANY_ROWS = 100_000


def keeps_still(optimizer: keras.optimizers.Optimizer) -> bool:
    """Whether its update leaves an entry alone that has a gradient of zero."""
    if type(optimizer) is keras.optimizers.SGD:
        return not optimizer.momentum
    return type(optimizer) is keras.optimizers.Adagrad


def check_lazy(optimizer: keras.optimizers.Optimizer) -> None:
    """Raises a ValueError if `sparse="lazy"` would give this optimizer another rule's numbers."""
    if type(optimizer) in _ELEMENTWISE or isinstance(optimizer, DelayTolerantOptimizer):
        return
    raise ValueError(
        'sparse="lazy" updates the rows of a table that a gradient names, which is right for '
        f"optimizers that treat each entry by itself: {_names()}, and those of tf_dsgd.optimizers. "
        f'Use one of them, or sparse="dense". Received: {type(optimizer).__name__}.'
    )


def _names() -> str:
    return ", ".join(sorted(kind.__name__ for kind in _ELEMENTWISE))


def check_lazy_options(optimizer: keras.optimizers.Optimizer) -> None:
    """Raises a ValueError if Keras would make gradients of tables dense before the update."""
    for name, remedy in (
        ("global_clipnorm", "clipnorm or clipvalue"),
        ("gradient_accumulation_steps", "a larger push_every"),
    ):
        value = getattr(optimizer, name, None)
        if value is not None:
            raise ValueError(
                f'sparse="lazy" does not go with {name}, by which Keras makes the gradient of a '
                f"table one of all its rows. Use {remedy} instead. Received: {name}={value!r}."
            )


def check_split(
    optimizer: keras.optimizers.Optimizer, variable: keras.Variable, lazy: bool
) -> None:
    """Raises a ValueError for what cannot act on a table by rows."""
    name = getattr(variable, "path", variable.name)
    said = f"The table {name!r} is split by rows, and its update is that of the rows in a message"
    if isinstance(optimizer, DelayTolerantOptimizer):
        raise ValueError(
            f"{said}; {type(optimizer).__name__} would keep the whole table once more for each "
            "worker. Use one of Keras's optimizers, or leave the table out of `placement`."
        )
    if not keeps_still(optimizer):
        if type(optimizer) not in _ELEMENTWISE:  # whatever `sparse` is
            raise ValueError(
                f"{said}. Use an optimizer that treats each entry by itself, and no subclass of "
                f"it, which may do otherwise: {_names()}; or leave the table out of `placement`. "
                f"Received: {type(optimizer).__name__}."
            )
        if not lazy:
            raise ValueError(
                f"{said}; {type(optimizer).__name__} changes rows without a gradient, too. With "
                'sparse="lazy" it leaves them alone, which is another rule; or use Adagrad, or SGD '
                "without momentum."
            )
    options = ("gradient_accumulation_steps", "global_clipnorm", "weight_decay", "use_ema")
    for option in options:
        value = getattr(optimizer, option, None)
        if value and (option != "weight_decay" or _tf.decays(optimizer, variable)):
            raise ValueError(
                f"{said}; {option} of {optimizer.name!r} takes all rows. Leave it out, or leave "
                f"the table out of `placement`. Received: {option}={value!r}."
            )
    constraint = getattr(variable, "constraint", None)
    if constraint is not None:
        raise ValueError(
            f"{said}; its constraint takes all rows. Leave it out, or leave the table out of "
            f"`placement`. Received: {named(constraint)}."
        )


class _View:
    """Some rows of a table, and of its slots, in their place while an update is traced."""

    def __init__(self, table: ReplicaVariable, rows: tf.Tensor, side_by_side: bool):
        self._shape = table.shape
        self._rows = rows
        self._side_by_side = side_by_side
        self._values: dict[int, tf.Tensor] = {}
        self._written: dict[int, Any] = {}
        self._added: dict[int, tf.Tensor] = {}
        """Of variables that were added to once and not assigned: what was added."""

    def has(self, variable: ReplicaVariable) -> bool:
        """Whether it is the table or shaped like it."""
        return variable.shape == self._shape

    def read(self, variable: ReplicaVariable) -> tf.Tensor:
        """The rows, as last assigned."""
        key = id(variable)
        if key not in self._values:
            value = variable.read_rows(self._rows)
            self._values[key] = value + self._added[key] if key in self._added else value
        return self._values[key]

    def write(self, variable: ReplicaVariable, method: str, value: Any) -> None:
        """They are assigned, added to, or subtracted from."""
        value = tf.convert_to_tensor(value, variable.dtype)
        if method not in ("assign", "assign_add", "assign_sub"):
            raise ValueError(
                f"An update by rows may assign, add or subtract. Received: {method} of "
                f'{variable.name!r}. Use sparse="dense".'
            )
        key = id(variable)
        added = {"assign_add": value, "assign_sub": -value}.get(method)
        if added is not None and key not in self._written:
            self._added[key] = added
            if key in self._values:
                self._values[key] += added
        else:
            self._values[key] = value if added is None else self.read(variable) + added
            self._added.pop(key, None)
        self._written[key] = variable

    def scatter(self) -> None:
        """Traces that the table and its slots have them.

        Where another update runs beside this one, and adds its own, what was added is added in
        place. Under the lock rows are written: TensorFlow's kernel for that copies memory, and that
        which adds takes ten times as long, longer than to read the rows and write them.
        """
        for key, variable in self._written.items():
            if self._side_by_side and key in self._added:
                variable.add_rows(self._rows, self._added[key])
            else:
                variable.write_rows(self._rows, self.read(variable))


@contextlib.contextmanager
def by_rows(
    optimizer: keras.optimizers.Optimizer, lazy: bool, side_by_side: bool = False
) -> Iterator[None]:
    """Within, the optimizer updates tables by the rows of sparse gradients, where that is right.

    Args:
        optimizer: the one that makes the step.
        lazy: whether rows without a gradient keep still whatever the optimizer does with a
            gradient of zero.
        side_by_side: whether other updates are made meanwhile.
    """
    plain = optimizer.update_step
    all_rows = not (lazy or keeps_still(optimizer))

    def update_step(gradient: Any, variable: Any, learning_rate: Any) -> None:
        trace = current_trace()
        if trace is None or not isinstance(gradient, tf.IndexedSlices):
            plain(gradient, variable, learning_rate)
            return
        if isinstance(optimizer, DelayTolerantOptimizer):  # by rows by itself
            plain(gradient, variable, learning_rate)
            return
        table = variable.value if isinstance(variable, keras.Variable) else variable
        if all_rows:
            _hint(optimizer, table)
            # Of the type that an optimizer of the user's knows.
            slices = tf.IndexedSlices(gradient.values, gradient.indices, gradient.dense_shape)
            plain(slices, variable, learning_rate)
            return
        if lazy:
            check_lazy(optimizer)
        gradient = arithmetic.merged_rows(gradient)
        trace.view = view = _View(table, gradient.indices, side_by_side)
        try:
            plain(gradient.values, variable, learning_rate)
        finally:
            trace.view = None
        view.scatter()

    with _tf.method_replaced(optimizer, "update_step", update_step):
        yield


def _hint(optimizer: keras.optimizers.Optimizer, table: ReplicaVariable) -> None:
    """Says once of a table that each message costs all its rows."""
    if table.shape[0] < _MANY_ROWS or table.hinted or type(optimizer) not in _ELEMENTWISE:
        return
    if "sparse" not in inspect.signature(type(table.distribute_strategy)).parameters:
        return
    table.hinted = True
    say(
        f"{type(optimizer).__name__} updates all {table.shape[0]} rows of {table.name!r} for each "
        'message, as plain Keras does. With sparse="lazy" it updates those that have a gradient.'
    )
