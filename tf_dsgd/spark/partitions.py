"""A DataFrame's rows as workers' own datasets, without a way through the driver.

Tasks turn Arrow batches into records of a fixed length, columns one after the other; Spark moves
them to the tasks of workers, which write them to a file each; TensorFlow reads that, in C++.
"""

from __future__ import annotations

import collections
import dataclasses
import uuid
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf
from pyspark import cloudpickle
from pyspark.sql import functions as F
from pyspark.sql import types

from tf_dsgd.checks import called, integer, positive_int
from tf_dsgd.spark import rows_task
from tf_dsgd.spark.session import check_runs

cloudpickle.register_pickle_by_value(rows_task)

_DTYPES: dict[type[types.DataType], str] = {
    types.BooleanType: "|b1",
    types.ByteType: "|i1",
    types.ShortType: "<i2",
    types.IntegerType: "<i4",
    types.LongType: "<i8",
    types.FloatType: "<f4",
    types.DoubleType: "<f8",
}


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a worker has its rows."""

    paths: list[str]
    """A file for each partition, in their order."""
    rows: int


@called(examples={"columns": '("x", "y")', "batch_size": "32"})
def partitions(
    df: Any, columns: tuple[Any, ...], batch_size: int, *, shuffle_rows: int = 0
) -> Partitions:
    """Gives the rows of a DataFrame for training with `tf_dsgd.spark.Distributor`.

    Pass it to `Distributor.run` as an argument of `train`, or in a list, tuple or dict that is one,
    and there

        model.fit(strategy.distribute_datasets_from_function(data), shuffle=False)

    Partition p goes to worker p modulo the number of workers, from task to task and not by way of
    the driver. Each worker then reads its own rows from files on its own disk, each row once an
    epoch, partition by partition. Partitions may be of any length, or empty; the last mini-batch of
    a worker may be smaller. A worker whose rows are used up holds nobody up.

    Args:
        df: a `pyspark.sql.DataFrame`.
        columns: what `fit` takes: `(x, y)` or `(x, y, sample_weight)`, where each is the name of a
            column, or a list of names that become one array; or `(x,)`. Columns are of numbers,
            truth values, or arrays of numbers, all of one length in a column; without nulls.
        batch_size: rows of a mini-batch; at least 1.
        shuffle_rows: from how many rows the next one is drawn, anew each epoch; 0 keeps the order.

    Returns:
        Partitions, a function that `strategy.distribute_datasets_from_function` takes.

    Raises:
        ValueError: for a column that is not there, is there twice, is named twice in a list, or
            holds something else, naming it; for arrays of several lengths. Nulls are found as
            training starts, and named by Spark's error.
        RuntimeError: if the DataFrame's session was stopped.

    Example:

    >>> data = tf_dsgd.spark.partitions(df, (["a", "b"], "label"), 32)  # doctest: +SKIP
    >>> def train(data):
    ...     strategy = tf_dsgd.DownpourStrategy()
    ...     with strategy.scope():
    ...         model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    ...         model.compile("sgd", "mse")
    ...     dataset = strategy.distribute_datasets_from_function(data)
    ...     return model.fit(dataset, epochs=3, shuffle=False).history
    >>> tf_dsgd.spark.Distributor(2).run(train, data)  # doctest: +SKIP
    """
    batch_size = positive_int("batch_size", batch_size)
    shuffle_rows = integer("shuffle_rows", shuffle_rows, 0)
    if not hasattr(df, "mapInArrow"):
        raise ValueError(f"df must be a DataFrame of Spark. Received: {df!r}.")
    check_runs(df)
    if not isinstance(columns, tuple) or not 1 <= len(columns) <= 3:
        raise ValueError(
            'columns must be (x, y), such as (["a", "b"], "label"), or (x, y, sample_weight), each '
            f"a column's name or a list of names. Received: {columns!r}."
        )
    fields = [_names(column, df) for column in columns]
    lengths = _lengths(df, [name for names in fields for name in names])
    layout = []
    for column, names in zip(columns, fields, strict=True):
        kinds = [_dtype(df.schema[name].dataType) for name in names]
        width = sum(lengths.get(name, 1) for name in names)
        alone = isinstance(column, str) and column not in lengths
        layout.append((names, np.result_type(*kinds).str, () if alone else (width,)))
    return Partitions(Layout(tuple(layout)), batch_size, shuffle_rows, df)


@dataclasses.dataclass(frozen=True)
class Layout:
    """How a record is made of columns: (names of columns, dtype, shape) of each array."""

    arrays: tuple[tuple[list[str], str, tuple[int, ...]], ...]

    def dtype(self) -> np.dtype[Any]:
        """A record, as NumPy has it: without gaps."""
        return np.dtype(
            [(f"f{n}", dtype, shape) for n, (_, dtype, shape) in enumerate(self.arrays)]
        )

    def decode(self, records: tf.Tensor) -> Any:
        """The arrays of a mini-batch of records, a string each."""
        whole, found = self.dtype(), []
        data = tf.io.decode_raw(records, tf.uint8, fixed_length=whole.itemsize)
        start = 0
        for number, (_, name, shape) in enumerate(self.arrays):
            dtype, size = np.dtype(name), whole[number].itemsize
            part = data[:, start : start + size]
            start += size
            if dtype.itemsize == 1:
                found.append(tf.reshape(tf.cast(part, tf.as_dtype(dtype)), [-1, *shape]))
                continue
            part = tf.reshape(part, [-1, *shape, dtype.itemsize])
            found.append(tf.bitcast(part, tf.as_dtype(dtype)))
        return tuple(found) if len(found) > 1 else found[0]


class Partitions:
    """The rows of a DataFrame, a pipeline for each worker. Made by `partitions`."""

    def __init__(self, layout: Layout, batch_size: int, shuffle_rows: int, df: Any):
        self.layout, self.batch_size, self.shuffle_rows = layout, batch_size, shuffle_rows
        self.key = uuid.uuid4().hex
        self.places: list[Place] = []
        """The workers' files, in a `train` that `Distributor.run` has called."""
        self._df = df

    def __repr__(self) -> str:
        columns = tuple(names if shape else names[0] for names, _, shape in self.layout.arrays)
        return (
            f"partitions(df, {columns}, batch_size={self.batch_size}, "
            f"shuffle_rows={self.shuffle_rows})"
        )

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_df": None}  # which is the driver's alone

    def __call__(self, context: tf.distribute.InputContext) -> tf.data.Dataset:
        """The dataset of a worker, as `distribute_datasets_from_function` asks for it."""
        if not self.places:
            raise RuntimeError(
                f"{self} has no rows here. It has where tf_dsgd.spark.Distributor(...).run(train, "
                "data) calls train, and is an argument of train, or in a list, tuple or dict that "
                "is one. A variable that train finds outside of itself is none."
            )
        if not isinstance(context, tf.distribute.InputContext):
            raise TypeError(
                f"{self} is called by strategy.distribute_datasets_from_function(data), with a "
                f"tf.distribute.InputContext. Received: {context!r}."
            )
        if context.num_input_pipelines != len(self.places):
            raise ValueError(
                f"{self} is read by the {len(self.places)} workers of the Distributor that it was "
                f"given to, and the strategy here has {context.num_input_pipelines}. Use "
                "tf_dsgd.TFCluster(), the default, in train."
            )
        place = self.places[context.input_pipeline_id]
        paths = tf.constant(place.paths, tf.string)  # of none, too
        dataset = tf.data.FixedLengthRecordDataset(paths, self.layout.dtype().itemsize)
        if self.shuffle_rows:
            dataset = dataset.shuffle(self.shuffle_rows)
        dataset = dataset.batch(self.batch_size).map(self.layout.decode)
        batches = -(-place.rows // self.batch_size)
        return dataset.apply(tf.data.experimental.assert_cardinality(batches))

    def records(self, first: int, workers: int, before: int) -> Any:
        """An RDD of (task, (key, partition, records)).

        Args:
            first: the first task that is a worker's.
            workers: how many of them there are.
            before: partitions that come before those of this RDD in one of all data sets.
        """
        columns = list(dict.fromkeys(name for names, _, _ in self.layout.arrays for name in names))
        # mapInArrow takes a dot for a field's, and has no word for a backtick.
        check_runs(self._df)
        df = self._df.select(*[_column(name).alias(f"c{n}") for n, name in enumerate(columns)])
        layout = (self.layout.arrays, self.layout.dtype().descr, columns)
        work = rows_task.to_records(layout, first, workers, before)
        rows = df.mapInArrow(work, "task int, partition int, records binary").rdd
        return rows.map(rows_task.keyed(self.key))


def within(arguments: Any) -> Iterator[Partitions]:
    """Those that are arguments, or are in lists, tuples or dicts that are."""
    if isinstance(arguments, Partitions):
        yield arguments
    elif isinstance(arguments, (list, tuple)):
        for each in arguments:
            yield from within(each)
    elif isinstance(arguments, dict):
        yield from within(list(arguments.values()))


def _names(column: Any, df: Any) -> list[str]:
    names = [column] if isinstance(column, str) else column
    if not isinstance(names, list) or not names:
        raise ValueError(
            f"Each of columns must be a column's name, or a list of names. Received: {column!r}."
        )
    twice = [name for name, times in collections.Counter(map(repr, names)).items() if times > 1]
    if twice:
        raise ValueError(f"Column {twice[0]} is more than once in {names}. Name it once.")
    cases = df.sparkSession.conf.get("spark.sql.caseSensitive") == "true"
    same = str if cases else str.lower
    for name in names:
        if name not in df.columns:
            raise ValueError(f"The DataFrame has no column {name!r}. It has: {df.columns}.")
        alike = [each for each in df.columns if same(each) == same(name)]
        if len(alike) > 1:
            raise ValueError(
                f"The DataFrame has several columns that Spark takes for {name!r}: {alike}. Rename "
                "them, as by df.toDF(...)."
            )
        kind = df.schema[name].dataType
        if _dtype(kind) is None:
            raise ValueError(
                f"Column {name!r} is of {kind.simpleString()}, which is no number. Turn it into "
                "numbers, or an array of numbers, in Spark (for ML's vectors: "
                "pyspark.ml.functions.vector_to_array)."
            )
    return names


def _column(name: str) -> Any:
    """The column of this name, which may hold a dot."""
    return F.col("`{}`".format(name.replace("`", "``")))


def _dtype(kind: types.DataType) -> Any:
    """NumPy's for a column, or for the elements of its arrays; None if there is none."""
    return _DTYPES.get(type(kind.elementType if isinstance(kind, types.ArrayType) else kind))


def _lengths(df: Any, names: list[str]) -> dict[str, int]:
    """How long the arrays in columns are; a job, if there are such columns."""
    arrays = [name for name in names if isinstance(df.schema[name].dataType, types.ArrayType)]
    if not arrays:
        return {}
    sizes = [each(F.size(_column(name))) for name in arrays for each in (F.min, F.max)]
    found = list(df.select(*sizes).first())
    lengths = {}
    for name, least, most in zip(arrays, found[::2], found[1::2], strict=True):
        if least != most or most is None or least < 1:
            raise ValueError(
                f"Column {name!r} must hold arrays of one length, at least 1, without nulls. "
                f"Received: lengths {least} to {most} (-1 is null)."
            )
        lengths[name] = most
    return lengths
