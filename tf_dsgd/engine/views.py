"""What rules see of a worker and of a shard while a program traces them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import tensorflow as tf

from tf_dsgd import _tf
from tf_dsgd.algorithm import Algorithm, Message
from tf_dsgd.arithmetic import Gradient
from tf_dsgd.engine.rows import RowLog
from tf_dsgd.engine.shard import Shard
from tf_dsgd.engine.state import Replicated, Store, traced
from tf_dsgd.engine.step import Step
from tf_dsgd.engine.traffic import Encoded


class Program(Protocol):
    """What is traced."""

    step: Step
    algorithm: Algorithm
    store: Store
    shards: list[Shard]
    row_logs: dict[int, RowLog]

    def shard_cell(
        self, shard: int, key: Any, shape: Sequence[int | None], dtype: tf.DType
    ) -> tf.Variable: ...
    def average_statistics(self, shard: int) -> None: ...


class WorkerView:
    """`algorithm.Worker` while the first worker's functions are traced."""

    def __init__(self, program: Program):
        self._program = program
        self.weights = [v.on_workers().template for v in program.step.weights]
        self.said: dict[int, Encoded] = {}
        """While a message is traced: by weight, what the codec says of its tensor."""

    def encoded(self, index: int, emitted: Any, square: tf.Tensor) -> None:
        self.said[index] = Encoded(emitted, square)

    def cell(
        self,
        name: str,
        index: int,
        *,
        shape: Any = None,
        dtype: Any = None,
        copy_weight: bool = False,
    ) -> tf.Variable:
        weight = self._program.step.weights[index]
        shape = weight.shape if shape is None else tf.TensorShape(shape)
        dtype = dtype or weight.dtype
        store = self._program.store
        key = (name, _tf.unique_id(weight), dtype)
        zeros = np.zeros([d or 0 for d in shape.as_list()], tf.as_dtype(dtype).as_numpy_dtype)
        copies = weight.on_workers()
        where = {"dtype": dtype, "shape": shape, "name": name, "part": copies.part}
        codec = self._program.algorithm.codec
        if name in codec.keeps:
            store.holds_back = store.holds_back or name == codec.held_back
            return store.kept_cell(key, zeros, shape, copies.part).template

        def make() -> Replicated:
            if copy_weight:
                return store.replicate(lambda m: copies.copies[m].read_value(), **where)
            return store.replicate(lambda _: zeros, **where)

        return store.cell(key, make).template

    def is_sparse(self, index: int) -> bool:
        return self._program.step.sparse[index]

    def is_copied(self, index: int) -> bool:
        return bool(self._program.step.weights[index].copied)

    def rate(self, index: int) -> tf.Tensor:
        return self._program.step.rate(index)

    def reset_optimizer(self) -> None:
        self._program.step.reset_optimizer()

    def local_gradients(self, gradients: Sequence[Gradient]) -> list[Gradient]:
        return self._program.step.local_gradients(gradients)


class ShardView:
    """`algorithm.Shard` while a shard's function is traced."""

    def __init__(self, program: Program, index: int):
        self._program = program
        self.index = index
        self._numbers = [i for i, v in enumerate(program.step.weights) if v.shard == index]
        self._mine = [program.step.weights[i] for i in self._numbers]
        self.weights = [v.primary for v in self._mine]
        self.noted = False
        """Whether the rule now being traced let the optimizer change the weights."""
        self.num_workers = program.store.num_workers
        self.fetched_rows: Mapping[int, tf.Tensor] = {}
        """While a fetch is traced: of the step's weights fetched by rows, which rows."""
        self.for_another: tf.Tensor | bool = False
        """And whether another worker's message is computed with them."""
        self._once: dict[str, tuple[Any, bool]] = {}

    @property
    def version(self) -> tf.Tensor:
        return self._program.shards[self.index].version.read_value()

    @property
    def steps(self) -> tf.Tensor:
        return self._program.shards[self.index].schedule_step.read_value()

    def cell(
        self,
        name: str,
        index: int,
        *,
        shape: Any = None,
        dtype: Any = None,
        per_worker: bool = False,
    ) -> tf.Variable:
        weight = self._mine[index]
        shape = weight.shape.as_list() if shape is None else list(shape)
        return self._program.shard_cell(
            self.index,
            (name, _tf.unique_id(weight)),
            [self.num_workers] * per_worker + shape,
            dtype or weight.dtype,
        )

    def counter(self, name: str, dtype: Any = tf.int64, *, per_worker: bool = False) -> tf.Variable:
        shape = [self.num_workers] * per_worker
        return self._program.shard_cell(self.index, (name, "counter"), shape, tf.as_dtype(dtype))

    def is_sparse(self, index: int) -> bool:
        return self._program.step.sparse[self._numbers[index]]

    def is_copied(self, index: int) -> bool:
        return bool(self._mine[index].copied)

    def rows(self, index: int) -> range:
        weight = self._mine[index]
        rows: range | None = getattr(weight, "rows", None)  # of a part of a table
        return range(weight.shape[0]) if rows is None else rows

    def is_trained(self, index: int) -> bool:
        return self._mine[index].trainable

    @property
    def has_optimizer(self) -> bool:
        return bool(self._program.step.applications)

    def once(self, name: str, body: Callable[[], Any]) -> Any:
        noted_before = self.noted
        if name not in self._once:
            self.noted = False
            function = traced(body)
            self._once[name] = function, self.noted
        function, notes = self._once[name]
        self.noted = noted_before or notes
        return function()

    def optimize(
        self, gradients: Sequence[Gradient], scale: Any = 1.0, message: Message | None = None
    ) -> None:
        side_by_side = self._program.shards[self.index].lock_free
        self._program.step.optimize(self.index, gradients, scale, message, side_by_side)
        self.note_rows(gradients)

    def update_tables(self, gradients: Sequence[Gradient]) -> None:
        self._program.step.update_tables(self.index, gradients)

    def holding_rows(self, tensors: Sequence[Gradient], body: Callable[[], None]) -> None:
        rows = {i: t.indices for i, t in enumerate(tensors) if isinstance(t, tf.IndexedSlices)}
        self._program.shards[self.index].row_locks.held(rows, body)

    def remember(self, worker: tf.Tensor) -> None:
        logs = self._program.row_logs
        rows = {i: logs[i].or_all(r, self.for_another) for i, r in self.fetched_rows.items()}
        self._program.step.remember(self.index, worker, rows)

    def note_rows(self, tensors: Sequence[Gradient]) -> None:
        """Has the rows of sparse weights in the logs from which workers fetch."""
        self.noted = True
        for i, tensor in zip(self._numbers, tensors, strict=False):
            if i in self._program.row_logs and isinstance(tensor, tf.IndexedSlices):
                self._program.row_logs[i].note(tensor.indices)

    def average_statistics(self) -> None:
        self._program.average_statistics(self.index)

    def count_updates(self, number: Any = 1) -> None:
        self._program.step.count_updates(self.index, number)
