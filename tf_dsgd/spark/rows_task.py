"""What a Spark task does with the rows of a DataFrame. Travels to it by value, as `frames` does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

MOST_BYTES = 4 << 20
"""Of a piece that Spark moves at a time."""


def to_records(
    layout: Any, first: int, workers: int, before: int
) -> Callable[[Any], Iterator[Any]]:
    """What Spark calls with the Arrow batches of a partition.

    Args:
        layout: (names, dtype, shape) of each array, the record's fields as NumPy has them, and the
            names of the batches' columns in their order, which are called otherwise there.
        first: the first task that is a worker's.
        workers: how many of them there are.
        before: partitions of other data sets, which Spark counts before those of this one.
    """
    arrays, described, columns = layout

    def run(batches: Iterator[Any]) -> Iterator[Any]:
        import pyarrow
        from pyspark import TaskContext

        number = TaskContext.get().partitionId() - before
        task = first + number % workers
        dtype = np.dtype([tuple(field) for field in described])
        for batch in batches:
            records = np.empty(batch.num_rows, dtype)
            for field, (names, kind, shape) in enumerate(arrays):
                records[f"f{field}"] = array_of(batch, columns, names, kind, shape)
            step = max(1, MOST_BYTES // dtype.itemsize)
            pieces = [
                records[start : start + step].tobytes() for start in range(0, len(records), step)
            ]
            if pieces:
                numbers = [pyarrow.array([n] * len(pieces), "int32") for n in (task, number)]
                yield pyarrow.RecordBatch.from_arrays(
                    [*numbers, pyarrow.array(pieces, "binary")], ["task", "partition", "records"]
                )

    return run


def keyed(key: str) -> Callable[[Any], tuple[int, tuple[str, int, bytes]]]:
    """What makes (task, (key, partition, records)) of a row of what `to_records` gives."""

    def run(row: Any) -> tuple[int, tuple[str, int, bytes]]:
        return row[0], (key, row[1], bytes(row[2]))

    return run


def itself(task: int) -> int:
    """The task that records with this key go to."""
    return task


def array_of(
    batch: Any, columns: list[str], names: list[str], kind: str, shape: tuple[int, ...]
) -> np.ndarray:
    """Some of an Arrow batch's columns as one array."""
    parts = [column_of(batch.column(columns.index(name)), name) for name in names]
    return np.concatenate(parts, axis=1).astype(kind).reshape(-1, *shape)


def column_of(column: Any, name: str) -> np.ndarray:
    """A column as a matrix; one of numbers has one column."""
    values = column.flatten() if is_list(column) else column
    if column.null_count or values.null_count:
        raise ValueError(
            f"Column {name!r} has nulls. Fill them, or leave the rows out, before training: "
            f"df.dropna(subset=[{name!r}])."
        )
    rows = values.to_numpy(zero_copy_only=False)
    return rows.reshape(len(column), -1) if len(column) else rows.reshape(0, 1)


def is_list(column: Any) -> bool:
    """Whether an Arrow column holds arrays."""
    import pyarrow

    return bool(pyarrow.types.is_list(column.type) or pyarrow.types.is_large_list(column.type))
