"""What `PeriodicAveraging` does with each variable of a model and its optimizers.

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
import hashlib
from collections.abc import Iterable, Iterator
from typing import Any

import keras
import numpy as np

from tf_dsgd import _tf_parts
from tf_dsgd.spmd.arrays import assign, spec, values
from tf_dsgd.spmd.collectives import Group
from tf_dsgd.spmd.exchange import exchange
from tf_dsgd.spmd.optimizers import OptimizerState, build_first, optimizers_of

POLICIES = ("average", "local", "reset")
_MIX = 0x9E3779B1  # odd, so that no two workers get the same seed


class ModelState:
    """A model, its optimizers, and how they are averaged.

    Args:
        model: a built Keras model.
        optimizer: what trains it; None if that is the compiled one, with those that are the model's
            attributes.
        policy: "average", "local" or "reset".
        group: the workers.

    Raises:
        ValueError: if the policy does not go with an optimizer.
    """

    def __init__(self, model: keras.Model, optimizer: Any, policy: str, group: Group):
        self._group = group
        self._weights = [*model.trainable_variables, *model.non_trainable_weights]
        kept = {id(v) for v in (*self._weights, *model.metrics_variables)}
        self._seeds = [v for v in model.non_trainable_variables if id(v) not in kept]
        self._constants = _Constants(model)
        build_first(model, optimizer)
        found = optimizers_of(model) if optimizer is None else [("", optimizer)]
        self._optimizers = [OptimizerState(where, each, policy) for where, each in found]
        self._resets = [each.reset for each in self._optimizers if each.reset is not None]
        for each in self._optimizers:
            sole = len(found) == 1 and each.optimizer.built
            each.is_averaged = sole or not each.may_have_averages()
        self._join()

    def _join(self) -> None:
        """Makes one exchange of the weights and of what is averaged of optimizers."""
        of_optimizers = [
            v for each in self._optimizers if each.is_averaged for v in each.averaged()
        ]
        self._averaged = [*self._weights, *of_optimizers]
        how = {id(v): "first" for v in self._constants.weights}
        specs = [spec(v, how.get(id(v), "mean")) for v in self._averaged]
        self._exchange = exchange(self._group, specs)

    def describe(self) -> list[str]:
        """One line for each thing that must be equal in all workers."""
        lines = [f"weight {_path(v)} {tuple(v.shape)} {v.dtype}" for v in self._weights]
        lines += [f"random state {tuple(v.shape)} {v.dtype}" for v in self._seeds]
        if not self._optimizers:
            return [*lines, "no optimizer"]
        return lines + [line for each in self._optimizers for line in each.describe()]

    def copy_first(self) -> int:
        """Takes over the first worker's values, and sees to it that random states differ.

        Gives the steps that the first optimizer which is used had counted.
        """
        variables = [*self._weights, *(v for each in self._optimizers for v in each.variables())]
        with self._constants.renewed():
            assign(variables, self._group.broadcast(values(variables)))
        counted = [each.counted() for each in self._optimizers]
        for each, steps in zip(self._optimizers, counted, strict=True):
            # It may have been set to count on, and not be built: it has no slots yet.
            each.is_averaged = each.is_averaged or (steps > 0 and each.optimizer.built)
        self._join()
        self._part_seeds()
        for reset in self._resets:
            reset()
        return next((steps for steps in counted if steps), 0)

    def counted(self) -> int | None:
        """The mini-batches that the first optimizer has counted; None if it may leave some out."""
        first = next(iter(self._optimizers), None)
        if first is None or not first.counts_every_step():
            return None
        return first.counted() if first.reset is None else first.reset.total()

    def offer(self) -> None:
        """Gives away what is to be averaged; then all meet, and `average`."""
        self._exchange.offer(values(self._averaged))

    def average(self) -> None:
        """Averages what all have offered, and applies the policy."""
        with self._constants.renewed():
            assign(self._averaged, self._exchange.take())
        self._take_in()
        for reset in self._resets:
            reset()

    def _take_in(self) -> None:
        """Averages optimizers, too, that were not used at the latest average.

        One may be used for the first time in the middle of a `fit`, and only then have slots; and a
        compiled one never, as in a GAN that has others.
        """
        waiting = [each for each in self._optimizers if not each.is_averaged]
        if not waiting:
            return
        stages = [(2 if each.counted() else 1) * each.optimizer.built for each in waiting]
        columns = self._group.meet(*stages).T
        used = [
            each
            for each, column in zip(waiting, columns, strict=True)
            if column.min() >= 1 and column.max() == 2
        ]
        if not used:
            return
        for each in used:
            each.is_averaged = True
        variables = [v for each in used for v in each.averaged()]
        means = exchange(self._group, [spec(v, "mean") for v in variables])
        assign(variables, means(values(variables)))
        self._join()

    def retrace(self) -> bool:
        """Whether steps that are traced already have another schedule or constant; True once."""
        outdated, self._constants.changed = self._constants.changed, False
        for reset in self._resets:
            outdated, reset.shifted = outdated or reset.shifted, False
        return outdated

    def begin_steps(self) -> None:
        """From here `iterations` may count since the last reset."""
        for reset in self._resets:
            reset.count_anew()

    def end_steps(self) -> None:
        """From here `iterations` counts all, as others read and save it."""
        for reset in self._resets:
            reset.count_all()

    def _part_seeds(self) -> None:
        """Gives this worker a random state of its own for each that an earlier worker has, too.

        `keras.utils.set_random_seed`, and a checkpoint that all restore, make them equal, and
        dropout would then leave out the same units on both workers.
        """
        if not self._seeds:
            return
        mine = [np.asarray(value) for value in values(self._seeds)]
        digests = self._group.meet(*(number_of(value) for value in mine))
        earlier = digests[: self._group.rank]
        equal = (earlier == digests[self._group.rank]).any(axis=0)
        for variable, value, is_equal in zip(self._seeds, mine, equal, strict=True):
            if not is_equal:
                continue
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


def number_of(value: np.ndarray) -> int:
    """Equal for equal values."""
    return int.from_bytes(hashlib.blake2b(value.tobytes(), digest_size=7).digest(), "big")


def _bytes(variables: Iterable[Any]) -> list[bytes]:
    return [value.tobytes() for value in values(variables)]


def _path(variable: Any) -> str:
    """A weight's path without the numbers that Keras appends to the names of further layers."""
    parts = str(getattr(variable, "path", variable.name)).split("/")
    return "/".join(part.rstrip("0123456789").rstrip("_") or part for part in parts)
