"""`simulate`: a rule on a caller's sequence of fetches and pushes."""

from __future__ import annotations

import collections
import dataclasses
import json
from collections.abc import Iterable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf_dsgd.algorithm import Algorithm
from tf_dsgd.algorithms.played import check_played
from tf_dsgd.checks import called, entries, positive_int
from tf_dsgd.cluster import SimulatedCluster
from tf_dsgd.engine.ledger import Ledger
from tf_dsgd.engine.schedule import action_of
from tf_dsgd.engine.scheduled import ScheduledEngine
from tf_dsgd.strategies.base import DistributedStrategy
from tf_dsgd.strategies.variable import ReplicaVariable

# Rules stay traced for the next call: so many of them.
_KEPT = 16


@called()
@dataclasses.dataclass(frozen=True)
class Simulation:
    """What `simulate` gives: one entry for every event in each list.

    - `weights[k]`: the shard's weights after event k, one array per weight;
    - `copies[k]`: the copy of the weights that the worker of event k then has;
    - `versions[k]`: the shard's version after event k;
    - `staleness[k]`: of a push, the updates made between the fetch before its first gradient and
      its arrival; of every other event None;
    - `ledger`: what the shard counted, as `strategy.ledger()` gives it.

    Example:

    >>> strategy = tf_dsgd.DownpourStrategy(local_rule="none")
    >>> events = [(0, "fetch"), (1, "fetch"), (0, "push", [1.0]), (1, "push", [1.0])]
    >>> simulation = tf_dsgd.simulate(strategy, keras.optimizers.SGD(0.5), [4.0], events)
    >>> [float(weights[0]) for weights in simulation.weights]
    [4.0, 4.0, 3.5, 3.0]
    >>> simulation.versions, simulation.staleness
    ([0, 0, 1, 2], [None, None, 0, 1])
    """

    weights: list[list[np.ndarray]]
    copies: list[list[np.ndarray]]
    versions: list[int]
    staleness: list[int | None]
    ledger: Ledger


@called()
def simulate(
    rule: Algorithm | DistributedStrategy,
    optimizer: Any,
    weights: Sequence[Any],
    events: Iterable[Sequence[Any]],
    *,
    num_workers: int | None = None,
) -> Simulation:
    """Runs a rule on a sequence of fetches and pushes, with gradients that the caller gives.

    Use it to check a rule against a twin of your own, event by event: what the workers and the
    shard do is traced from the same rules, by the same code, as in training. The events are::

        (m, "fetch")             worker m fetches
        (m, "step", gradients)   it uses the gradients of one mini-batch (accrues, steps its copy)
        (m, "push", gradients)   the same, and sends; the shard takes the message in at once
        (m, "push", ())          it only sends what is accrued
        (m, "flush")             the shard uses what it has collected, as at the end of an epoch

    The order of the events is all that a network and its delays can do to a rule. Calls with equal
    rules, optimizers, shapes and numbers of workers share one trace, so that a property can be
    tested on many sequences.

    Args:
        rule: an `Algorithm`, or a strategy, of which the algorithm is taken; a strategy's cluster,
            model and state play no part, nor do `outer_optimizer` and `sparse="lazy"`. Not of
            peers, Hogwild! or Sandblaster: train these on a `SimulatedCluster`.
        optimizer: the compiled Keras optimizer, or its name; a copy in its first state is used.
        weights: the first values, a list of floating-point arrays; float64 becomes
            `keras.config.floatx()`.
        events: see above; `m` counts from 0, and a worker fetches before its first step.
            `gradients` has an entry for each weight: an array of its shape, or, for a weight whose
            gradients are sparse, `(rows, values)` or a `tf.IndexedSlices`; rows named twice add up.
            A weight's gradients are all of one kind. At most `push_every` gradients go into a
            message and at most `fetch_every` are used on one fetch, as the rule has them.
        num_workers: number of workers; by default one more than the largest m.

    Returns:
        A `Simulation`.

    Raises:
        ValueError: naming the event that is not as described; or if the rule is one of peers, one
            without copies of the weights, or a batch method.

    Example: two workers fetch version 0; the second push is one update stale.

    >>> result = tf_dsgd.simulate(
    ...     tf_dsgd.DownpourStrategy(),
    ...     keras.optimizers.SGD(0.5),
    ...     [np.zeros(2)],
    ...     [(0, "fetch"), (1, "fetch"), (0, "push", [[1.0, 0.0]]), (1, "push", [[0.0, 2.0]])],
    ... )
    >>> [w.tolist() for (w,) in result.weights]
    [[0.0, 0.0], [0.0, 0.0], [-0.5, 0.0], [-0.5, -1.0]]
    >>> result.staleness
    [None, None, 0, 1]
    """
    algorithm = rule.algorithm if isinstance(rule, DistributedStrategy) else rule
    if not isinstance(algorithm, Algorithm):
        raise TypeError(
            "rule must be a tf_dsgd.algorithm.Algorithm, or a strategy to take it from. "
            f"Received: {rule!r}."
        )
    check_played(algorithm)
    given = entries("weights", weights, "a list of arrays")
    values = [_floats(f"weights[{i}]", w) for i, w in enumerate(given)]
    if not values:
        raise ValueError(f"weights must hold at least one array. Received: {weights!r}.")
    if num_workers is not None:
        num_workers = positive_int("num_workers", num_workers)
    parsed = _parse(events, values, num_workers)
    if num_workers is None:
        num_workers = 1 + max((event.worker for event in parsed), default=0)
    sparse = _sparse(parsed, len(values))
    optimizer = _optimizer(optimizer)
    return _bench(algorithm, optimizer, values, sparse, num_workers).play(values, parsed)


