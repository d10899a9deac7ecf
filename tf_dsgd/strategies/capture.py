"""How a compiled Keras optimizer is split between a worker and a shard.

A worker needs the gradients; the shard runs `optimizer.apply`, whole, on what was pushed: clipping,
weight decay, the update, EMA, constraints and the count of iterations, each once and in Keras's
order. So while a worker's step is traced, `apply` of the optimizers created in the scope takes
note of its arguments instead. Two things happen on the worker:

- gradients under `LossScaleOptimizer` are divided by the scale the worker used, since the shard's
  may have changed until they arrive; the shard multiplies them by its own, and the optimizer
  tests, skips and adapts as ever;
- gradients of a loss that an optimizer's `loss_scale_factor` has multiplied are divided by it;
- gradients are clipped there (each mini-batch's, as the user meant) when more than one goes into
  a message, or a worker steps on its copy, or, for `global_clipnorm`, when a message goes to
  several shards, none of which knows the norm of the whole; the shard then does not clip again.
  Under gradient accumulation Keras clips what was accumulated, and so does the shard; for a
  worker's local step each is clipped.

A `MultiOptimizer` gives each variable to one of several optimizers, by a call of that one's
`apply`: that is what is taken note of, and with the first of them the whole is counted.

Where workers run the compiled optimizer, they do so on what they have copies of. Of tables that
are split by rows they have none: there `apply` is divided, and the shards run the tables' part.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_dsgd import _tf
from tf_dsgd.arithmetic import Gradient, merged_rows, scaled
from tf_dsgd.strategies.objective import Objective
from tf_dsgd.strategies.rows.tables import SplitTable
from tf_dsgd.strategies.rows.touched_rows import by_rows, check_lazy_options, check_split
from tf_dsgd.strategies.tracing import current_trace

_CLIPPING = ("clipnorm", "clipvalue", "global_clipnorm")


@dataclasses.dataclass
class Application:
    """One call of `optimizer.apply` in the user's step."""

    optimizer: keras.optimizers.Optimizer
    variables: list[Any]
    """As the user's step passed them: Keras variables, or the optimizer's own list."""
    gradients: list[Gradient]
    unscaled: bool = False
    """Whether gradients are divided by the optimizer's `loss_scale_factor`."""
    clipped: bool = False
    counts: bool = True
    """Whether it is an update in `optimizer.iterations`."""
    whole: keras.optimizers.MultiOptimizer | None = None
    """What gave these variables to the optimizer, and counts an update by this one of its parts."""
    continues: bool = False
    """Whether it is another part of what the application before is a part of."""
    weights: list[Any] = dataclasses.field(default_factory=list)
    """The strategy's variables behind them, or, of a table that is split, its parts."""

    def __post_init__(self) -> None:
        self.weights = self.weights or [_behind(v) for v in self.variables]

    @property
    def inner(self) -> keras.optimizers.Optimizer:
        """The optimizer that makes the step."""
        return getattr(self.optimizer, "inner_optimizer", self.optimizer)

    def clipped_locally(self, gradients: Sequence[Gradient]) -> list[Gradient]:
        """Gradients for a local step, which are clipped also where the shard does it later."""
        return list(gradients) if self.clipped else _clipped(self.inner, gradients)

    def apply(
        self,
        gradients: Sequence[Gradient],
        variables: Sequence[Any],
        shard: int,
        lazy: bool,
        side_by_side: bool = False,
    ) -> None:
        """Traces the update of those of the variables that are on a shard.

        With `lazy` rows of a table that have no gradient keep still. `side_by_side` with others an
        update adds to rows in place.
        """
        gradients = list(gradients)
        if lazy:
            check_lazy_options(self.inner)
        if self.inner is not self.optimizer:
            scale = self.optimizer.dynamic_scale.value
            gradients = [scaled(g, scale) for g in gradients]
        with contextlib.ExitStack() as stack:
            done = _CLIPPING * self.clipped + ("loss_scale_factor",) * self.unscaled
            stack.enter_context(_without(self.inner, done))
            stack.enter_context(_tf.restricted(self.inner, lambda v: _behind(v).is_on(shard)))
            stack.enter_context(by_rows(self.inner, lazy, side_by_side))
            stack.enter_context(_tf.counted_natively(self.inner, self.counts))
            self.optimizer.apply(gradients, list(variables))
        self.count_whole(shard)

    def count_whole(self, shard: int) -> None:
        """Traces that a shard counts an update of the optimizer that this one is a part of."""
        if self.whole is not None:
            counter = _tf.iterations_variable(self.whole).on_shard(shard)
            counter.assign_add(1, read_value=False)


