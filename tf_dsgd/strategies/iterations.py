"""Iterations of a batch method under `fit`: an epoch is one, and takes as many passes as it needs.

With an epoch's first step all of its mini-batches are handed out, which is the first pass. Then the
workers come to rest, the coordinator says where to evaluate next, and the same data are handed out
again, until the line search has ended. So `fit` makes all other steps of an epoch when the weights
are at its result, and its metrics are of the last pass, which is at those weights.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Generator, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf_dsgd import _tf
from tf_dsgd.algorithms.batch_methods import BatchMethod, Evaluated, Iteration, Settings
from tf_dsgd.algorithms.sandblaster import ShardVectors
from tf_dsgd.console import say
from tf_dsgd.engine.base import Engine
from tf_dsgd.engine.program import Program
from tf_dsgd.strategies.caller import steps_per_epoch_of_fit
from tf_dsgd.strategies.kept import Kept
from tf_dsgd.strategies.objective import Objective

_OURS = "batch_"
_VECTOR = f"{_OURS}vector_"


class Vectors:
    """`batch_methods.Vectors` on the shards of a program; each call is one round trip.

    Args:
        program: whose weights they are.
        rows: m.
        engine: explains what a lost task raises.
        calls: round trips before, to those of other programs.
    """

    def __init__(self, program: Program, rows: int, engine: Engine, calls: int = 0):
        self.program = program
        self._vectors = ShardVectors(rows)
        self._engine = engine
        self.calls = calls
        """Round trips so far."""

    @functools.cached_property
    def _moved(self) -> _tf.BoundFunction:
        return self.program.on_shards(self._vectors.moved)

    @functools.cached_property
    def _measure(self) -> _tf.BoundFunction:
        return self.program.on_shards(self._vectors.measure, tf.TensorSpec([], tf.float64))

    @functools.cached_property
    def _begin(self) -> _tf.BoundFunction:
        return self.program.on_shards(self._vectors.begin)

    @functools.cached_property
    def _aim(self) -> _tf.BoundFunction:
        size = 2 * self._vectors.rows + 1
        return self.program.on_shards(self._vectors.aim, tf.TensorSpec([size], tf.float64))

    @functools.cached_property
    def _move(self) -> _tf.BoundFunction:
        return self.program.on_shards(self._vectors.move, tf.TensorSpec([], tf.float64))

    @functools.cached_property
    def _take(self) -> _tf.BoundFunction:
        slot = tf.TensorSpec([], tf.int64)
        return self.program.on_shards(self._vectors.take, slot, new_version=True)

    @functools.cached_property
    def _out(self) -> _tf.BoundFunction:
        return self.program.on_shards(self._vectors.take_out)

    def _call(self, function: _tf.BoundFunction, *tensors: tf.Tensor) -> list[np.ndarray]:
        self.calls += 1
        with self._engine.explained(), self._engine.mending():
            return [part.numpy() for part in function(*tensors)]

    def moved(self) -> bool:
        return any(self._call(self._moved))

    def measure(self, examples: float) -> tuple[float, float]:
        """(g'd, g'g) of the mean gradient that a pass has left."""
        parts = self._call(self._measure, tf.constant(examples, tf.float64))
        slope, square = np.sum(parts, 0)
        return float(slope), float(square)

    def begin(self) -> None:
        self._call(self._begin)

    def aim(self, coefficients: np.ndarray) -> None:
        self._call(self._aim, tf.constant(coefficients, tf.float64))

    def move(self, step: float) -> None:
        """w <- w_0 + a d."""
        self._call(self._move, tf.constant(step, tf.float64))

    def take(self, slot: int) -> np.ndarray:
        return np.sum(self._call(self._take, tf.constant(slot, tf.int64)), 0)

    def arrays(self) -> dict[str, np.ndarray]:
        """What a checkpoint has to hold of them, by name."""
        with self._engine.explained():
            parts = self._out()
        return {
            f"{_VECTOR}{n}": value.numpy()
            for numbers, part in zip(self._numbers(), parts, strict=True)
            for n, value in zip(numbers, part, strict=True)
        }

    def _numbers(self) -> list[list[int]]:
        """Of each shard the numbers of its vectors: weight by weight, wherever the weights are."""
        of_each = range(3 if self._vectors.rows else 1)
        weights = self.program.step.weights
        return [
            [len(of_each) * i + k for i, w in enumerate(weights) if w.shard == s for k in of_each]
            for s in range(len(self.program.shards))
        ]

    def put_back(self, arrays: Mapping[str, Any]) -> None:
        """Sets what `arrays` gave.

        Raises:
            ValueError: if they are of other weights, or of another history; nothing is set then.
        """
        of_shards = [
            [_fitting(arrays, n, spec) for n, spec in zip(numbers, specs, strict=True)]
            for numbers, specs in zip(self._numbers(), self._out.outputs, strict=True)
        ]
        for s, values in enumerate(of_shards):
            put_back = self.program.on_shards(
                self._vectors.put_back, *(tf.TensorSpec(v.shape, v.dtype) for v in values), only=s
            )
            with self._engine.explained(), self._engine.mending():
                put_back(*values)


def _fitting(arrays: Mapping[str, Any], number: int, spec: tf.TensorSpec) -> tf.Tensor:
    """The vector of this number, of this shape."""
    name = f"{_VECTOR}{number}"
    value = np.asarray(arrays.get(name))
    if value.shape != tuple(spec.shape):
        raise ValueError(
            f"The state does not fit: {name} is {value.shape}, and {tuple(spec.shape)} is "
            "expected. Go on with the same model and history; or call fit again, which begins "
            "anew at the weights as they are."
        )
    return tf.constant(value, spec.dtype)


class Iterations:
    """Runs a batch method's iterations, one in each epoch of `fit`.

    Args:
        engine: who runs passes.
        settings: the method.
        objective: what workers add up.
    """

    def __init__(self, engine: Engine, settings: Settings, objective: Objective):
        self._engine = engine
        self._objective = objective
        self.method = BatchMethod(settings)
        self.last: Iteration | None = None
        self._vectors: Vectors | None = None
        self._data: weakref.ref[Any] | None = None
        self._under_way: Generator[float | None, Evaluated, Iteration] | None = None
        self._finished: Iteration | None = None
        self._examples: float | None = None
        """In a pass over the data."""
        self._restored: dict[str, np.ndarray] = {}
        """What a checkpoint had of vectors, until there are shards' functions to set them."""

    @property
    def shard_calls(self) -> int:
        """Round trips of the coordinator to the shards so far, passes over the data aside."""
        return 0 if self._vectors is None else self._vectors.calls

    # -- called while tokens are handed out -------------------------------------------------

    def begin(self, iterator: Any, program: Program) -> None:
        """An epoch's first token is used: the weights go where the first pass evaluates."""
        _check_whole(iterator)
        known = self._vectors is not None and self._vectors.program is program
        vectors = self._vectors_of(program)
        data = iterator.dataset
        if self._restored:
            self._put_back(vectors)
        elif not known or self._data is None or self._data() is not data:
            self.method.forget()  # another call of `fit`: the data may be others
        elif self._under_way is not None:
            self.method.forget()  # somebody has ended its passes
        if self._data is None or self._data() is not data:
            self._data, self._examples = weakref.ref(data), None
        if data.kept is None:
            data.kept = Kept()
            iterator.stream.keep(data.kept)
        self._finished = None
        self._under_way = self.method.iterate(vectors)
        try:
            self._go_to(vectors, next(self._under_way))
        except StopIteration as ended:
            self._finished = ended.value  # it begins at a minimum: the pass changes nothing
        self._objective.reset()

    def _put_back(self, vectors: Vectors) -> None:
        try:
            vectors.put_back(self._restored)
        except ValueError:
            self._restored = {}  # or each further `fit` would fail, too
            self.method.forget()
            raise
        self._restored = {}

    def end(self, iterator: Any, program: Program, model: keras.Model | None) -> None:
        """The last mini-batch of an epoch is out: makes what passes are left to its iteration."""
        vectors = self._vectors_of(program)
        iterating = self._under_way
        if iterating is None:
            raise RuntimeError("An epoch ends that has not begun.")
        try:
            while self._finished is None:
                result = self._evaluated(vectors)
                try:
                    self._go_to(vectors, iterating.send(result))
                    self._pass(iterator, program, model)
                except StopIteration as ended:
                    self._finished = ended.value
            self._engine.drain()
        except BaseException:
            self.method.forget()  # the weights are where the error, or Ctrl-C, found them
            raise
        finally:
            self._under_way = None
        self.last = self._finished

    def let_end(self, model: keras.Model | None) -> None:
        """An epoch's last token is given: `fit` ends with it, if there is nothing more to do."""
        last = self._finished
        if last is not None and last.is_last and model is not None:
            model.stop_training = True
            say(f"fit ends after iteration {last.number}: {last.reason}")

    def _vectors_of(self, program: Program) -> Vectors:
        if self._vectors is None or self._vectors.program is not program:
            self.method.noise = _noise(program)
            rows = self.method.settings.rows
            self._vectors = Vectors(program, rows, self._engine, self.shard_calls)
        return self._vectors

    @staticmethod
    def _go_to(vectors: Vectors, step: float | None) -> None:
        if step is not None:
            vectors.move(step)

    def _evaluated(self, vectors: Vectors) -> Evaluated:
        """What the pass that is handed out gives."""
        self._engine.drain()
        with self._engine.explained():
            loss, examples = self._objective.read()
        if not examples or self._examples not in (None, examples):
            raise ValueError(
                "Each pass over the data must be over the same examples, and a batch method makes "
                f"several. Received: {examples:g} examples in this pass, and "
                f"{self._examples or 0:g} in the first. Give fit arrays or a tf.data.Dataset; a "
                "Python generator can be read once, and tf.data.Dataset.from_generator as often as "
                "needed."
            )
        self._examples = examples
        slope, square = vectors.measure(examples)
        return Evaluated(loss, slope, square)

    def _pass(self, iterator: Any, program: Program, model: keras.Model | None) -> None:
        """Hands out all data once more."""
        self._objective.reset()
        if model is not None:
            model.reset_metrics()
        with self._engine.explained():
            program.running.reset()
        stream = iterator.dataset.stream()
        while stream.take() and stream.make_ready():
            self._engine.grant(program, stream)

    # -- checkpoints ------------------------------------------------------------------------

    def state(self, in_epoch: bool) -> dict[str, np.ndarray]:
        """What a checkpoint has of it; called at rest. `in_epoch`: not all its tokens are given."""
        if in_epoch or self._under_way is not None:
            raise ValueError(
                "A batch method can be saved between two epochs, and not in the middle of the "
                'passes of one. Use BackupAndRestore with save_freq="epoch".'
            )
        arrays = {_OURS + name: value for name, value in self.method.state().items()}
        if self._restored:
            return arrays | self._restored
        if self._vectors is None or math.isnan(arrays[f"{_OURS}scalars"][3]):
            return arrays
        return arrays | self._vectors.arrays()

    def check(self, state: Mapping[str, Any]) -> None:
        """Raises a ValueError if `restore` cannot set this."""
        self.method.check(_mine(state))
        found = {name for name in state if name.startswith(_VECTOR)}
        missing = {f"{_VECTOR}{n}" for n in range(len(found))} - found
        if missing:
            raise ValueError(
                f"The state is not complete: {sorted(missing)} are missing. It may be an earlier "
                "version's, which kept vectors by shards: start from the weights alone."
            )

    def restore(self, state: Mapping[str, Any]) -> None:
        """Sets what `state` gave; vectors as the next epoch begins."""
        self.method.restore(_mine(state))
        self._under_way = None
        self._restored = {
            name: np.asarray(value) for name, value in state.items() if name.startswith(_VECTOR)
        }