def _optimizer(given: Any) -> keras.optimizers.Optimizer:
    try:
        found = keras.optimizers.get(given)
    except (ValueError, TypeError, KeyError) as error:
        raise _no_optimizer(given) from error
    if not isinstance(found, keras.optimizers.Optimizer):  # as of None
        raise _no_optimizer(given)
    return found


def _no_optimizer(given: Any) -> ValueError:
    return ValueError(
        f"optimizer must be a Keras optimizer, or the name of one. Received: {given!r}."
    )


@dataclasses.dataclass(frozen=True)
class _Event:
    """One event; `place` is its number, `gradients` has an array or (rows, values) per weight."""

    place: int
    worker: int
    action: str
    gradients: list[Any]

    @property
    def where(self) -> str:
        return f"events[{self.place}]"


def _parse(
    events: Iterable[Any], weights: Sequence[np.ndarray], num_workers: int | None
) -> list[_Event]:
    parsed = []
    for place, given in enumerate(entries("events", events, "a list of events")):
        where = f"events[{place}]"
        worker, action, what = action_of(where, given, num_workers)
        takes = action in ("step", "push")
        if takes == (what is None):
            raise ValueError(
                f"{where}: {'give' if takes else 'leave out'} the gradients of a "
                f"{action!r}{', or () to send only' * (action == 'push')}. Received: {given!r}."
            )
        name = f"{where}: the gradients of a {action!r}"
        gradients = entries(name, what, "a list, one for each weight") if takes else []
        if gradients or action == "step":
            if len(gradients) != len(weights):
                raise ValueError(
                    f"{where} must have one gradient for each of the {len(weights)} weights. "
                    f"Received: {len(gradients)}, {what!r}."
                )
            gradients = [
                _gradient(f"{where}, gradient {i}", g, w)
                for i, (g, w) in enumerate(zip(gradients, weights, strict=True))
            ]
        parsed.append(_Event(place, worker, action, gradients))
    return parsed


def _floats(name: str, value: Any) -> np.ndarray:
    array = np.asarray(value)
    if array.dtype == np.float64 or array.dtype.kind in "iu":
        array = array.astype(keras.config.floatx())
    if array.dtype.kind != "f" and array.dtype.name != "bfloat16":
        raise ValueError(f"{name} must be an array of floats. Received: {value!r}.")
    return array


