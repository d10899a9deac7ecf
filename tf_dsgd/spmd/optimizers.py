"""The optimizers of a model, and what `PeriodicAveraging` does with each of them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf_dsgd import _tf
from tf_dsgd.spmd.arrays import values

# A slot is averaged where it is a mean or a sum over mini-batches, as all of Keras's are.
_AVERAGED_KINDS = {"average": {"average", "slot", "count", "accumulator"}}


def build_first(model: keras.Model, optimizer: Any) -> None:
    """Builds what trains a built model: `optimizer`, or, if that is None, the compiled one.

    Not its others, of which nobody knows what they are for before they make a step. A
    `MultiOptimizer` may know its parts only then, and they may be attributes of the model.
    """
    first = getattr(model, "optimizer", None) if optimizer is None else optimizer
    if first is not None and not first.built:
        first.build(model.trainable_variables)


def optimizers_of(model: keras.Model) -> list[tuple[str, Any]]:
    """The optimizers that a model may train with, each with the name of the attribute that has it.

    First the compiled one, under no name. A GAN, say, keeps one for each of its parts, as an
    attribute, or in a list, tuple or dict. Those within another optimizer are that one's; the
    compiled one must be built (`build_first`), to know which.
    """
    found = {}
    compiled = getattr(model, "optimizer", None)
    if compiled is not None:
        found[id(compiled)] = ("", compiled)
    for name, value in sorted(vars(model).items()):
        # What Keras and TensorFlow note there of all attributes, also of those put away since.
        if name.startswith(("_self_", "_tracker")):
            continue
        for where, optimizer in _within(name, value):
            found.setdefault(id(optimizer), (where, optimizer))
    inner = {id(part) for _, optimizer in found.values() for part in _parts(optimizer)}
    return [pair for key, pair in found.items() if key not in inner]


def _within(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, keras.optimizers.Optimizer):
        yield name, value
    elif isinstance(value, dict):  # and no other mapping, which may make its values as it is read
        for key, each in value.items():
            yield from _within(f"{name}[{key!r}]", each)
    elif isinstance(value, (list, tuple)):
        for number, each in enumerate(value):
            yield from _within(f"{name}[{number}]", each)


def _parts(optimizer: Any) -> list[Any]:
    """Optimizers that a `LossScaleOptimizer` or `MultiOptimizer` has, and those within them."""
    inner = getattr(optimizer, "inner_optimizer", None)
    parts = [*([] if inner is None else [inner]), *getattr(optimizer, "optimizers", [])]
    return parts + [each for part in parts for each in _parts(part)]


def overrides(instance: Any, base: type, *methods: str) -> bool:
    """Whether an object or its class has other methods than a class of Keras's."""
    own = type(instance)
    return any(m in vars(instance) or getattr(own, m) is not getattr(base, m) for m in methods)


