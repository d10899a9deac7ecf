"""Reading rows of tables that are split: what `tf.gather` and its like do with them.

A table is no tensor. TensorFlow asks it for one, it raises a TypeError, and TensorFlow then asks
the dispatchers that are registered here, which answer with the rows of the mini-batch. So
`keras.layers.Embedding`, `keras.ops.take` and a user's own `tf.gather` read a split table alike,
and everything else is refused with that TypeError. No class of Keras or TensorFlow is changed.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_dsgd import _tf, _tf_gradient
from tf_dsgd.strategies.rows import reading
from tf_dsgd.strategies.rows.tables import SplitTable
from tf_dsgd.strategies.tracing import current_trace


def lookup(table: SplitTable, ids: tf.Tensor) -> tf.Tensor:
    """Rows of a table, `[*ids.shape, *row]`, read where they are; their gradient is sparse.

    Each row is read once, however often it is named, and without the lock of its shard; where it
    is on another task, those of a whole round before its first step (`rounds.py`). Outside a step a
    drain comes first, as before any reading.
    """
    trace = current_trace()
    if trace is not None and trace.side == "worker" and _tf.is_in_branch_or_loop():
        raise ValueError(
            f"Rows of the table {table.name!r}, which is split by rows, are looked up within "
            "tf.cond, a loop, tf.map_fn or an RNN, where TensorFlow has no gradient of it. Look "
            "them up before it."
        )
    if trace is None and tf.executing_eagerly():
        table.distribute_strategy.settle()
    _tf.note_access(table)
    row = table.shape.as_list()[1:]
    flat = tf.reshape(ids, [-1])
    shape = tf.concat([tf.shape(ids), row], 0)
    if trace is not None and trace.lookups is not None:
        trace.lookups.append((table, flat))
        found = reading.kept(table, flat)
    else:
        flat = reading.within(table, flat)
        named, place = tf.unique(flat)
        (rows,) = reading.from_shards([table], [named])
        found = tf.gather(rows, place)
    found = tf.reshape(found, shape)
    whole = tf.constant(table.shape.as_list(), flat.dtype)
    found = _tf_gradient.rows_of_table(found, table.handle, flat, whole)
    return tf.ensure_shape(found, [*ids.shape, *row])


def _table_of(value: Any) -> SplitTable | None:
    value = _tf.in_place_of(value) if isinstance(value, keras.Variable) else value
    return value if isinstance(value, SplitTable) else None


class _Lookup(_tf.OpDispatcher):
    """The answer of an operation that takes a table and ids."""

    def __init__(self, table: str, ids: Sequence[str]):
        self._table = table
        self._ids = ids

    def handle(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        params = args[0] if args else kwargs.get(self._table)
        params = params[0] if isinstance(params, (list, tuple)) and len(params) == 1 else params
        table = _table_of(params)
        if table is None:
            return self.NOT_SUPPORTED
        named = {name: kwargs[name] for name in self._ids if name in kwargs}
        ids = args[1] if len(args) > 1 else next(iter(named.values()), None)
        options = {k: v for k, v in kwargs.items() if k not in (self._table, *named, "name")}
        if ids is None or any(v not in (None, 0) for v in (*args[2:], *options.values())):
            return self.NOT_SUPPORTED  # along another axis, with max_norm, batch_dims ...
        if isinstance(ids, tf.RaggedTensor):
            return ids.with_flat_values(_tf.autocast(params, lookup(table, ids.flat_values)))
        return _tf.autocast(params, lookup(table, tf.convert_to_tensor(ids)))


class _Shape(_tf.OpDispatcher):
    """The answer of `tf.shape`."""

    def handle(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        table = _table_of(args[0] if args else kwargs.get("input"))
        if table is None:
            return self.NOT_SUPPORTED
        return tf.constant(table.shape.as_list(), kwargs.get("out_type") or tf.int32)


@functools.cache
def answer() -> None:
    """From here on TensorFlow's operations find rows of split tables; for the whole process."""
    _Lookup("params", ("indices",)).register(tf.gather)
    _Lookup("params", ("ids",)).register(tf.nn.embedding_lookup)
    _Shape().register(tf.shape)
