"""A table split by rows over the shards: what stands in a `keras.Variable` in a variable's place.

Row r of a table on n shards is on shard r mod n, as its row r // n: the small ids, which are often
the frequent ones, are spread. Nobody holds it whole, neither a worker nor the chief. A worker's
step reads the rows of its mini-batch where they are (`lookups.py`), and a message brings each shard
the gradients of its own rows, to which the compiled optimizer is applied (`touched_rows.py`), with
its slots beside them, split alike.

To the engine the part of a table on one shard is a weight like others, of which workers have no
copy. To Keras the table is one variable, which is never read as one tensor within a step.
"""

from __future__ import annotations

import dataclasses
import itertools
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf_dsgd import _tf
from tf_dsgd.checks import called
from tf_dsgd.console import say
from tf_dsgd.engine.state import Replicated
from tf_dsgd.strategies.rows.blocks import Blocks, rows_of_block
from tf_dsgd.strategies.tracing import check_distributed, current_trace
from tf_dsgd.strategies.uncopied import NoCopy
from tf_dsgd.strategies.variable import Kind

# A table of as many bytes is worth a line when all of it is read.
_LARGE = 256_000_000


@called()
@dataclasses.dataclass(frozen=True)
class Rows:
    """In `placement`: the tables whose path matches are split by rows over the shards.

    Use it for embeddings that are too large for each worker to have a copy, or of which a
    mini-batch touches few rows. Row r is on shard r mod n of n. A worker reads the rows of each
    mini-batch from their shards, without the shards' locks, and sends the gradients of these rows,
    each once. So a step costs what its rows cost, whatever the size of the table.

    Example:

    >>> strategy = tf_dsgd.DownpourStrategy(
    ...     tf_dsgd.LocalCluster(2), placement={"users/.*": tf_dsgd.Rows()}
    ... )
    >>> with strategy.scope():
    ...     ids = keras.Input((2,), dtype="int32")
    ...     rows = keras.layers.Embedding(1000, 4, name="users")(ids)
    ...     model = keras.Model(ids, keras.layers.Dense(1)(keras.layers.Flatten()(rows)))
    ...     model.compile(optimizer="adagrad", loss="mse")
    >>> data = np.arange(64).reshape(32, 2), np.ones((32, 1))
    >>> history = model.fit(*data, batch_size=8, verbose=0)
    >>> strategy.steps
    4
    """


class Part:
    """The rows of a table that are on one shard: a weight of the step, for the engine."""

    copied = False
    no_copy = True
    trainable = True
    momentum = None
    kind = Kind.WEIGHT
    part = 0

    def __init__(self, table: SplitTable, shard: int, primary: tf.Variable):
        self.table = table
        self.shard = shard
        self.primary = primary
        self.shape = primary.shape
        self.dtype = primary.dtype
        self.name = f"{table.name}, rows of shard {shard}"
        self.distribute_strategy = table.distribute_strategy
        self.template = NoCopy(primary, self.name)
        self._unique_id = _tf.unique_id(primary)

    @property
    def rows(self) -> range:
        """Of the table's rows, those that it has."""
        return range(self.shard, self.table.shape[0], len(self.table.parts))

    def on_workers(self) -> Part:
        """Itself, for workers have no copy; `template` is what rules see of one."""
        return self


class Whole:
    """All parts as one variable of the chief's, read and assigned block by block, at rest."""

    def __init__(self, shape: tf.TensorShape, dtype: tf.DType, parts: Sequence[tf.Variable]):
        self._shape = shape
        self._dtype = dtype
        self._step = rows_of_block(shape.as_list(), dtype)
        self.parts = list(parts)

    def blocks(self) -> Iterator[tuple[slice, tf.Variable, slice]]:
        """(rows of the table, a part, the rows there), one block after another."""
        n = len(self.parts)
        for s, part in enumerate(self.parts):
            rows = int(part.shape[0])
            for first in range(0, rows, self._step):
                last = min(first + self._step, rows)
                yield slice(first * n + s, (last - 1) * n + s + 1, n), part, slice(first, last)

    def numpy(self) -> np.ndarray:
        """All rows, in a copy of this process."""
        values = np.empty(self._shape.as_list(), self._dtype.as_numpy_dtype)
        for rows, part, there in self.blocks():
            indices = _here(np.arange(there.start, there.stop))
            with tf.device(part.device):
                found = part.sparse_read(indices)
            values[rows] = found.numpy()
        return values

    def assign(self, value: Any) -> None:
        """Sets all rows."""
        values = np.asarray(value)
        for rows, part, there in self.blocks():
            indices, found = _here(np.arange(there.start, there.stop)), _here(values[rows])
            with tf.device(part.device):
                part.scatter_update(tf.IndexedSlices(found, indices))


def _here(value: Any) -> tf.Tensor:
    """In this process: on another task TensorFlow makes a constant by a call of its own."""
    with tf.device("CPU:0"):
        return tf.constant(value)


