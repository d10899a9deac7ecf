"""On which shard a variable is, what each shard holds, and which part of a worker has what."""

from __future__ import annotations

import collections
import dataclasses
import math
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import keras
import tensorflow as tf

from tf_dsgd import _tf
from tf_dsgd.strategies.parts.parts_table import PartsTable
from tf_dsgd.strategies.rows.splitting import Patterns
from tf_dsgd.strategies.variable import ReplicaVariable


@dataclasses.dataclass(frozen=True)
class ShardInfo:
    """What one shard holds."""

    device: str
    variables: int
    bytes: int


class Placement:
    """Balances the shards by bytes. Called, it gives the table of `model_parallel`'s parts.

    Args:
        num_shards: how many there are.
        most_bytes: how large a variable may be that is not split; None for any size.
        forget: called with the ids of variables that nobody has any more.
    """

    def __init__(
        self, num_shards: int, most_bytes: int | None, forget: Callable[[Iterable[str]], bool]
    ):
        self._most_bytes = most_bytes
        self._forget = forget
        self.split = Patterns(None)
        """Which tables are split by rows."""
        self.parts: Any = None
        """What lays replicas over several devices, a `ReplicaParts`; None for one."""
        self._bytes = [0] * num_shards
        self._variables = [0] * num_shards
        self._mutex = threading.Lock()
        self._left = False
        """Whether something of them is still to be forgotten."""
        self._gone: collections.deque[tuple[int, int, int, str]] = collections.deque()
        """(shard, number, bytes, id) of those that are no more, as Python says at any moment."""

    def __call__(self) -> PartsTable:
        """Which layers are on which part of each worker, and what goes between the parts."""
        return PartsTable((), ()) if self.parts is None else self.parts.table()

    def check(self, options: Mapping[str, Any]) -> None:
        """Refuses a variable of Keras, before it is made with these options, that is too large."""
        created = _tf.variable_being_created(options.get("initial_value"))
        if self._most_bytes is None or created is None:
            return
        shape, dtype = tuple(created[0].shape), tf.as_dtype(created[0].dtype)
        size = math.prod(shape) * dtype.size
        if size > self._most_bytes:
            raise ValueError(
                f"{created[0].path!r} of shape {shape} has {size / 1e9:.1f} GB, and TensorFlow "
                f"sends no tensor above {self._most_bytes / 1e9:.1f} GB to another process, whole. "
                "An embedding can be split by rows, as by DownpourStrategy(placement="
                f'{{"{created[0].path}": tf_dsgd.Rows()}}); on a LocalCluster nothing is sent.'
            )

    def place(self, beside: Any, synchronization: Any) -> int:
        """The shard for a new variable: a slot's beside its weight, a weight's the lightest."""
        if isinstance(beside, ReplicaVariable):
            return beside.shard
        of_optimizer = isinstance(_tf.creating_object(), keras.optimizers.Optimizer)
        if of_optimizer or synchronization == tf.VariableSynchronization.ON_READ:
            return 0
        self._sweep()
        return self._bytes.index(min(self._bytes))

    def hold(self, shard: int, variable: Any, size: int | None = None, variables: int = 1) -> None:
        """Counts a variable, or so many bytes for it, on a shard, until it is no more."""
        if size is None:
            size = (variable.shape.num_elements() or 0) * variable.dtype.size
        with self._mutex:
            self._variables[shard] += variables
            self._bytes[shard] += size
        what = shard, variables, size, _tf.unique_id(variable)
        weakref.finalize(variable, self._gone.append, what).atexit = False

    def held(self) -> list[tuple[int, int]]:
        """(variables, bytes) of each shard."""
        self._sweep()
        return list(zip(self._variables, self._bytes, strict=True))

    def _sweep(self) -> None:
        """Forgets variables that are no more."""
        with self._mutex:
            ids = set()
            while self._gone:
                shard, variables, size, variable = self._gone.popleft()
                self._variables[shard] -= variables
                self._bytes[shard] -= size
                ids.add(variable)
            if ids or self._left:
                self._left = self._forget(ids)
