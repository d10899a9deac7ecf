"""What an optimizer that runs on the workers keeps there, and one that runs on the shards besides.

Of the compiled optimizer's state:

- momenta, and whatever else it remembers of gradients: averaged, kept or reset, as the algorithm
  says; gradient accumulators are among them;
- averages of weights (EMA): averaged with the momenta, else each worker keeps its own;
- its count of updates: averaged momenta go with the shard's count, which is that of one worker;
  reset ones begin again at 0;
- the state of loss scaling: each worker's own, since it must adapt to that worker's gradients.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_dsgd import _tf
from tf_dsgd.strategies.capture import Application
from tf_dsgd.strategies.variable import ReplicaVariable


@dataclasses.dataclass
class OptimizerState:
    """The variables that a step wrote of one optimizer."""

    momenta: list[ReplicaVariable]
    averages: list[ReplicaVariable]
    counters: list[ReplicaVariable]
    others: list[ReplicaVariable]

    def __contains__(self, variable: object) -> bool:
        parts = (self.momenta, self.averages, self.counters, self.others)
        return any(variable is each for part in parts for each in part)


def state_of(optimizer: Any, written: Iterable[ReplicaVariable]) -> OptimizerState:
    """Sorts those of the written variables that are the optimizer's."""
    kinds = {id(v.value): kind for kind, v in _tf.optimizer_variables(optimizer)}
    state = OptimizerState([], [], [], [])
    for variable in written:
        kind = kinds.get(id(variable))
        if kind == "count":
            state.counters.append(variable)
        elif kind == "average":
            state.averages.append(variable)
        elif kind in ("slot", "accumulator") and variable.dtype.is_floating:
            state.momenta.append(variable)
        elif kind is not None:
            state.others.append(variable)
    return state


def on_shards(
    optimizer: keras.optimizers.Optimizer,
    weights: Sequence[ReplicaVariable],
    compiled: Iterable[keras.optimizers.Optimizer],
) -> Application:
    """The application of an optimizer to weights that the compiled one trains on workers."""
    known = {id(v.value): v for o in compiled if o is not optimizer for v in _tf.built_variables(o)}
    unknown = [w.name for w in weights if id(w) not in known]
    if unknown:
        raise ValueError(
            "outer_optimizer updates weights that a compiled Keras optimizer trains, and the step "
            f"assigns others itself: {unknown}. Use outer_optimizer=None."
        )
    variables = [known[id(w)] for w in weights]
    if not optimizer.built:
        with tf.init_scope(), weights[0].distribute_strategy.scope():
            optimizer.build(variables)
    return Application(optimizer, variables, [])