def _gradient(name: str, given: Any, weight: np.ndarray) -> Any:
    if isinstance(given, tf.IndexedSlices):
        given = (given.indices, given.values)
    if isinstance(given, tuple):
        if len(given) != 2 or not weight.ndim:
            raise ValueError(f"{name} must be (rows, values) or an array. Received: {given!r}.")
        rows = np.asarray(given[0])
        values = _numbers(name, given[1], weight)
        rows = rows.astype(np.int64) if not rows.size else rows
        good = rows.ndim == 1 and rows.dtype.kind in "iu"
        if not good or np.any(rows < 0) or np.any(rows >= weight.shape[0]):
            raise ValueError(
                f"{name}: rows must be a list of integers from 0 to {weight.shape[0] - 1}. "
                f"Received: {given[0]!r}."
            )
        if values.shape != (len(rows), *weight.shape[1:]):
            raise ValueError(
                f"{name}: values must have shape {(len(rows), *weight.shape[1:])}. "
                f"Received: {values.shape}."
            )
        return _merged(rows.astype(np.int64), values)
    dense = _numbers(name, given, weight)
    if dense.shape != weight.shape:
        raise ValueError(
            f"{name} must have its weight's shape {weight.shape}, not {dense.shape}. "
            f"Received: {given!r}."
        )
    return dense


def _numbers(name: str, given: Any, weight: np.ndarray) -> np.ndarray:
    try:
        array = np.asarray(given)
        if array.dtype.kind not in "fiub" and array.dtype.name != "bfloat16":
            raise TypeError(f"numbers have no type {array.dtype}")  # NumPy reads them from text
        return array.astype(weight.dtype)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name} must be an array of numbers. Received: {given!r}.") from error


