"""What a strategy adds to a checkpoint of the model: all that no model holds.

- `sequences`: messages that each worker has numbered;
- `version`, `books`, `staleness` and others: what each shard has counted;
- `own_KIND_n`, `[workers, ...]`: what workers have of the strategy's n-th variable of a kind
  (slots, seeds, weights), where each has its own;
- `shard_optimizer_n`: the variables of an outer optimizer;
- `virtual_seconds`, `delays`: a simulated cluster's clock, and where its delays go on.
"""

from __future__ import annotations

import collections
import weakref
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np

from tf_dsgd.engine.base import Engine
from tf_dsgd.strategies.variable import Kind, ReplicaVariable

_OUTER = "shard_optimizer_"


class Checkpoint:
    """Takes and sets the state of a strategy, which must be settled.

    What belongs to variables that are made only as training begins is kept until then.
    """

    def __init__(self, engine: Engine):
        self._engine = engine
        self._variables: list[tuple[str, weakref.ref[ReplicaVariable]]] = []
        self._numbers: collections.Counter[Kind] = collections.Counter()
        self._outer: list[np.ndarray] = []

    def add(self, variable: ReplicaVariable) -> None:
        """Registers a new variable; a later run of the same script makes the same ones in turn."""
        name = f"own_{variable.kind.name}_{self._numbers[variable.kind]}"
        self._numbers[variable.kind] += 1
        self._variables.append((name, weakref.ref(variable)))

    def _of_workers(self) -> Iterator[tuple[str, ReplicaVariable]]:
        for name, reference in self._variables:
            variable = reference()
            if variable is not None and variable.kind is not Kind.METRIC:
                yield name, variable

    def take(self, outer: keras.optimizers.Optimizer | None) -> dict[str, np.ndarray]:
        """Arrays by name; `outer` is the shards' own optimizer."""
        arrays = {"sequences": np.asarray(self._engine.store.sequences(), np.int64)}
        arrays |= self._engine.state()
        for s, shard in enumerate(self._engine.shards):
            arrays |= {_of_shard(name, s): value for name, value in shard.state().items()}
        for name, variable in self._of_workers():
            if variable.copies is not None and (
                variable.owned_by_workers or variable.kept_by_workers
            ):
                lost = variable.primary.numpy()  # what a worker that is not there will begin with
                found = variable.copies.read()
                workers = range(self._engine.num_workers)
                arrays[name] = np.stack([found.get(m, lost) for m in workers])
        if outer is not None and outer.built:
            arrays |= {f"{_OUTER}{n}": v.numpy() for n, v in enumerate(outer.variables)}
        return arrays

    def restore(
        self, arrays: dict[str, Any], outer: keras.optimizers.Optimizer | None = None
    ) -> None:
        """Sets what `take` gave.

        Raises:
            ValueError: if the state is of another number of workers or shards.
        """
        store, shards = self._engine.store, self._engine.shards
        _check_number("workers", len(arrays["sequences"]), store.num_workers, "with as many")
        found = sum(name.startswith("version") for name in arrays)
        _check_number("shards", found, len(shards), "with as many ps tasks")
        for s, shard in enumerate(shards):
            own = {name: arrays[_of_shard(name, s)] for name in shard.state()}
            shard.restore(own, store.incarnations)
        store.restore_sequences(arrays["sequences"])
        self._engine.restore(arrays)
        self._engine.go_on_from(shards[0].steps_done())
        for name, variable in self._of_workers():
            if name in arrays:
                variable.restore_copies(arrays[name])
        count = sum(name.startswith(_OUTER) for name in arrays)
        self._outer = [arrays[f"{_OUTER}{n}"] for n in range(count)]
        if outer is not None and outer.built:
            self.restore_outer(outer)

    def restore_outer(self, outer: keras.optimizers.Optimizer) -> None:
        """Gives the shards' own optimizer, once it was built, its state, if any was restored."""
        values, self._outer = self._outer, []
        if values:
            for variable, value in zip(outer.variables, values, strict=True):
                variable.value.restore_on_shards(value)


def _check_number(what: str, found: int, expected: int, remedy: str) -> None:
    if found != expected:
        raise ValueError(
            f"This state is of {found} {what}; the strategy has {expected}. Restore it {remedy}, "
            "or start from the weights alone."
        )


def _of_shard(name: str, shard: int) -> str:
    """A shard's entry in a checkpoint; the first one's have the plain name."""
    return f"{name}_{shard}" if shard else name
