"""What a strategy adds to a checkpoint of the model: all that no model holds.

- `sequences`: messages that each worker has numbered; `handed_out`: mini-batches given to workers;
- `version`, `counters` (of each worker), `staleness` and others: what each shard has
  counted. At rest all have counted the same messages, so that where there are more shards or fewer
  than there were, shard s of them goes on with the counts of shard s modulo those that there were;
- `KIND_n` and `optimizer_i_n`: the n-th variable of a kind (`seed`, `weight` ...), or of the i-th
  optimizer, as the shards have it (a scalar: as each shard has it, `[shards]`);
- `shards_of_weight` and `shards_of_optimizer_i`, `[shards]`: which of them hold more of it than
  scalars, and so run a step. The others' scalars, such as NAdam's product, stay where they began;
  where there are more shards or fewer than there were, no shard goes on with such a one;
- the same `_of_workers`, `[workers, ...]`: what each worker has of it, where it has its own;
- `KIND_n_CELL_of_workers`: what each worker's codec keeps for it, as a residual;
- `schedule_i`: the mini-batches by which the schedule of the i-th optimizer goes;
- `virtual_seconds`, `delays`: a simulated cluster's clock, and where its delays go on.

Variables are known by the order in which they are made, which is the script's. What belongs to one
that is made only as training begins waits until then.
"""

from __future__ import annotations

import collections
import functools
import itertools
import re
import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf_dsgd import _tf
from tf_dsgd.engine.base import Engine
from tf_dsgd.engine.state import Replicated
from tf_dsgd.strategies.rows.tables import SplitTable
from tf_dsgd.strategies.variable import Kind, ReplicaVariable

_OF_WORKERS = "_of_workers"
_CELL = re.compile(r"(?:[a-z]+|optimizer_\d+)_\d+_([a-z]+)_of_workers$")
"""The names of what codecs keep."""
_OWED = {"residual", "momentum"}
"""Those among them that are parts of gradients: a run that goes on has them, or is another."""
_RUN_BY = "shards_of_"