def _mine(state: Mapping[str, Any]) -> dict[str, Any]:
    return {name.removeprefix(_OURS): v for name, v in state.items() if name.startswith(_OURS)}


def _noise(program: Program) -> float:
    """How far a loss may be wrong, relative to itself: some roundings of the coarsest weight."""
    types = [weight.dtype.as_numpy_dtype for weight in program.step.weights]
    return 4.0 * max(float(np.finfo(t).eps) for t in types)


def _check_whole(iterator: Any) -> None:
    """Whether an epoch is a pass over all data."""
    steps = steps_per_epoch_of_fit()
    if steps is not None:
        raise ValueError(
            "An epoch of a batch method is an iteration, and each of its evaluations a pass over "
            "all data. Leave steps_per_epoch out, and bound the data instead, as by "
            f"dataset.take({steps}). Received: steps_per_epoch={steps}."
        )
    if iterator.dataset.cardinality == tf.data.INFINITE_CARDINALITY:
        raise ValueError(
            "An evaluation of a batch method is a pass over all data, and these have no end. "
            "Leave repeat() out, or bound them, as by dataset.take(1000)."
        )
    if iterator.dataset.source is not None:
        raise ValueError(
            "Pipelines that workers run are read once an epoch, and an iteration of a batch method "
            "takes several passes over the same data. Give fit arrays or a tf.data.Dataset."
        )
