"""The function that a batch method minimises: the loss that `evaluate` would give on all data.

Keras gives of each mini-batch the mean loss, to which it adds regularisation. A mini-batch of n
examples counts n times, in the loss, as in Keras's own metric of it, and in the gradient; the sum
of n is what both are divided by. Losses are added up in double precision.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_dsgd import _tf
from tf_dsgd.arithmetic import Gradient
from tf_dsgd.strategies.stream import examples_in
from tf_dsgd.strategies.variable import Kind, ReplicaVariable


class Objective:
    """What workers have added up since `reset`: losses and numbers of examples.

    Both are as metrics are: each worker adds up its own, and what one that is lost had not sent is
    not counted.

    Args:
        strategy: whose workers these are.
    """

    def __init__(self, strategy: Any):
        zeros = tf.zeros([2], tf.float64)
        primary = _tf.make_variable(zeros, device=strategy.shard_devices[0], name="objective")
        self._sums = ReplicaVariable(strategy, primary, Kind.METRIC)
        """The loss, and examples: one variable, as each is set and read from outside in a pass."""
        self._losses: list[tf.Tensor] = []

    # -- while a worker's step is traced ----------------------------------------------------

    @contextlib.contextmanager
    def noting(self, optimizer: keras.optimizers.Optimizer) -> Iterator[None]:
        """Within, takes note of the loss of which Keras's step takes the gradient."""
        self._losses = []

        def note(loss: tf.Tensor) -> tf.Tensor:
            self._losses.append(loss)
            return loss

        with _tf.method_replaced(optimizer, "scale_loss", note):
            yield

    def add(self, batch: Any, gradients: Sequence[Gradient]) -> list[tf.Tensor]:
        """Adds a mini-batch's loss; gives its gradients, dense and times its examples."""
        if len(self._losses) != 1:
            raise ValueError(
                "A batch method needs the loss whose gradient it is given: train_step has to call "
                "optimizer.scale_loss(loss) once, as Keras's own does. Received: "
                f"{len(self._losses)} calls."
            )
        loss = self._losses.pop()
        examples = examples_in(batch)
        count = tf.cast(examples, tf.float64)
        self._sums.assign_add(tf.stack([count * tf.cast(loss, tf.float64), count]))
        dense = [tf.convert_to_tensor(g) for g in gradients]
        return [tf.cast(examples, g.dtype) * g for g in dense]

    # -- at rest ----------------------------------------------------------------------------

    def reset(self) -> None:
        """Before a pass over the data."""
        self._sums.assign([0.0, 0.0])

    def read(self) -> tuple[float, float]:
        """The mean loss of all examples, and how many they are, after a pass."""
        loss, examples = self._sums.value_at_rest().numpy().tolist()
        return loss / examples if examples else math.nan, examples