class Checkpoint:
    """Takes and sets the state of a strategy, which must be at rest.

    Args:
        engine: what runs its workers.
        kept: names of the cells that its codec keeps on workers.
    """

    def __init__(self, engine: Engine, kept: Collection[str] = ()):
        self._engine = engine
        self._kept = kept
        engine.store.first = self._first_of_cell
        self._variables: list[tuple[str, weakref.ref[ReplicaVariable | SplitTable]]] = []
        self._numbers: collections.Counter[str] = collections.Counter()
        self._optimizers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._places = itertools.count()
        self._waiting: dict[str, np.ndarray] = {}
        """Restored, of variables that are not made yet."""
        self._shards_there = 0
        """How many shards there were of what was restored."""
        self._ran_there: dict[str, np.ndarray] = {}
        """Restored, which of them ran a step of what."""
        self._metrics: dict[str, np.ndarray] = {}
        """Restored, of metrics, which `fit` resets before an epoch begins."""

    def add(self, variable: ReplicaVariable | SplitTable, creator: Any = None) -> None:
        """Registers a new variable, which `creator` makes."""
        group = variable.kind.name.lower()
        if isinstance(creator, keras.optimizers.Optimizer):
            # An optimizer makes its first variable when it is made, and slots at any time after.
            if creator not in self._optimizers:
                self._optimizers[creator] = next(self._places)
            group = f"optimizer_{self._optimizers[creator]}"
        name = f"{group}_{self._numbers[group]}"
        self._numbers[group] += 1
        self._variables.append((name, weakref.ref(variable)))
        mine = {n: self._waiting.pop(n) for n in (name, name + _OF_WORKERS) if n in self._waiting}
        if mine:
            self._check_variable(name, variable, mine, self._shards_there)
            self._set(name, variable, mine)

    def number_of(self, optimizer: keras.optimizers.Optimizer) -> int:
        """By which names an optimizer is known here."""
        return self._optimizers[optimizer]

    def _all(self) -> Iterator[tuple[str, Any]]:
        for name, reference in self._variables:
            variable = reference()
            if variable is not None:
                yield name, variable

    # -- taking -----------------------------------------------------------------------------

    def take(
        self,
        outer: keras.optimizers.Optimizer | None,
        held: Collection[int] | None = None,
    ) -> dict[str, np.ndarray]:
        """Arrays by name.

        Args:
            outer: the shards' own optimizer.
            held: ids of the strategy's variables that are saved elsewhere; None for those that
                any model and its optimizer hold, metrics included.
        """
        arrays = self._counts()
        own = set() if outer is None else {id(v.value) for v in outer.variables}
        for name, variable in self._all():
            workers = variable.of_workers()
            if variable.kind is Kind.METRIC and held is None:
                continue
            here = held is not None and (id(variable) not in held or not variable.shape.rank)
            if here or workers is not None or id(variable) in own:
                arrays[name] = self._on_shards(name, variable)
            if workers is not None:
                arrays[name + _OF_WORKERS] = workers
        for name, cell in self._cells():
            found, template = cell.read(), cell.template  # which may be a lost worker's
            zeros = np.zeros(template.shape.as_list(), template.dtype.as_numpy_dtype)
            arrays[name] = np.stack([found.get(m, zeros) for m in range(self._engine.num_workers)])
        return arrays | self._not_made() | self._shards_that_run()

    def _not_made(self) -> dict[str, np.ndarray]:
        """What was restored of variables that are not made yet."""
        groups = {_RUN_BY + name.rpartition("_")[0] for name in self._waiting}
        return self._waiting | {n: ran for n, ran in self._ran_there.items() if n in groups}

    def _cells(self) -> Iterator[tuple[str, Replicated]]:
        """What the codec keeps on workers, by its name here."""
        kept = self._engine.store.kept
        for name, variable in self._all():
            for cell, replicated in kept.get(_tf.unique_id(variable), {}).items():
                yield f"{name}_{cell}{_OF_WORKERS}", replicated

    def _first_of_cell(self, weight: str, cell: str, shape: tuple[int, ...]) -> np.ndarray | None:
        """What was restored of one that is made now, of this shape on each worker.

        Another codec's, such as PowerSGD's Q of another rank, is of no use and begins anew.
        """
        names = [name for name, variable in self._all() if _tf.unique_id(variable) == weight]
        found = self._waiting.pop(f"{names[0]}_{cell}{_OF_WORKERS}", None) if names else None
        if found is None or found.shape[1:] == shape:
            return found
        if cell in _OWED:
            _check_alike(f"{names[0]}_{cell}", found, (len(found), *shape), found.dtype)
        return None

    def _counts(self) -> dict[str, np.ndarray]:
        """All but variables."""
        arrays: dict[str, np.ndarray] = {}
        for s, shard in enumerate(self._engine.shards):
            arrays |= {_of_shard(name, s): value for name, value in shard.state().items()}
        arrays["sequences"] = np.asarray(self._engine.numbers(), np.int64)
        arrays["handed_out"] = np.array(self._engine.handed_out, np.int64)
        return arrays | self._engine.state()

    def _on_shards(self, name: str, variable: Any) -> np.ndarray:
        if variable.shape.rank:
            return variable.primary.numpy()
        # A scalar weight's slot is where the weight is; other shards' copies of it are not changed.
        shards = range(len(self._engine.shards))
        of_weight = variable.beside is not None
        return np.stack(
            [variable.at_rest_on(variable.shard if of_weight else s).numpy() for s in shards]
        )

    def _shards_that_run(self) -> dict[str, np.ndarray]:
        """Which shards hold weights, and which slots of each optimizer.

        Some optimizers make scalars that Keras does not say are theirs: they are among the weights.
        """
        runs: dict[str, np.ndarray] = {}
        for name, variable in self._all():
            group = name.rpartition("_")[0]
            if group.startswith(("weight", "optimizer_")) and variable.shape.rank:
                here = [variable.is_on(s) for s in range(len(self._engine.shards))]
                runs[_RUN_BY + group] = np.array(here) | runs.get(_RUN_BY + group, False)
        return runs

    # -- setting ----------------------------------------------------------------------------

    def check(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Looks whether `restore` can set what `take` gave; changes nothing.

        Raises:
            ValueError: if the state is of another number of workers, or of others' variables, of
                another schedule, or not complete.
        """
        given, arrays = arrays, self._for_shards_here(arrays)
        here = self._counts()
        missing = sorted(here.keys() - arrays.keys() - self._engine.state().keys())
        if "sequences" in arrays:
            number, workers = len(np.atleast_1d(arrays["sequences"])), self._engine.num_workers
            if number != workers:
                raise ValueError(
                    f"This state is of {number} workers; the strategy has {workers}. Restore it "
                    "with as many, or start from the weights alone."
                )
        if missing:
            raise ValueError(f"The state is not complete: {missing} are missing.")
        for name, value in here.items():
            if name in arrays:
                _check_alike(name, arrays[name], value.shape, value.dtype)
        for name, variable in self._all():
            if variable.kind is not Kind.METRIC:
                self._check_variable(name, variable, arrays, _shards_of(given))
        for name, cell in self._cells():
            if name in arrays and _cell_of(name) in _OWED:
                shape = (self._engine.num_workers, *cell.template.shape)
                _check_alike(name, arrays[name], shape, cell.template.dtype.as_numpy_dtype)
        for name, value in _run_by(arrays).items():
            _check_alike(name, value, (_shards_of(given),), np.dtype(bool))
        self._check_kept(arrays)
        self._engine.check(arrays)

    def _for_shards_here(self, arrays: Mapping[str, Any]) -> dict[str, Any]:
        """With the counters of as many shards as there are here."""
        there, own = _shards_of(arrays), dict(arrays)
        for s, shard in enumerate(self._engine.shards if there else ()):
            for name in shard.state():
                found = _of_shard(name, s % there)
                if found in arrays:
                    own[_of_shard(name, s)] = arrays[found]
        return own

    def _check_kept(self, arrays: Mapping[str, np.ndarray]) -> None:
        """What a codec has held back is a part of the training: it is not left out unsaid."""
        found = {cell for cell in map(_cell_of, arrays) if cell in _OWED}
        if found - set(self._kept):
            raise ValueError(
                f"This state has what compression holds back on workers: {sorted(found)}. This "
                f"strategy keeps {sorted(self._kept)}. Restore it with the `compression` with "
                "which it was saved, or with one that keeps as much, or start from the weights "
                "alone."
            )

    def _check_variable(
        self, name: str, variable: Any, arrays: Mapping[str, np.ndarray], shards: int
    ) -> None:
        """Of a state of so many shards."""
        shape, dtype = tuple(variable.shape.as_list()), np.dtype(variable.dtype.as_numpy_dtype)
        several = {
            name: shape or (shards,),
            name + _OF_WORKERS: (self._engine.num_workers, *shape),
        }
        for each, expected in several.items():
            if each in arrays:
                _check_alike(f"{each} ({variable.name})", arrays[each], expected, dtype)

    def restore(self, arrays: Mapping[str, Any]) -> None:
        """Sets what `take` gave.

        Raises:
            ValueError: as `check` does, before anything is changed.
        """
        self.check(arrays)
        self._engine.quiesce()
        engine, rest = self._engine, self._for_shards_here(arrays)
        counts = {name: rest.pop(name) for name in self._counts() if name in rest}
        for s, shard in enumerate(engine.shards):
            own = {name: counts[_of_shard(name, s)] for name in shard.state()}
            shard.restore(own, engine.store.incarnations)
        engine.restore(arrays)
        engine.restored(counts["sequences"].tolist(), int(counts["handed_out"]))
        self._shards_there, self._ran_there = _shards_of(arrays), _run_by(arrays)
        self._metrics = {}
        for name, variable in self._all():
            mine = {n: rest.pop(n) for n in (name, name + _OF_WORKERS) if n in rest}
            if variable.kind is Kind.METRIC:
                self._metrics |= mine
            else:
                self._set(name, variable, mine)
        for name, cell in self._cells():
            zeros = np.zeros([engine.num_workers, *cell.template.shape])
            value = rest.pop(name, zeros)
            cell.each(
                functools.partial(_assign_copy, value if np.shape(value) == zeros.shape else zeros)
            )
        kept = {None, *self._kept}
        self._waiting = {
            name: value
            for name, value in rest.items()
            if _is_variable(name) and _cell_of(name) in kept
        }
        metrics = self._metrics
        self.restore_metrics()
        self._metrics = metrics  # `fit` will have reset them once more

    def _set(self, name: str, variable: Any, arrays: Mapping[str, np.ndarray]) -> None:
        dtype = variable.dtype.as_numpy_dtype
        with tf.init_scope():
            if name in arrays:
                value = _as(arrays[name], dtype)
                if variable.shape.rank:
                    variable.primary.assign(value)
                else:
                    for s, there in enumerate(self._where_from(name)):
                        variable.at_rest_on(s).assign(value[there])
            if name + _OF_WORKERS in arrays:
                variable.restore_copies(_as(arrays[name + _OF_WORKERS], dtype))

    def _where_from(self, name: str) -> list[int]:
        """With which shard's scalar of this name each shard here goes on."""
        there, here = self._shards_there, len(self._engine.shards)
        ran = self._ran_there.get(_RUN_BY + name.rpartition("_")[0])
        if there == here or ran is None or not ran.any():
            return [s % there for s in range(here)]
        return [s % there if ran[s % there] else int(ran.argmax()) for s in range(here)]

    def restore_metrics(self) -> None:
        """Gives metrics, once `fit` has reset them, what was restored, if they are the same."""
        arrays, self._metrics = self._metrics, {}
        metrics = [(n, v) for n, v in self._all() if v.kind is Kind.METRIC]
        try:
            for name, variable in metrics:
                self._check_variable(name, variable, arrays, self._shards_there)
        except ValueError:
            return
        for name, variable in metrics:
            self._set(name, variable, arrays)


def _assign_copy(values: np.ndarray, worker: int, copy: tf.Variable) -> None:
    copy.assign(values[worker])


def _is_variable(name: str) -> bool:
    kinds = tuple(f"{kind.name.lower()}_" for kind in Kind)
    return name.startswith((*kinds, "optimizer_"))


def _cell_of(name: str) -> str | None:
    """Which cell of a codec an array is; None of all else."""
    match = _CELL.match(name)
    return match[1] if match else None


def _check_alike(name: str, value: Any, shape: tuple[int, ...], dtype: np.dtype) -> None:
    found = np.asarray(value)
    alike = found.dtype == dtype or _is_raw(found.dtype, dtype)
    if found.shape != shape or not alike:
        raise ValueError(
            f"The state does not fit: {name} is {found.shape} {found.dtype}, and {shape} {dtype} "
            "is expected."
        )


def _is_raw(found: np.dtype, dtype: np.dtype) -> bool:
    """Whether NumPy read a type that it does not know, such as bfloat16, as so many bytes."""
    return found.kind == "V" and found.itemsize == dtype.itemsize


def _as(value: Any, dtype: Any) -> np.ndarray:
    value = np.asarray(value)
    return value.view(dtype) if _is_raw(value.dtype, np.dtype(dtype)) else value


def _run_by(arrays: Mapping[str, Any]) -> dict[str, np.ndarray]:
    return {n: np.asarray(value) for n, value in arrays.items() if n.startswith(_RUN_BY)}


def _shards_of(arrays: Iterable[str]) -> int:
    """How many shards a state is of."""
    return sum(re.fullmatch(r"version(_\d+)?", name) is not None for name in arrays)


def _of_shard(name: str, shard: int) -> str:
    """A shard's entry in a checkpoint; the first one's have the plain name."""
    return f"{name}_{shard}" if shard else name
