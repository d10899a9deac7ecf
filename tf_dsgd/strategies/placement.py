"""On which shard a variable is, what each shard holds, and which part of a worker has what."""

from __future__ import annotations

import dataclasses
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
    """Balances the shards by bytes. Called, it gives the table of `model_parallel`'s parts."""

    def __init__(self, num_shards: int):
        self.split = Patterns(None)
        """Which tables are split by rows."""
        self.parts: Any = None
        """What lays replicas over several devices, a `ReplicaParts`; None for one."""
        self._bytes = [0] * num_shards
        self._variables = [0] * num_shards

    def __call__(self) -> PartsTable:
        """Which layers are on which part of each worker, and what goes between the parts."""
        return PartsTable((), ()) if self.parts is None else self.parts.table()

    def place(self, beside: Any, synchronization: Any) -> int:
        """The shard for a new variable: a slot's beside its weight, a weight's the lightest."""
        if isinstance(beside, ReplicaVariable):
            return beside.shard
        of_optimizer = isinstance(_tf.creating_object(), keras.optimizers.Optimizer)
        if of_optimizer or synchronization == tf.VariableSynchronization.ON_READ:
            return 0
        return self._bytes.index(min(self._bytes))

    def hold(self, shard: int, size: int) -> None:
        """Counts a variable of so many bytes that is now on a shard."""
        self._variables[shard] += 1
        self._bytes[shard] += size

    def held(self) -> list[tuple[int, int]]:
        """(variables, bytes) of each shard."""
        return list(zip(self._variables, self._bytes, strict=True))