def _behind(variable: Any) -> Any:
    return variable.value if isinstance(variable, keras.Variable) else variable


def _is_split(variable: Any) -> bool:
    return isinstance(_behind(variable), SplitTable)


def _split(application: Application) -> Application:
    """With each gradient of a table that is split as one for each part."""
    variables: list[Any] = []
    gradients: list[Gradient] = []
    weights: list[Any] = []
    for variable, gradient in zip(application.variables, application.gradients, strict=True):
        table = _behind(variable)
        split = isinstance(table, SplitTable)
        parts = table.parts if split else [table]
        variables += [variable] * len(parts)
        gradients += table.split(gradient) if split else [gradient]
        weights += parts
    return dataclasses.replace(
        application, variables=variables, gradients=gradients, weights=weights
    )


def _all_or_none(gradients: Sequence[Gradient]) -> list[Gradient]:
    """The gradients, or all NaN if one is not finite: whoever has some must know of all."""
    values = [g.values if isinstance(g, tf.IndexedSlices) else g for g in gradients]
    finite = tf.reduce_all([tf.reduce_all(tf.math.is_finite(v)) for v in values])
    factor = tf.where(finite, 1.0, float("nan"))
    return [scaled(g, factor) for g in gradients]


def _over(gradient: Gradient, divisor: Any) -> Gradient:
    """Divided, as Keras does it: 1 over a scale of more than 2 ** 126 would be zero."""
    if isinstance(gradient, tf.IndexedSlices):
        values = _over(gradient.values, divisor)
        return type(gradient)(values, gradient.indices, gradient.dense_shape)
    return gradient / tf.cast(divisor, gradient.dtype)


def _each_row_once(gradient: Gradient) -> Gradient:
    """So that its norm is that of the dense gradient; XLA has no operation for it."""
    trace = current_trace()
    compiled = trace is not None and trace.compiled
    sparse = isinstance(gradient, tf.IndexedSlices) and not compiled
    return merged_rows(gradient) if sparse else gradient


def _clipped(
    optimizer: keras.optimizers.Optimizer, gradients: Sequence[Gradient]
) -> list[Gradient]:
    """As the optimizer was configured to."""
    if all(getattr(optimizer, name) is None for name in _CLIPPING):
        return list(gradients)
    return _tf.clip(optimizer, [_each_row_once(g) for g in gradients])


@contextlib.contextmanager
def _without(optimizer: keras.optimizers.Optimizer, options: Sequence[str]) -> Iterator[None]:
    """Within, the optimizer does not do what the worker has done already."""
    before = {name: getattr(optimizer, name) for name in options}
    for name in options:
        setattr(optimizer, name, None)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(optimizer, name, value)