def _fill(parts: Sequence[tf.Variable], blocks: Blocks) -> None:
    """Draws every block on every shard, all shards at once; each keeps the rows that are its own.

    A block is drawn as often as there are shards, and so takes no longer than on one.
    """
    n = len(parts)

    def fill(block: tf.Tensor) -> None:
        for shard, part in enumerate(parts):
            with tf.device(part.device):
                first = block * blocks.rows
                skipped = (shard - first) % n
                begin = (first + skipped) // n
                values = blocks.draw(block)[skipped::n]
                values = values[: tf.maximum(int(part.shape[0]) - begin, 0)]
                indices = begin + tf.range(tf.shape(values)[0])
                part.scatter_update(tf.IndexedSlices(values, indices))

    with tf.init_scope():
        spec = tf.TensorSpec([], tf.int32)
        filling = tf.function(fill, autograph=False).get_concrete_function(spec)
        for block in range(blocks.number):
            filling(_here(np.int32(block)))


class SplitTable:
    """A table split by rows, in the place of a `tf.Variable` in a `keras.Variable`.

    Args:
        strategy: whose shards the rows are on.
        shape: of the whole table.
        dtype: its type.
        variable: Keras's, in which it takes the place.
        kind: `Kind.WEIGHT`, or `Kind.SLOT` of an optimizer.
        blocks: its first values.
    """

    trainable = True
    _numbers = itertools.count()

    def __init__(
        self,
        strategy: Any,
        shape: Sequence[int],
        dtype: str,
        variable: keras.Variable,
        kind: Kind,
        blocks: Blocks,
    ):
        self.distribute_strategy = strategy
        self.shape = tf.TensorShape(shape)
        self.dtype = tf.as_dtype(dtype)
        self.name = variable.path
        self._variable = weakref.ref(variable)
        self.kind = kind
        self._unique_id = f"split_table/{next(self._numbers)}"  # Keras finds slots by it
        devices = strategy.shard_devices
        variables = [self._empty(s, device, len(devices)) for s, device in enumerate(devices)]
        _fill(variables, blocks)
        self.primary = Whole(self.shape, self.dtype, variables)
        self.parts = [Part(self, s, variable) for s, variable in enumerate(variables)]
        self._tape_handle: tf.Variable | None = None

    def _empty(self, shard: int, device: str, shards: int) -> tf.Variable:
        """Zeros for the rows of one shard, made there."""
        shape = [len(range(shard, int(self.shape[0]), shards)), *self.shape.as_list()[1:]]
        with tf.init_scope():
            zeros = tf.function(lambda: tf.zeros(shape, self.dtype), autograph=False)
            name = f"{self.name}_{shard}".replace("/", "_")
            return _tf.make_variable_there(zeros.get_concrete_function(), device=device, name=name)

    def is_on(self, shard: int) -> bool:
        """Whether a shard has a part of it: each has."""
        return 0 <= shard < len(self.parts)

    @property
    def device(self) -> str:
        """Where the first part is."""
        return self.primary.parts[0].device

    # -- in a step ----------------------------------------------------------------------------

    @property
    def handle(self) -> tf.Tensor:
        """What gradient tapes know it by: a resource, without rows, of who is traced."""
        trace = current_trace()
        row = [0, *self.shape.as_list()[1:]]
        if trace is not None and trace.side == "worker":
            # One of another task would have what is computed from it computed there.
            store = self.distribute_strategy.engine.store

            def make() -> Replicated:
                zeros = np.zeros(row, self.dtype.as_numpy_dtype)
                return store.replicate(lambda _: zeros, dtype=self.dtype, name="tape")

            return store.cell(("tape", self._unique_id), make).template.handle
        if self._tape_handle is None:
            with tf.init_scope():
                self._tape_handle = _tf.make_variable(
                    tf.zeros(row, self.dtype), device="CPU:0", name="tape"
                )
        return self._tape_handle.handle

    def of_round(self) -> tuple[Replicated, Replicated]:
        """Of each worker the ids whose rows it has read for a round, ascending, and these rows."""
        store = self.distribute_strategy.engine.store
        row = self.shape.as_list()[1:]

        def cell(name: str, dtype: tf.DType, row: Sequence[int]) -> Replicated:
            def make() -> Replicated:
                none = np.zeros([0, *row], dtype.as_numpy_dtype)
                return store.replicate(lambda _: none, dtype=dtype, shape=[None, *row], name=name)

            return store.cell((name, self._unique_id), make)

        return cell("ids_of_round", tf.int64, []), cell("rows_of_round", self.dtype, row)

    def check_in_step(self) -> None:
        """Raises a TypeError where no shard's update is traced, as in `train_on_batch`."""
        check_distributed()
        if current_trace() is None:
            raise TypeError(
                f"The table {self.name!r} is split by rows, and workers train it: by fit, or "
                "strategy.run on a distributed dataset. train_on_batch, and steps on batches of "
                "your own, cannot."
            )

    def split(self, gradient: tf.IndexedSlices) -> list[tf.IndexedSlices]:
        """A gradient of the table as one of each part.

        Raises:
            ValueError: for a gradient of all rows.
        """
        if not isinstance(gradient, tf.IndexedSlices):
            raise ValueError(
                f"The table {self.name!r} is split by rows, and its gradient must be that of some "
                "rows, a tf.IndexedSlices, as the tape gives it. Change its `values`, and not the "
                f"tensor of all rows. Received: {type(gradient).__name__}."
            )
        n = len(self.parts)
        rows = tf.cast(gradient.indices, tf.int64)
        owner = tf.cast(rows % n, tf.int32)
        indices = tf.dynamic_partition(rows // n, owner, n)
        values = tf.dynamic_partition(gradient.values, owner, n)
        return [
            tf.IndexedSlices(v, i, tf.constant(part.shape.as_list(), tf.int64))
            for v, i, part in zip(values, indices, self.parts, strict=True)
        ]

    def read_rows(self, rows: tf.Tensor) -> tf.Tensor:
        """Rows of the part on the shard that is traced."""
        return self._traced_part().sparse_read(rows)

    def add_rows(self, rows: tf.Tensor, values: tf.Tensor) -> None:
        """Adds to rows of the part on the shard that is traced."""
        self._traced_part().scatter_add(tf.IndexedSlices(values, rows))

    def write_rows(self, rows: tf.Tensor, values: tf.Tensor) -> None:
        """Sets rows of the part on the shard that is traced."""
        self._traced_part().scatter_update(tf.IndexedSlices(values, rows))

    def _traced_part(self) -> tf.Variable:
        trace = current_trace()
        return self.parts[trace.shard if trace else 0].primary

    def __tf_tensor__(self, dtype: Any = None, name: Any = None) -> tf.Tensor:
        """Within an update of some rows, these; else a TypeError."""
        del name
        trace = current_trace()
        if trace is None or trace.view is None or not trace.view.has(self):
            regularizer = getattr(self._variable(), "regularizer", None)
            used = "a matrix product" if regularizer is None else "its regularizer"
            raise TypeError(
                f"The table {self.name!r} is split by rows, and was used as one tensor, as by "
                f"{used}. In a step read its rows, by "
                "keras.layers.Embedding, keras.ops.take or tf.gather along axis 0; outside, read "
                "it by numpy() or model.get_weights(). Else leave it out of `placement`; "
                'in place of "auto" give a dict.'
            )
        value = trace.view.read(self)
        return value if dtype is None else tf.cast(value, dtype)

    def __getitem__(self, key: Any) -> tf.Tensor:
        return self.__tf_tensor__()[key]

    def _write(self, method: str, value: Any) -> None:
        trace = current_trace()
        if trace is not None and trace.view is not None and trace.view.has(self):
            trace.view.write(self, method, value)
        elif method == "assign" and tf.executing_eagerly() and trace is None:
            self.distribute_strategy.settle()
            with self.distribute_strategy.engine.explained():
                self.primary.assign(value)
        else:
            raise TypeError(
                f"The table {self.name!r} is split by rows: only the compiled optimizer changes it "
                "within a step, and outside it is assigned as a whole, by assign or set_weights. "
                f"Received: {method}."
            )

    def assign(self, value: Any, **options: Any) -> None:
        """Within an update the rows in question, outside all rows."""
        del options
        self._write("assign", value)

    def assign_add(self, value: Any, **options: Any) -> None:
        """Within an update: adds to the rows in question."""
        del options
        self._write("assign_add", value)

    def assign_sub(self, value: Any, **options: Any) -> None:
        """Within an update: subtracts from the rows in question."""
        del options
        self._write("assign_sub", value)

    # -- outside ------------------------------------------------------------------------------

    def _export_to_saved_model_graph(self, *arguments: Any, **options: Any) -> Any:
        raise ValueError(
            f"The table {self.name!r} is split by rows, and TensorFlow's own formats (SavedModel, "
            "tf.train.Checkpoint) would need it as one variable. Save the model as a .keras file, "
            "or its weights as .weights.h5; loaded outside of the scope it can be exported."
        )

    _serialize_to_tensors = _write_object_proto = _export_to_saved_model_graph

    def numpy(self) -> np.ndarray:
        """All rows at rest, after a drain, in a copy of this process."""
        size = self.shape.num_elements() * self.dtype.size
        if size >= _LARGE:
            say(f"reads {size / 1e6:.0f} MB, the whole table {self.name!r}, into this process")
        self.distribute_strategy.settle()
        with self.distribute_strategy.engine.explained():
            return self.primary.numpy()

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        values = self.numpy()
        return values if dtype is None else values.astype(dtype)

    def of_workers(self) -> None:
        """What workers keep of their own: nothing."""