def _merged(rows: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Every row once: Keras's optimizers take no row twice."""
    unique, place = np.unique(rows, return_inverse=True)
    if len(unique) == len(rows):
        return rows, values
    sums = np.zeros((len(unique), *values.shape[1:]), values.dtype)
    np.add.at(sums, place, values)
    return unique, sums


def _sparse(events: Sequence[_Event], count: int) -> tuple[bool, ...]:
    kinds: list[bool | None] = [None] * count
    for event in events:
        for i, gradient in enumerate(event.gradients):
            kind = isinstance(gradient, tuple)
            if kinds[i] not in (None, kind):
                raise ValueError(
                    f"{event.where}: the gradients of weight {i} must be all arrays or all "
                    "(rows, values)."
                )
            kinds[i] = kind
    return tuple(bool(kind) for kind in kinds)


class _Bench(DistributedStrategy):
    """A strategy whose step takes its gradients from the batch; played event by event."""

    engine: ScheduledEngine

    def __init__(
        self,
        algorithm: Algorithm,
        optimizer: keras.optimizers.Optimizer,
        weights: Sequence[np.ndarray],
        sparse: Sequence[bool],
        num_workers: int,
    ):
        self._adopted: list[ReplicaVariable] = []
        super().__init__(SimulatedCluster(num_workers, schedule=()), algorithm)
        self._sparse = sparse
        with self.scope():
            self._optimizer = type(optimizer).from_config(optimizer.get_config())
            self._variables = [
                keras.Variable(np.zeros_like(w), dtype=w.dtype.name, name=f"weight_{i}")
                for i, w in enumerate(weights)
            ]
            self._optimizer.build(self._variables)
        spec = tuple(_spec(w, s) for w, s in zip(weights, sparse, strict=True))
        self._traced = self.trace(self._step, spec)
        self._primaries = [v.value.primary for v in self._variables]
        self._copies = [v.value.on_workers() for v in self._variables]
        self._reset = self._resetting()

    def adopt(self, primary: tf.Variable, shard: int, lent: bool = False) -> ReplicaVariable:
        variable = super().adopt(primary, shard, lent)
        self._adopted.append(variable)
        return variable

    def _step(self, batch: Sequence[Any]) -> tf.Tensor:
        gradients = [
            tf.IndexedSlices(g[1], g[0], tf.constant(list(v.shape), tf.int64)) if sparse else g
            for g, v, sparse in zip(batch, self._variables, self._sparse, strict=True)
        ]
        self._optimizer.apply(gradients, self._variables)
        return tf.zeros([])

    def _resetting(self) -> Any:
        """A function that gives everything its first value, so that a trace serves many calls."""
        state = [v.primary for v in [*self._adopted, *self._schedules.variables]]
        state += [*self._shards[0].variables, *self._traced.shard_cells]
        state += self.engine.store.variables()
        first = [v.read_value() for v in state]

        def reset() -> None:
            for variable, value in zip(state, first, strict=True):
                variable.assign(value, read_value=False)

        return tf.function(reset, autograph=False).get_concrete_function()

    def play(self, weights: Sequence[np.ndarray], events: Sequence[_Event]) -> Simulation:
        """Plays the events from the first state and these weights."""
        self._reset()
        self._traced.forget_fetched()
        for primary, value in zip(self._primaries, weights, strict=True):
            primary.assign(value, read_value=False)
        self.engine.begin(self._traced)
        result = Simulation([], [], [], [], self.ledger())
        for event in events:
            try:
                result.staleness.append(self._turn(event))
            except ValueError as error:
                raise ValueError(f"{event.where}: {error}.") from None
            except tf.errors.OpError as error:
                error.add_note(f"Raised by {event.where}.")
                raise
            result.versions.append(int(self._shards[0].version))
            result.weights.append([primary.numpy() for primary in self._primaries])
            result.copies.append([copy.of(event.worker).numpy() for copy in self._copies])
        return dataclasses.replace(result, ledger=self.ledger())

    def _turn(self, event: _Event) -> int | None:
        """One event; a push's staleness."""
        engine, m = self.engine, event.worker
        if event.action == "fetch":
            engine.fetch(m)
        elif event.action == "flush":
            engine.flush()
        elif event.gradients:
            engine.queues.put(m, tuple(event.gradients))
            engine.step(m, 1)
        if event.action != "push":
            return None
        tau = int(self._shards[0].version) - engine.store.begun(m)
        engine.push(m)
        return tau


def _spec(weight: np.ndarray, sparse: bool) -> Any:
    if not sparse:
        return tf.TensorSpec(weight.shape, weight.dtype)
    return (
        tf.TensorSpec([None], tf.int64),
        tf.TensorSpec([None, *weight.shape[1:]], weight.dtype),
    )


def _unnamed(config: Any) -> Any:
    """Without names: Keras numbers those that it makes up, so that no two would be equal."""
    if not isinstance(config, dict):
        return config
    return {key: _unnamed(value) for key, value in config.items() if key != "name"}


_benches: collections.OrderedDict[Any, _Bench] = collections.OrderedDict()


def _bench(
    algorithm: Algorithm,
    optimizer: keras.optimizers.Optimizer,
    weights: Sequence[np.ndarray],
    sparse: tuple[bool, ...],
    num_workers: int,
) -> _Bench:
    """A bench made for the same case before, or a new one."""
    config = json.dumps(_unnamed(optimizer.get_config()), sort_keys=True, default=repr)
    shapes = tuple((w.shape, w.dtype.name) for w in weights)
    key = (algorithm, type(optimizer), config, shapes, sparse, num_workers)
    try:
        known = _benches.pop(key, None)
    except TypeError:  # a rule that cannot be compared
        return _Bench(algorithm, optimizer, weights, sparse, num_workers)
    _benches[key] = known or _Bench(algorithm, optimizer, weights, sparse, num_workers)
    while len(_benches) > _KEPT:
        _benches.popitem(last=False)
    return _benches[key]