class OptimizerState:
    """An optimizer and what becomes of its variables.

    Args:
        where: the name of the attribute that has it; "" for the compiled one.
        optimizer: a Keras optimizer, which need not be built.
        policy: "average", "local" or "reset".

    Raises:
        ValueError: if the policy does not go with the optimizer.
    """

    def __init__(self, where: str, optimizer: Any, policy: str):
        self._where = where
        self.optimizer = optimizer
        self._averaged = _AVERAGED_KINDS.get(policy, {"average"})
        self.reset = _Reset(optimizer) if policy == "reset" else None
        self.is_averaged = False
        """Whether it is averaged with the weights; the same in all workers."""

    def variables(self) -> list[Any]:
        """All of its variables; an optimizer that is not built has few of them."""
        return [variable for _, variable in _tf.optimizer_variables(self.optimizer)]

    def averaged(self) -> list[Any]:
        """Those that are averaged, in some way."""
        kinds = _tf.optimizer_variables(self.optimizer)
        return [variable for kind, variable in kinds if kind in self._averaged]

    def may_have_averages(self) -> bool:
        """Whether `averaged` may give any, now or once it is built."""
        each = [self.optimizer, *_parts(self.optimizer)]
        return "slot" in self._averaged or any(getattr(o, "use_ema", False) for o in each)

    def counted(self) -> int:
        """The steps that it has counted."""
        kinds = _tf.optimizer_variables(self.optimizer)
        return max((int(v.numpy()) for kind, v in kinds if kind == "count"), default=0)

    def counts_every_step(self) -> bool:
        """Whether it counts all mini-batches, because it applies gradients as Keras's base does.

        `LossScaleOptimizer` leaves out steps that overflow. One of a user's own may do so, too.
        """
        base = keras.optimizers.Optimizer
        return not overrides(self.optimizer, base, "apply", "apply_gradients")

    def describe(self) -> list[str]:
        """One line for each thing that must be equal in all workers."""
        optimizer = self.optimizer
        config = _compared(optimizer.get_config())
        settings = json.dumps(config, default=lambda value: type(value).__name__)
        where = f"{self._where} " if self._where else ""
        state = "" if optimizer.built else ", not built"
        return [
            f"optimizer {where}{type(optimizer).__name__} {settings}{state}",
            *(
                f"its {kind} {tuple(v.shape)} {v.dtype}"
                for kind, v in _tf.optimizer_variables(optimizer)
            ),
        ]


class _Reset:
    """Gives an optimizer the state it was created with, but lets its schedule go on.

    Bias correction, as Adam's, divides by what the number of updates says that the slots have seen,
    so `iterations` has to begin anew with them. A schedule reads `iterations`, too: it is given
    `iterations + offset`. The sum is always the number of steps.
    """

    def __init__(self, optimizer: Any):
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
        self._optimizer = optimizer
        self._slots: list[Any] = []
        self._first: list[np.ndarray] | None = None
        self._find_slots()
        with tf.init_scope():
            self._offset = tf.Variable(0, dtype=tf.int64, trainable=False)
        self.shifted = _tf.shift_schedules(core, self._offset)

    def __call__(self) -> None:
        self._find_slots()
        if self._first is None:
            return
        for variable, value in zip(self._slots, self._first, strict=True):
            variable.assign(np.broadcast_to(value, variable.shape))
        self.count_anew()

    def _find_slots(self) -> None:
        """Not before it has any: some are built as they make their first step."""
        if self._first is None and self._optimizer.built:
            kinds = _tf.optimizer_variables(self._optimizer)
            self._slots = [v for kind, v in kinds if kind == "slot"]
            self._first = _created_values(self._optimizer, self._slots)

    def count_anew(self) -> None:
        total = self.total()
        self._set(total, total % self._steps)  # where in an accumulation of gradients it is

    def count_all(self) -> None:
        total = self.total()
        self._set(total, total)

    def total(self) -> int:
        """The steps since the optimizer was made."""
        return int(self._offset) + int(keras.ops.convert_to_numpy(self._count))

    def _set(self, total: int, count: int) -> None:
        self._offset.assign(total - count)
        self._count.assign(count)


def _created_values(optimizer: Any, slots: Sequence[Any]) -> list[np.ndarray]:
    """The values with which an optimizer like this one creates its slots (Adagrad's are 0.1)."""
    try:
        fresh = type(optimizer).from_config(optimizer.get_config())
        fresh.build(_tf.built_variables(optimizer))
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


def _compared(config: Any) -> Any:
    """A configuration without names, which Keras numbers too, and learning rates, which are copied.

    A rate that is a dict is a schedule, of which there is nothing to copy: it is compared whole.
    """
    if isinstance(config, (list, tuple)):
        return [_compared(v) for v in config]
    if not isinstance(config, dict):
        return config
    return {
        key: value if key == "learning_rate" else _compared(value)
        for key, value in config.items()
        if key not in ("name", "module") and (key != "learning_rate" or isinstance(value, dict))
    }
