"""What a step reads and does not train: frozen layers, rates, counts.

A fetch brings it. Frozen layers may be most of a model, and nobody writes them while workers work.
So a fetch brings those, where they are large, only to a worker that has not had them as they are.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tf_dsgd import _tf
from tf_dsgd.engine.bundles import On
from tf_dsgd.engine.shard import Shard
from tf_dsgd.engine.state import Store
from tf_dsgd.engine.step import Step

_NEVER = -1


class ReadState:
    """What one shard has of it.

    Args:
        shard: where it is.
        variables: as `Step.fetched_state` gives them, of all shards.
        step: whose they are.
        store: of the workers.
    """

    def __init__(self, shard: Shard, variables: Sequence[Any], step: Step, store: Store):
        self.variables = [v for v in variables if v.shard == shard.index]
        self._shard = shard.index
        # Without the lock one fetch's note could be lost in another's.
        leaves = [] if shard.lock_free else [v for v in self.variables if step.leaves(v)]
        self._at_rest = {id(v): v for v in leaves}
        self._editions = [v.edition for v in leaves]
        if leaves:
            never = np.full([store.num_workers], _NEVER, np.int64)
            self._seen = _tf.make_variable(never, device=shard.device, name="seen_state")

    def read(self, worker: tf.Tensor, for_another: tf.Tensor) -> list[tf.Tensor]:
        """What `worker` is sent, under the shard's lock; of what it has already no elements.

        `for_another` it is sent what it would be, and then again for itself.
        """
        if self._at_rest:
            now = tf.add_n([edition.read_value() for edition in self._editions])
            seen = tf.gather(self._seen.read_value(), worker)
            noted = tf.where(for_another, seen, now)
            self._seen.scatter_update(tf.IndexedSlices(noted[None], worker[None]))
            known = seen == now
        return [
            tf.cond(known, functools.partial(_none_of, v), self._on_shard(v).read_value)
            if id(v) in self._at_rest
            else self._on_shard(v).read_value()
            for v in self.variables
        ]

    def take(self, values: Sequence[tf.Tensor], on_part: On) -> None:
        """The worker takes what `read` gave."""
        for variable, value in zip(self.variables, values, strict=True):
            copy = variable.on_workers()
            if id(variable) in self._at_rest:
                on_part(copy.part, functools.partial(_assign_if_any, copy.template, value))
            else:
                copy.template.assign(value, read_value=False)

    def forget(self, variable: Any = None) -> None:
        """Every worker is sent all next: `variable` was written from outside, or all were."""
        if self._at_rest and (variable is None or id(variable) in self._at_rest):
            self._seen.assign(np.full(self._seen.shape, _NEVER, np.int64))

    def _on_shard(self, variable: Any) -> Any:
        return variable.on_shard(self._shard)


def _none_of(variable: Any) -> tf.Tensor:
    return tf.zeros([0, *variable.shape[1:]], variable.dtype)


def _assign_if_any(copy: tf.Variable, value: tf.Tensor) -> None:
    # Assigned as it is, were it in a branch, TensorFlow's constant folding would take the value for
    # one of the variable's shape, everywhere, and so for one that is never empty (TF 2.21).
    copy.assign(tf.cond(tf.size(value) > 0, lambda: value, copy.value), read_value=False)
