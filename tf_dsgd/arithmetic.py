"""Arithmetic on gradients, dense or of some rows."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tf_dsgd._tf_rows import RowsOnce

Gradient = Any  # tf.Tensor | tf.IndexedSlices


def write(variable: tf.Variable, value: Gradient) -> None:
    """`variable := value`; of an `IndexedSlices` only its rows."""
    if isinstance(value, tf.IndexedSlices):
        variable.scatter_update(value)
    else:
        variable.assign(value, read_value=False)


def add(variable: tf.Variable, value: Gradient) -> None:
    """`variable += value`."""
    if isinstance(value, tf.IndexedSlices):
        variable.scatter_add(value)
    else:
        variable.assign_add(value, read_value=False)


def descend(variable: tf.Variable, rate: Any, gradient: Gradient) -> None:
    """`variable -= rate * gradient`, in one pass over memory where TensorFlow has an operation.

    For bfloat16 it has none on GPUs.
    """
    passes = variable.dtype.is_floating and variable.dtype != tf.bfloat16
    if isinstance(gradient, tf.IndexedSlices) or not passes:
        add(variable, scaled(gradient, -rate))
        return
    tf.raw_ops.ResourceApplyGradientDescent(
        var=variable.handle, alpha=tf.cast(rate, variable.dtype), delta=gradient
    )


def cast(value: Gradient, dtype: Any) -> Gradient:
    """`value` in another type; of an `IndexedSlices` its values."""
    if isinstance(value, tf.IndexedSlices):
        return type(value)(tf.cast(value.values, dtype), value.indices, value.dense_shape)
    return tf.cast(value, dtype)


def is_number(dtype: tf.DType) -> bool:
    """Whether values of this type can be added."""
    return bool(dtype.is_floating or dtype.is_integer)


def type_of_sums(dtype: tf.DType) -> tf.DType:
    """In which numbers of a type are added up: for floats of 16 bits float32.

    A sum of float16 may be above 65504, and one of bfloat16 has a bit for each doubling.
    """
    return tf.float32 if dtype.is_floating and dtype.size < 4 else dtype


def scaled(value: Gradient, factor: Any) -> Gradient:
    """`factor * value`."""
    if isinstance(value, tf.IndexedSlices):
        values = value.values * tf.cast(factor, value.values.dtype)
        return type(value)(values, value.indices, value.dense_shape)
    return value * tf.cast(factor, value.dtype)


def quotient(value: Gradient, divisor: tf.Tensor) -> Gradient:
    """`value / divisor`, and 0 where the divisor is 0."""
    if isinstance(value, tf.IndexedSlices):
        values = quotient(value.values, divisor)
        return type(value)(values, value.indices, value.dense_shape)
    return tf.math.divide_no_nan(value, tf.cast(divisor, value.dtype))


def difference(now: tf.Tensor, before: tf.Tensor) -> tf.Tensor:
    """`now - before`, and 0 where both are the same, be it infinite or NaN."""
    plain = now - before
    if not now.dtype.is_floating:
        return plain
    as_bits = {2: tf.int16, 4: tf.int32, 8: tf.int64}[now.dtype.size]
    same = tf.equal(tf.bitcast(now, as_bits), tf.bitcast(before, as_bits))
    return tf.where(same, tf.zeros_like(plain), plain)


def set_row(variable: tf.Variable, row: tf.Tensor, value: Any) -> None:
    """`variable[row] := value`."""
    value = tf.convert_to_tensor(value, variable.dtype)
    row = tf.cast(row, tf.int32)  # on GPUs TensorFlow writes rows of bools by no other type
    variable.scatter_update(tf.IndexedSlices(value[None], row[None]))


def no_rows(variable: Any) -> tf.IndexedSlices:
    """None of a variable's rows."""
    shape = variable.shape.as_list() or [1]  # a scalar has no rows to name
    none = tf.zeros([0, *shape[1:]], variable.dtype)
    return tf.IndexedSlices(none, tf.zeros([0], tf.int64), tf.constant(shape, tf.int32))


def merged_rows(slices: tf.IndexedSlices) -> RowsOnce:
    """The same sum with every row named once."""
    if isinstance(slices, RowsOnce):
        return slices
    rows, place = tf.unique(slices.indices)
    values = tf.math.unsorted_segment_sum(slices.values, place, tf.size(rows))
    return RowsOnce(values, rows, slices.dense_shape)
