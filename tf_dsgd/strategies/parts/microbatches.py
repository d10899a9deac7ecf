"""A mini-batch in pieces, which flow through the parts of a replica one behind the other.

Nothing says when a part takes up which piece: each operation runs when its inputs are there.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_dsgd import _tf, _tf_parts
from tf_dsgd.arithmetic import Gradient
from tf_dsgd.console import say

_WEIGHTED = "microbatches={} takes the mean over pieces, weighted by their examples"

_OF_ALL = {
    "Circle": "compares all pairs of examples",
    "Dice": "is a quotient of sums over all examples",
    "Tversky": "is a quotient of sums over all examples",
}
"""What Keras's losses do that are no mean over examples."""


def check(model: keras.Model, layers: Iterable[Any], number: int) -> None:
    """Raises a ValueError if gradients of pieces would not add up to those of the mini-batch."""
    if number == 1:
        return
    for loss in keras.tree.flatten(model.loss):
        reduction = getattr(loss, "reduction", "sum_over_batch_size")
        if reduction not in ("sum_over_batch_size", "mean"):
            raise ValueError(
                f"{_WEIGHTED.format(number)}, and "
                f"the loss {loss.name!r} is no mean over examples. Use "
                'reduction="sum_over_batch_size", or microbatches=1. Received: '
                f"reduction={reduction!r}."
            )
        for name, does in _OF_ALL.items():
            if _is(loss, name):
                raise ValueError(
                    f"{_WEIGHTED.format(number)}, and {name} {does}. Use another loss, or "
                    f"microbatches=1. Received: loss={name.lower()!r}."
                )
    for layer in layers:
        if getattr(layer, "activity_regularizer", None) is not None:
            raise ValueError(
                f"{_WEIGHTED.format(number)}, and "
                f"the activity_regularizer of {layer.name!r} is a sum over them. Leave it out, or "
                "use microbatches=1."
            )


def _is(loss: Any, name: str) -> bool:
    """Whether a loss, as `compile` takes it, is Keras's loss of this name."""
    if isinstance(loss, str):
        return loss in (name, name.lower())
    kind, function = getattr(keras.losses, name), getattr(keras.losses, name.lower())
    return loss is kind or loss is function or isinstance(loss, kind)


class Weighted:
    """Means that a step keeps for the logs, each piece of a mini-batch weighted by its examples.

    Args:
        model: whose step it is.
        number: of pieces.
    """

    def __init__(self, model: keras.Model, number: int):
        self._model = model
        self._number = number
        self._of_a_batch: set[str] = set()

    @contextlib.contextmanager
    def within(self, share: tf.Tensor) -> Iterator[None]:
        """For a piece that has this share of the examples."""
        with contextlib.ExitStack() as stack:
            for metric in self._model.metrics:
                if type(metric) is keras.metrics.Mean:
                    update = functools.partial(_updated, metric.update_state, share)
                    stack.enter_context(_tf.method_replaced(metric, "update_state", update))
            for loss in _tf_parts.compiled_losses(self._model):
                call = functools.partial(self._looked_at, loss.name, loss.call)
                stack.enter_context(_tf.method_replaced(loss, "call", call))
            yield

    def _looked_at(self, name: str, call: Callable[..., Any], *arguments: Any) -> Any:
        result = call(*arguments)
        if result.shape.rank == 0 and name not in self._of_a_batch:
            self._of_a_batch.add(name)
            say(
                f"microbatches={self._number}: the loss {name!r} gives one number for a batch, "
                "which must be a mean over its examples: of a sum, or anything else, the gradients "
                "are not those without pieces."
            )
        return result


def _updated(
    update: Callable[..., Any], share: tf.Tensor, values: Any, sample_weight: Any = None
) -> Any:
    """A number for all of a piece, such as its loss, counts by its share."""
    if sample_weight is None and tf.convert_to_tensor(values).shape.rank == 0:
        sample_weight = share
    return update(values, sample_weight=sample_weight)


def in_pieces(
    call: Callable[[Any], Any],
    batch: Any,
    number: int,
    optimizers: Iterable[Any],
    weighted: Weighted,
    of_keras: Any = None,
) -> Any:
    """Runs `call`, a step, on pieces of a batch; gives what it gave for the last one.

    The optimizers in it apply once, the mean of the pieces' gradients.

    Args:
        call: the step.
        batch: of which pieces are made.
        number: of pieces.
        optimizers: that the step may apply.
        weighted: the means of its logs.
        of_keras: where the step is Keras's own, its optimizer. It scales the loss once, and nothing
            else, so that pieces are weighted by numbers and not gradient by gradient.
    """
    if number == 1:
        return call(batch)
    pieces, shares = _cut(batch, number)
    optimizers = list(optimizers)
    taken = []
    for piece, share in zip(pieces, shares, strict=True):
        with contextlib.ExitStack() as stack:
            noted = stack.enter_context(_noting(optimizers))
            stack.enter_context(weighted.within(share))
            if of_keras is not None:
                scaled = functools.partial(_scaled, of_keras.scale_loss, share)
                stack.enter_context(_tf.method_replaced(of_keras, "scale_loss", scaled))
            outputs = call(piece)
        taken.append(noted)
    for applications in zip(*taken, strict=True):
        optimizer, _, variables = applications[0]
        of_weights = zip(*(gradients for _, gradients, _ in applications), strict=True)
        factors = [None if of_keras is not None else share for share in shares]
        optimizer.apply([_sum(of_one, factors) for of_one in of_weights], variables)
    return outputs


