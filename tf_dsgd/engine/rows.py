"""Which rows of an embedding changed since a worker last fetched it.

Fetching a table of a million rows to refresh the hundred that others touched would be most of the
work. The shard keeps a log of the rows of every update and each worker's place in it; a fetch takes
the rows from there on. When the log has grown to as many rows as the table, it is emptied and every
worker fetches the whole table once. So they do after writes that the log did not see.

A worker that fetches to compute another's message keeps its place. Its copy is then the table as it
is, and so is all of what is remembered of the other's fetch. Of its own fetches the rows it got are
remembered as it fetches them once more.
"""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from tf_dsgd import _tf

_WHOLE_TABLE = -1


class RowLog:
    """The log of one table.

    Args:
        table: the table on its shard.
        edition: counts what functions of the caller's write to it, besides shards' updates.
        num_workers: how many fetch it.
        device: the shard's.
    """

    def __init__(
        self, table: tf.Variable, edition: tf.Variable, num_workers: int, device: str | None
    ):
        self._table = table
        self._edition = edition
        self._seen = _tf.make_variable(
            np.zeros([num_workers], np.int64), device=device, name="seen"
        )
        self._rows = _tf.make_variable(
            np.zeros([0], np.int64),
            device=device,
            dtype=tf.int64,
            shape=[None],
            name="changed_rows",
        )
        self._place = _tf.make_variable(
            np.full([num_workers], _WHOLE_TABLE, np.int64), device=device, name="place"
        )

    def note(self, rows: tf.Tensor) -> None:
        """Adds the rows of one update."""
        log = tf.concat([self._rows.read_value(), tf.cast(rows, tf.int64)], 0)
        places = self._place.read_value()
        following = tf.boolean_mask(places, places >= 0)
        seen_by_all = tf.cond(
            tf.size(following) > 0,
            lambda: tf.reduce_min(following),
            lambda: tf.size(log, tf.int64),
        )
        log = log[seen_by_all:]
        places = tf.where(places >= 0, places - seen_by_all, places)
        full = tf.size(log) >= self._table.shape[0]
        self._rows.assign(tf.cond(full, lambda: log[:0], lambda: log), read_value=False)
        whole = tf.fill(tf.shape(places), tf.constant(_WHOLE_TABLE, tf.int64))
        self._place.assign(tf.where(full, whole, places), read_value=False)

    def changed(
        self, worker: tf.Tensor, for_another: tf.Tensor | bool = False
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """(rows changed since `worker` last asked, whether it needs the whole table)."""
        place = tf.gather(self._place.read_value(), worker)
        log = self._rows.read_value()
        rows = log[tf.maximum(place, 0) :]
        end = tf.where(for_another, place, tf.size(log, tf.int64))
        self._place.scatter_update(tf.IndexedSlices(end[None], worker[None]))
        edition, seen = self._edition.read_value(), tf.gather(self._seen.read_value(), worker)
        now = tf.where(for_another, seen, edition)
        self._seen.scatter_update(tf.IndexedSlices(now[None], worker[None]))
        return tf.unique(rows)[0], (seen != edition) | (place < 0)

    def differ(
        self, worker: tf.Tensor, unsent: tf.Tensor | None, for_another: tf.Tensor | bool = False
    ) -> tf.Tensor:
        """Rows in which `worker`'s copy may differ from the table: changed, or its own `unsent`.

        `for_another` the worker keeps its place in the log.
        """
        changed, whole = self.changed(worker, for_another)
        if unsent is not None:
            changed = tf.unique(tf.concat([changed, unsent], 0))[0]
        return self.or_all(changed, whole)

    def or_all(self, rows: tf.Tensor, whole: tf.Tensor | bool) -> tf.Tensor:
        """These rows, or all of the table's."""
        size = self._table.shape[0]
        return tf.cond(whole, lambda: tf.range(size, dtype=tf.int64), lambda: rows)

    def forget(self) -> None:
        """Every worker fetches the whole table next; for writes that the log did not see."""
        self._place.assign(np.full(self._place.shape, _WHOLE_TABLE, np.int64))
        self._rows.assign(np.zeros([0], np.int64))
