"""How rows of a split table come to a worker: from their shards, or from what a round has read."""

from __future__ import annotations

import math
from collections.abc import Sequence

import tensorflow as tf

from tf_dsgd.engine.bundles import from_bytes, to_bytes
from tf_dsgd.strategies.rows.tables import SplitTable


def within(table: SplitTable, ids: tf.Tensor) -> tf.Tensor:
    """The same ids, once it is known that the table has them."""
    in_table = (ids >= 0) & (ids < table.shape[0])
    size = int(table.shape[0])
    said = (
        f"The table {table.name} has rows 0 to {size - 1}. (Keras's own lookups add {size} to an "
        "id below 0 first.) Received the ids"
    )
    check = tf.debugging.Assert(
        tf.reduce_all(in_table), [said, tf.boolean_mask(ids, tf.logical_not(in_table))]
    )
    with tf.control_dependencies([check] if check is not None else []):  # None: it ran eagerly
        return tf.identity(ids)


def from_shards(tables: Sequence[SplitTable], named: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Rows of each table, each named once, from where they are; without the locks of the shards.

    What a shard is asked for, and what it gives, is one tensor each, whatever the number of tables:
    each tensor that crosses between processes costs as much as some hundred rows.
    """
    shards = len(tables[0].parts)
    owners = [tf.cast(ids % shards, tf.int32) for ids in named]
    rows = [
        tf.dynamic_partition(tf.cast(ids // shards, tf.int64), owner, shards)
        for ids, owner in zip(named, owners, strict=True)
    ]
    places = [tf.dynamic_partition(tf.range(tf.size(o)), o, shards) for o in owners]
    found: list[list[tf.Tensor]] = [[] for _ in tables]
    for shard in range(shards):
        of_shard = _of_one(tables, [each[shard] for each in rows], shard)
        for all_rows, given in zip(found, of_shard, strict=True):
            all_rows.append(given)
    return [tf.dynamic_stitch(*each) for each in zip(places, found, strict=True)]


def _of_one(tables: Sequence[SplitTable], rows: Sequence[tf.Tensor], shard: int) -> list[tf.Tensor]:
    """Rows of each table's part on a shard."""
    parts = [table.parts[shard].primary for table in tables]
    if len(tables) == 1:
        with tf.device(parts[0].device):
            return [_gather(parts[0], rows[0])]
    numbers = tf.stack([tf.size(each, tf.int64) for each in rows])
    asked = tf.concat([numbers, *rows], 0)
    with tf.device(parts[0].device):
        count = len(tables)
        of_tables = tf.split(asked[count:], asked[:count], num=count)
        data = [to_bytes(_gather(*each)) for each in zip(parts, of_tables, strict=True)]
        sent = tf.concat(data, 0)
    shapes = [table.shape.as_list()[1:] for table in tables]
    sizes = [math.prod(s) * t.dtype.size for s, t in zip(shapes, tables, strict=True)]
    pieces = tf.split(sent, numbers * sizes, num=len(tables))
    return [
        from_bytes(piece, table.dtype, [-1, *shape])
        for piece, table, shape in zip(pieces, tables, shapes, strict=True)
    ]


def _gather(part: tf.Variable, rows: tf.Tensor) -> tf.Tensor:
    return tf.raw_ops.ResourceGather(
        resource=part.handle, indices=rows, dtype=part.dtype, name="lookup"
    )


def keep(tables: Sequence[SplitTable], ids: Sequence[tf.Tensor]) -> None:
    """Traces that a worker reads the rows of these ids, for `kept`."""
    named = [
        tf.sort(tf.unique(within(table, each))[0]) for table, each in zip(tables, ids, strict=True)
    ]
    for table, each, rows in zip(tables, named, from_shards(tables, named), strict=True):
        of_ids, of_rows = table.of_round()
        of_ids.template.assign(each, read_value=False)
        of_rows.template.assign(rows, read_value=False)


def kept(table: SplitTable, ids: tf.Tensor) -> tf.Tensor:
    """Rows of ids that are among those of the last `keep`."""
    of_ids, of_rows = table.of_round()
    place = tf.searchsorted(of_ids.template.read_value(), tf.cast(ids, tf.int64))
    return tf.gather(of_rows.template.read_value(), place)
