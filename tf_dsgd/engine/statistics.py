"""Moving statistics, as BatchNorm's, of which each worker has seen a part of the data.

A mini-batch with statistic b makes x <- m x + (1 - m) b, at a momentum m. After U of them x is
m^U x0 + c: what is left of the x0 that they began with, and their own contribution. Another's s, on
which the same U mini-batches had gone on, would be

    m^U s + c  =  x + m^U (s - x0).

That is what a message makes of a shard's statistic, and a fetch of a worker's that is not sent yet.
It is between s and the statistics of mini-batches, so stable for any number of workers; each
mini-batch counts as much as in a single process; and where nobody else sent it is x, to the bit.
The mean of the workers' changes would move as slowly as one of them, and their sum diverges.

Where workers' parameters are averaged, all began with s, and none of them comes first:

    A s + (1 - A) sum_k c_k / sum_k (1 - a_k),    a_k = m^(U_k),    A = product of the a_k.

U counts assignments of that variable, which for layers that are shared, frozen, or skipped are not
as many as mini-batches.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import tensorflow as tf

from tf_dsgd import _tf
from tf_dsgd.arithmetic import type_of_sums


class Moved(NamedTuple):
    """What a worker has made of a statistic since it last sent it."""

    now: tf.Tensor
    base: tf.Tensor
    """What it began with, or fetched since."""
    times: tf.Tensor
    """How often it was assigned: int64."""


def compose(value: tf.Tensor, moved: Moved, momentum: float) -> tf.Tensor:
    """`value`, had the worker's mini-batches gone on from it."""
    kept = _kept(moved.times, momentum, value.dtype)
    return tf.where(moved.times > 0, moved.now + kept * (value - moved.base), value)


def apply(variable: Any, moved: Moved, lock_free: bool) -> None:
    """Traces that a message changes the primary."""
    value = variable.primary.read_value()
    now = compose(value, moved, variable.momentum)
    if lock_free:  # what another message writes meanwhile stays
        variable.primary.assign_add(now - value, read_value=False)
    else:
        variable.primary.assign(now, read_value=False)


def collect(variable: Any, moved: Moved, cell: Callable[..., tf.Variable]) -> None:
    """Traces that a message is kept until `average`; `cell(key, shape, dtype)` is a shard's."""
    total, weight, times, messages = _kept_together(variable, cell)
    kept = _kept(moved.times, variable.momentum, total.dtype)
    total.assign_add(tf.cast(moved.now, total.dtype), read_value=False)
    weight.assign_add(1.0 - kept, read_value=False)
    times.assign_add(moved.times, read_value=False)
    messages.assign_add(1, read_value=False)


def average(variable: Any, cell: Callable[..., tf.Variable]) -> None:
    """Traces that the messages collected are averaged into the primary, and forgotten."""
    cells = _kept_together(variable, cell)
    total, weight, times, messages = (c.read_value() for c in cells)
    value = tf.cast(variable.primary.read_value(), total.dtype)
    kept = _kept(times, variable.momentum, value.dtype)
    others = (tf.cast(messages, value.dtype) - weight) * value
    contribution = tf.math.divide_no_nan(total - others, weight)
    mean = kept * value + (1.0 - kept) * contribution
    result = tf.where(messages == 1, total, tf.where(weight > 0.0, mean, value))
    result = tf.cast(result, variable.dtype)
    with tf.control_dependencies([result]):
        variable.primary.assign(result, read_value=False)
        for each in cells:
            each.assign(tf.zeros_like(each), read_value=False)


def _kept_together(variable: Any, cell: Callable[..., tf.Variable]) -> list[tf.Variable]:
    """Sums over messages: of what workers have, of 1 - m^U, of U; and how many there are."""
    name, dtype = _tf.unique_id(variable), type_of_sums(variable.dtype)
    return [
        cell(("total", name), variable.shape.as_list(), dtype),
        cell(("weight", name), [], dtype),
        cell(("times", name), [], tf.int64),
        cell(("messages", name), [], tf.int64),
    ]


def _kept(times: tf.Tensor, momentum: float, dtype: tf.DType) -> tf.Tensor:
    return tf.pow(tf.constant(momentum, dtype), tf.cast(times, dtype))