class Optimizers:
    """The optimizers created in a strategy's scope.

    Attributes:
        for_shards: the one among them that `Shard.optimize` applies where the compiled optimizer
            runs on workers; None where shards apply the compiled one, or none.
        lazy: whether a shard's update of a table leaves rows alone that have no gradient.
        objective: what adds up losses and gradients over examples, where that is what counts.
    """

    def __init__(self) -> None:
        self._known: weakref.WeakSet = weakref.WeakSet()
        self.for_shards: keras.optimizers.Optimizer | None = None
        self.lazy = False
        self.objective: Objective | None = None

    def note(self, creator: Any) -> None:
        """Registers what creates a variable, if that is an optimizer."""
        if isinstance(creator, keras.optimizers.Optimizer):
            self._known.add(creator)

    def __contains__(self, optimizer: object) -> bool:
        # Whose loss another one scales.
        inner: Any = getattr(optimizer, "inner_optimizer", optimizer)
        parts = inner.optimizers if is_multi(inner) else []
        return all(each in self._known for each in (optimizer, inner, *parts))

    def __iter__(self) -> Iterator[keras.optimizers.Optimizer]:
        return iter(self._known)

    @contextlib.contextmanager
    def noted(self) -> Iterator[list[keras.optimizers.Optimizer]]:
        """Within, each optimizer that is applied joins the list that is given."""
        applied: list[keras.optimizers.Optimizer] = []
        with contextlib.ExitStack() as stack:
            for optimizer in list(self._known):
                note = functools.partial(_apply_noted, optimizer, optimizer.apply, applied)
                stack.enter_context(_tf.method_replaced(optimizer, "apply", note))
            yield applied

    @contextlib.contextmanager
    def captured(
        self, clip: bool, in_parts: bool, check: Callable[[Any], None] | None = None
    ) -> Iterator[list[Application]]:
        """Within, `optimizer.apply` adds to the list that is given, and changes nothing.

        Args:
            clip: whether gradients are clipped here in any case.
            in_parts: whether they go to several shards.
            check: called with each optimizer that is applied, before a table names another remedy.
        """
        applications: list[Application] = []
        with contextlib.ExitStack() as stack:
            for optimizer in list(self._known):

                def note(
                    grads: Any, trainable_variables: Any = None, _optimizer: Any = optimizer
                ) -> None:
                    if check is not None:
                        check(_optimizer)
                    applications.append(
                        _noted(_optimizer, grads, trainable_variables, clip, in_parts, self.lazy)
                    )

                if is_multi(optimizer):
                    note = functools.partial(_noted_parts, optimizer, optimizer.apply, applications)
                stack.enter_context(_tf.method_replaced(optimizer, "apply", note))
                if self.objective is not None:
                    stack.enter_context(self.objective.noting(optimizer))
            yield applications

    @contextlib.contextmanager
    def divided(self) -> Iterator[list[Application]]:
        """Within, `optimizer.apply` leaves out tables that are split, and is Keras's for all else.

        What is left to do with the tables is in the list that is given, for the shards.
        """
        applications: list[Application] = []
        with contextlib.ExitStack() as stack:
            for optimizer in list(self._known):
                if is_multi(optimizer):  # Keras has its parts apply
                    continue
                apply = functools.partial(
                    _apply_divided, optimizer, optimizer.apply, applications, self.lazy
                )
                stack.enter_context(_tf.method_replaced(optimizer, "apply", apply))
            yield applications


def is_multi(optimizer: Any) -> bool:
    """Whether an optimizer is several, each for some of the variables."""
    return isinstance(optimizer, keras.optimizers.MultiOptimizer)


def _noted_parts(
    optimizer: keras.optimizers.MultiOptimizer,
    plain: Callable[..., None],
    applications: list[Application],
    grads: Any,
    trainable_variables: Any = None,
) -> None:
    """What `apply` of a `MultiOptimizer` is within `captured`: Keras calls that of each part."""
    outside = [part.name for part in optimizer.optimizers if "apply" not in vars(part)]
    if outside or not optimizer.optimizers:
        raise ValueError(
            f"The optimizers of {optimizer.name} must be made in the strategy's scope, and before "
            "the first step. Received: "
            + (f"{outside}." if outside else "a function that makes them as it sees variables.")
            + " Call optimizer.build(variables) in the scope, or give an OptimizerMap."
        )
    first = len(applications)
    with _tf.counted_natively(optimizer, counts=False):
        plain(list(grads), trainable_variables)
    for application in applications[first:]:
        application.continues = application is not applications[first]
    if len(applications) > first:
        applications[first].whole = optimizer


def _apply_noted(
    optimizer: Any, plain: Callable[..., None], applied: list[Any], *args: Any, **kwargs: Any
) -> None:
    """What `optimizer.apply` is within `noted`; `plain` is what it is by itself."""
    applied.append(optimizer)
    plain(*args, **kwargs)


