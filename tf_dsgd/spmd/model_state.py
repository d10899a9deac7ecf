"""What `PeriodicAveraging` does with each variable of a model and its optimizer.

==========================================  =========  ========  ===================
kind                                        "average"  "local"   "reset"
==========================================  =========  ========  ===================
weights, moving statistics                  mean       mean      mean
EMA of the weights (`use_ema`)              mean       mean      refused
integer and bool weights                    first      first     first
weights that constants are made of          first      first     first
slots (momentum and the like)               mean       own       as when created
`iterations`                                first      own       0; schedules go on
accumulators of gradients                   mean       own       own
learning rate                               own        own       own
loss scale                                  own        own       own
random states                               own        own       own
==========================================  =========  ========  ===================

"first": the first worker's; "own": left alone. Constants are made of weights by a layer's
`finalize_state`, as `Normalization` does after `adapt`. At the beginning all of them, but random
states, are copied from the first worker, so that "own" begins equal.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf_dsgd import _tf, _tf_parts
from tf_dsgd.spmd.collectives import Group
from tf_dsgd.spmd.exchange import How, Spec, exchange

POLICIES = ("average", "local", "reset")

# A slot is averaged where it is a mean or a sum over mini-batches, as all of Keras's are.
_AVERAGED_KINDS = {"average": {"average", "slot", "count", "accumulator"}}
_MIX = 0x9E3779B1  # odd, so that no two workers get the same seed


class ModelState:
    """A model, its optimizer, and how they are averaged.

    Args:
        model: a built Keras model.
        optimizer: what trains it; None if only the weights are of interest.
        policy: "average", "local" or "reset".
        group: the workers.

    Raises:
        ValueError: if the policy does not go with the optimizer.
    """

    def __init__(self, model: keras.Model, optimizer: Any, policy: str, group: Group):
        self._group = group
        self._policy = policy
        self.optimizer = optimizer
        self._weights = [*model.trainable_variables, *model.non_trainable_weights]
        self._kinds: list[tuple[str, Any]] = []
        if optimizer is not None:
            if not optimizer.built:
                optimizer.build(model.trainable_variables)
            self._kinds = _tf.optimizer_variables(optimizer)
        kept = {id(v) for v in (*self._weights, *model.metrics_variables)}
        self._seeds = [v for v in model.non_trainable_variables if id(v) not in kept]
        self._constants = _Constants(model)
        self._reset = None
        if policy == "reset" and optimizer is not None:
            self._reset = _Reset(model, optimizer, self._kinds)
        averaged = _AVERAGED_KINDS.get(policy, {"average"})
        self._averaged = [
            *self._weights,
            *(variable for kind, variable in self._kinds if kind in averaged),
        ]
        how = {id(v): "first" for v in self._constants.weights}
        specs = [spec(v, how.get(id(v), "mean")) for v in self._averaged]
        self._exchange = exchange(group, specs)

    def describe(self) -> list[str]:
        """One line for each thing that must be equal in all workers."""
        lines = [f"weight {_path(v)} {tuple(v.shape)} {v.dtype}" for v in self._weights]
        lines += [f"random state {tuple(v.shape)} {v.dtype}" for v in self._seeds]
        if self.optimizer is None:
            return [*lines, "no optimizer"]
        config = _without_names(self.optimizer.get_config())
        if not isinstance(config.get("learning_rate"), dict):
            config.pop("learning_rate", None)  # a number, which is copied
        settings = json.dumps(config, default=lambda value: type(value).__name__)
        lines.append(f"optimizer {type(self.optimizer).__name__} {settings}")
        return lines + [f"its {kind} {tuple(v.shape)} {v.dtype}" for kind, v in self._kinds]

    def copy_first(self) -> int:
        """Takes over the first worker's values, and sees to it that random states differ.

        Gives the steps that the optimizer had counted.
        """
        variables = [*self._weights, *(variable for _, variable in self._kinds)]
        with self._constants.renewed():
            assign(variables, self._group.broadcast(values(variables)))
        counted = max((int(v.numpy()) for kind, v in self._kinds if kind == "count"), default=0)
        self._part_seeds()
        if self._reset is not None:
            self._reset()
        return counted

    def offer(self) -> None:
        """Gives away what is to be averaged; then all meet, and `average`."""
        self._exchange.offer(values(self._averaged))

    def average(self) -> None:
        """Averages what all have offered, and applies the policy."""
        with self._constants.renewed():
            assign(self._averaged, self._exchange.take())
        if self._reset is not None:
            self._reset()

    def retrace(self) -> bool:
        """Whether steps that are traced already have another schedule or constant; True once."""
        outdated, self._constants.changed = self._constants.changed, False
        if self._reset is not None:
            outdated, self._reset.shifted = outdated or self._reset.shifted, False
        return outdated

    def begin_steps(self) -> None:
        """From here `iterations` may count since the last reset."""
        if self._reset is not None:
            self._reset.count_anew()

    def end_steps(self) -> None:
        """From here `iterations` counts all, as others read and save it."""
        if self._reset is not None:
            self._reset.count_all()

    def _part_seeds(self) -> None:
        """Gives this worker random states of its own, if they equal the first worker's.

        `keras.utils.set_random_seed`, and a checkpoint that all restore, make them equal, and
        dropout would then leave out the same units on all workers.
        """
        if not self._seeds:
            return
        mine = [np.asarray(value) for value in values(self._seeds)]
        theirs = self._group.broadcast(mine)
        if self._group.rank == 0 or any(
            not np.array_equal(a, b) for a, b in zip(mine, theirs, strict=True)
        ):
            return
        for variable, value in zip(self._seeds, mine, strict=True):
            mixed = value.astype(np.uint64).reshape(-1)
            mixed[:1] = (mixed[:1] + np.uint64(self._group.rank * _MIX)) % np.uint64(1 << 32)
            variable.assign(mixed.reshape(value.shape).astype(value.dtype))


class _Constants:
    """Constants that layers make of weights, which an assignment to these does not change."""

    def __init__(self, model: keras.Model):
        fixed = {id(v) for v in model.non_trainable_weights}
        self._made_of = [
            (layer, [v for v in _tf_parts.variables_of(layer) if id(v) in fixed])
            for layer in _tf_parts.all_layers_within(model)
            if hasattr(layer, "finalize_state")
        ]
        self.weights = [v for _, weights in self._made_of for v in weights]
        self.changed = False

    @contextlib.contextmanager
    def renewed(self) -> Iterator[None]:
        """Within, weights are assigned; then the layers for which that was news make them again."""
        before = [_bytes(weights) for _, weights in self._made_of]
        yield
        for (layer, weights), old in zip(self._made_of, before, strict=True):
            if _bytes(weights) != old:
                layer.finalize_state()
                self.changed = True


class _Reset:
    """Gives an optimizer the state it was created with, but lets its schedule go on.

    Bias correction, as Adam's, divides by what the number of updates says that the slots have seen,
    so `iterations` has to begin anew with them. A schedule reads `iterations`, too: it is given
    `iterations + offset`. The sum is always the number of steps.
    """

    def __init__(self, model: keras.Model, optimizer: Any, kinds: Sequence[tuple[str, Any]]):
        core = getattr(optimizer, "inner_optimizer", optimizer)
        name = type(core).__name__
        if getattr(core, "optimizers", None):
            raise ValueError(
                f'optimizer_state="reset" does not work with {name}, which has several counts of '
                'updates. Use optimizer_state="average" or "local".'
            )
        if core.use_ema:
            raise ValueError(
                f'optimizer_state="reset" does not go with use_ema=True of {name}: Keras begins '
                "the average of weights anew where `iterations` is 0, as it is after a reset. Use "
                'optimizer_state="average" or "local".'
            )
        self._count = next(v for kind, v in _tf.optimizer_variables(core) if kind == "count")
        self._steps = core.gradient_accumulation_steps or 1
        self._slots = [v for kind, v in kinds if kind == "slot"]
        self._first = _created_values(model, optimizer, self._slots)
        with tf.init_scope():
            self._offset = tf.Variable(0, dtype=tf.int64, trainable=False)
        self.shifted = _tf.shift_schedules(core, self._offset)

    def __call__(self) -> None:
        for variable, value in zip(self._slots, self._first, strict=True):
            variable.assign(np.broadcast_to(value, variable.shape))
        self.count_anew()

    def count_anew(self) -> None:
        total = self._total()
        self._set(total, total % self._steps)  # where in an accumulation of gradients it is

    def count_all(self) -> None:
        total = self._total()
        self._set(total, total)

    def _total(self) -> int:
        return int(self._offset) + int(keras.ops.convert_to_numpy(self._count))

    def _set(self, total: int, count: int) -> None:
        self._offset.assign(total - count)
        self._count.assign(count)


def _created_values(model: keras.Model, optimizer: Any, slots: Sequence[Any]) -> list[np.ndarray]:
    """The values with which an optimizer like this one creates its slots (Adagrad's are 0.1)."""
    try:
        fresh = type(optimizer).from_config(optimizer.get_config())
        fresh.build(model.trainable_variables)
    except Exception as error:
        raise ValueError(
            f'optimizer_state="reset" needs to make another {type(optimizer).__name__} from its '
            f"get_config(), which fails: {type(error).__name__}: {error}. Correct it, or use "
            'optimizer_state="average" or "local".'
        ) from error
    created = [v for kind, v in _tf.optimizer_variables(fresh) if kind == "slot"]
    if [tuple(v.shape) for v in created] != [tuple(v.shape) for v in slots]:
        raise ValueError(
            f'optimizer_state="reset": another {type(optimizer).__name__} made from its '
            "get_config() has other variables. Correct get_config(), or use "
            'optimizer_state="average" or "local".'
        )
    return [_constant(value) for value in values(created)]


def _constant(value: np.ndarray) -> np.ndarray:
    """A number for an array that is the same everywhere, to keep no second copy of all slots."""
    flat = value.reshape(-1)
    return flat[:1].reshape(()).copy() if flat.size and np.all(flat == flat[0]) else value


def spec(variable: Any, how: str) -> Spec:
    """What becomes of a variable's values; integers have no mean."""
    dtype = np.dtype(tf.as_dtype(variable.dtype).as_numpy_dtype)
    kind: How = "sum" if how == "sum" else "first"
    if how == "mean" and dtype.kind not in "biu":
        kind = "mean"
    # NumPy's own name; bfloat16 is not one that NumPy can look up.
    return Spec(tuple(variable.shape), dtype, kind)


def values(variables: Iterable[Any]) -> list[np.ndarray]:
    """The variables' values, to be read at once: on a CPU they are the variables' own memory."""
    return [np.asarray(tf.convert_to_tensor(variable.value)) for variable in variables]


def assign(variables: Sequence[Any], arrays: Sequence[np.ndarray]) -> None:
    """Sets the variables."""
    for variable, array in zip(variables, arrays, strict=True):
        variable.assign(array)


def _bytes(variables: Iterable[Any]) -> list[bytes]:
    return [value.tobytes() for value in values(variables)]


def _path(variable: Any) -> str:
    """A weight's path without the numbers that Keras appends to the names of further layers."""
    parts = str(getattr(variable, "path", variable.name)).split("/")
    return "/".join(part.rstrip("0123456789").rstrip("_") or part for part in parts)


def _without_names(config: Any) -> Any:
    """A configuration without names, which Keras numbers too."""
    if isinstance(config, dict):
        return {k: _without_names(v) for k, v in config.items() if k not in ("name", "module")}
    return [_without_names(v) for v in config] if isinstance(config, (list, tuple)) else config