def _scaled(scale: Callable[[Any], Any], share: tf.Tensor, loss: tf.Tensor) -> tf.Tensor:
    return scale(loss * tf.cast(share, loss.dtype))


@contextlib.contextmanager
def _noting(optimizers: Iterable[Any]) -> Iterator[list[tuple[Any, list[Any], Any]]]:
    """Within, `apply` adds to the list that is given (optimizer, gradients, variables)."""
    noted: list[tuple[Any, list[Any], Any]] = []
    with contextlib.ExitStack() as stack:
        for optimizer in optimizers:

            def note(gradients: Any, variables: Any = None, _optimizer: Any = optimizer) -> None:
                variables = None if variables is None else list(variables)
                noted.append((_optimizer, list(gradients), variables))

            stack.enter_context(_tf.method_replaced(optimizer, "apply", note))
        yield noted


def _cut(batch: Any, number: int) -> tuple[list[Any], list[tf.Tensor]]:
    """Pieces of a batch, and of the examples the share that is in each."""
    flat = tf.nest.flatten(batch)
    tensors = [x for x in flat if x is not None]
    for tensor in tensors:
        if isinstance(tensor, tf.SparseTensor) or tensor.shape.rank == 0:
            raise ValueError(
                f"microbatches={number} cuts each tensor of a mini-batch along its first axis. "
                f"Received: {tensor!r}."
            )
    static = tensors[0].shape[0]
    if static is not None and static < number:
        raise ValueError(
            f"microbatches={number} cuts a mini-batch in as many pieces. Received: mini-batches of "
            f"{static} examples. Use a larger batch_size, or fewer microbatches."
        )
    flat = [_of_any_size(x) for x in flat]
    if static is not None:
        bounds: list[Any] = [i * static // number for i in range(number + 1)]
        size: Any = static
    else:
        size = tf.shape(tensors[0])[0] if isinstance(tensors[0], tf.Tensor) else tensors[0].nrows()
        enough = tf.debugging.assert_greater_equal(
            size,
            tf.cast(number, size.dtype),
            f"microbatches={number} cuts a mini-batch in as many pieces, and this one has fewer "
            "examples. Use a batch_size that leaves more for the last one, or drop_remainder=True.",
        )
        with tf.control_dependencies([enough]):
            size = tf.identity(size)
        bounds = [i * size // number for i in range(number + 1)]
    pieces, shares = [], []
    for first, end in itertools.pairwise(bounds):
        cut = [None if x is None else x[first:end] for x in flat]
        pieces.append(tf.nest.pack_sequence_as(batch, cut))
        shares.append(tf.cast(end - first, tf.float64) / tf.cast(size, tf.float64))
    return pieces, shares


def _of_any_size(value: Any) -> Any:
    """The same tensor, of whose examples the graph does not know how many there are.

    `keras.ops.add` takes (n, 1) for a bias of n columns where it sees that these are as many as the
    other operand has: it does not for mini-batches, but a piece may have any number.
    """
    if not isinstance(value, tf.Tensor):
        return value
    return tf.raw_ops.PlaceholderWithDefault(input=value, shape=[None, *value.shape[1:]])


def _sum(
    gradients: Sequence[Gradient | None], factors: Sequence[tf.Tensor | None]
) -> Gradient | None:
    """The sum of gradients, each times its factor, if that is not None."""
    pairs = zip(gradients, factors, strict=True)
    found = [g if f is None else _times(g, tf.cast(f, g.dtype)) for g, f in pairs if g is not None]
    if not found:
        return None
    if not isinstance(found[0], tf.IndexedSlices):
        return tf.add_n(found)
    return tf.IndexedSlices(
        tf.concat([g.values for g in found], 0),
        tf.concat([g.indices for g in found], 0),
        found[0].dense_shape,
    )


def _times(gradient: Gradient, factor: tf.Tensor) -> Gradient:
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(gradient.values * factor, gradient.indices, gradient.dense_shape)
    return gradient * factor