def _apply_divided(
    optimizer: Any,
    plain: Callable[..., None],
    applications: list[Application],
    lazy: bool,
    grads: Any,
    trainable_variables: Any = None,
) -> None:
    """What `optimizer.apply` is within `divided`; `plain` is what it is by itself."""
    variables = None if trainable_variables is None else list(trainable_variables)
    known = variables or (_tf.built_variables(optimizer) if optimizer.built else [])
    if not any(_is_split(v) for v in known):
        trace = current_trace()
        before = set() if trace is None else set(trace.assigned)
        plain(grads, variables)
        if trace is not None:
            trace.assigned = before  # what the step itself assigns to; optimizers are known
        return
    if hasattr(optimizer, "inner_optimizer"):
        raise ValueError(
            f"The table {_behind(next(v for v in known if _is_split(v))).name!r} is split by "
            f"rows, and {type(optimizer).__name__} skips a step whose gradients are not finite: "
            "workers, which step on all else, and shards, which step on the table, would come to "
            "different decisions. Use the dtype policy mixed_bfloat16, which needs no loss scale, "
            "or DownpourStrategy."
        )
    if not optimizer.built:
        optimizer.build(known)
    grads = list(grads)
    tables, others = (
        [(g, v) for g, v in zip(grads, known, strict=True) if _is_split(v) is split]
        for split in (True, False)
    )
    of_tables = [g for g, _ in tables]
    if any(g is not None for g in of_tables):
        noted = _noted(optimizer, of_tables, [v for _, v in tables], True, False, lazy)
        applications.append(dataclasses.replace(noted, counts=False))
        if all(g is None for g, _ in others):  # an optimizer of its own, which counts as others do
            _tf.iterations_variable(optimizer).assign_add(1, read_value=False)
            return
    with _tf.restricted(optimizer, lambda v: not _is_split(v)):
        plain([g for g, _ in others], [v for _, v in others])


def _noted(
    optimizer: Any, gradients: Any, variables: Any, clip: bool, in_parts: bool, lazy: bool
) -> Application:
    if variables is None:
        if not optimizer.built:
            raise ValueError(
                f"{optimizer.name}.apply(gradients) was called without variables before the "
                "optimizer was built. Pass the variables, or call optimizer.build(variables)."
            )
        variables = _tf.built_variables(optimizer)
    variables = list(variables)
    gradients = list(gradients)
    if not optimizer.built:
        optimizer.build(variables)
    pairs = [(g, v) for g, v in zip(gradients, variables, strict=True) if g is not None]
    if not pairs:
        raise ValueError(
            "No gradient reached any variable. Is the loss computed from the model's weights?"
        )
    application = Application(optimizer, [v for _, v in pairs], [g for g, _ in pairs])
    inner = application.inner
    if is_multi(inner):
        raise ValueError(
            f"{type(optimizer).__name__} with {type(inner).__name__} in it skips a step of all "
            "variables together, and shards apply each of its optimizers by itself. Use the dtype "
            "policy mixed_bfloat16, which needs no loss scale; one optimizer; or DownpourStrategy("
            'local_rule="optimizer").'
        )
    if inner is not optimizer:
        scale = optimizer.dynamic_scale.value
        application.gradients = [_over(g, scale) for g in application.gradients]
        if in_parts or (clip and inner.clipvalue is not None):  # which makes infinity finite
            application.gradients = _all_or_none(application.gradients)
    if inner.loss_scale_factor is not None:
        application.gradients = [
            # Keras takes such a gradient for the value itself, and does not divide it.
            g if getattr(v, "overwrite_with_gradient", False) else _over(g, inner.loss_scale_factor)
            for g, v in zip(application.gradients, application.variables, strict=True)
        ]
        application.unscaled = True
    if in_parts and inner.gradient_accumulation_steps and inner.global_clipnorm is not None:
        raise ValueError(
            "global_clipnorm together with gradient_accumulation_steps is not possible with more "
            "than one ps task: no shard knows the norm of the whole accumulated gradient. Use one "
            f"ps task, or clipnorm. Received: global_clipnorm={inner.global_clipnorm}, "
            f"gradient_accumulation_steps={inner.gradient_accumulation_steps}."
        )
    tables = [v for v in application.variables if _is_split(v)]
    for variable in tables:
        check_split(inner, variable, lazy)
    clip = clip or bool(tables) or (in_parts and inner.global_clipnorm is not None)
    if clip and not inner.gradient_accumulation_steps:
        application.gradients = _clipped(inner, application.gradients)
        application.clipped = True
    return _split(application)
