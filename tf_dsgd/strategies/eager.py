"""Steps that `strategy.run` gets from Python, outside of any `tf.function`: each is traced once."""

from __future__ import annotations

import dataclasses
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf_dsgd import _tf
from tf_dsgd.strategies.dataset import Token
from tf_dsgd.strategies.handing_out import FitProgram
from tf_dsgd.strategies.step import is_train_step

# A larger array is a constant of the step if it is the same object: else each call would read it.
_MOST_BYTES = 1 << 20


class Given:
    """What `strategy.run` is called with from Python, once for each call.

    Args:
        fn: the step.
        element_spec: of the batch.
        arguments: of the step, the batch's token among them.
    """

    def __init__(self, fn: Any, element_spec: Any, arguments: Any):
        self.function = fn
        self.spec = str(element_spec)
        self.compiled = _tf.compiled_as(fn.__self__) if is_train_step(fn) else ()
        self.structure = tf.nest.map_structure(lambda x: isinstance(x, Token), arguments)
        flat = [x for x in tf.nest.flatten(arguments) if not isinstance(x, Token)]
        self.others = tf.nest.flatten(flat, expand_composites=True)


@dataclasses.dataclass(frozen=True)
class _Traced:
    call: Given
    others: list[Any]
    program: FitProgram


class EagerPrograms:
    """What was traced for such calls, as long as the strategy is there."""

    def __init__(self) -> None:
        self._traced: list[_Traced] = []

    def find(self, call: Given) -> FitProgram | None:
        """What was traced for such a call before.

        Raises:
            ValueError: if that was for other arguments, whose values it has.
        """
        for each in self._traced:
            if _is_of(each.call, call) and _are(each.call.compiled, call.compiled):
                _check(each, call)
                return each.program
        return None

    def keep(self, call: Given, program: FitProgram) -> None:
        """From now on this is found; what the model was compiled as before is not asked for."""
        others = [np.array(x) if _is_small(x) else x for x in call.others]
        left = [each for each in self._traced if not _is_of(each.call, call)]
        self._traced = [*left, _Traced(call, others, program)]


def _is_of(one: Given, other: Given) -> bool:
    return one.function == other.function and one.spec == other.spec


def _are(some: tuple[Any, ...], others: tuple[Any, ...]) -> bool:
    return len(some) == len(others) and all(a is b for a, b in zip(some, others, strict=True))


def _is_small(value: Any) -> bool:
    return isinstance(value, np.ndarray) and value.nbytes <= _MOST_BYTES


def _check(traced: _Traced, call: Given) -> None:
    then, now = traced.others, call.others
    same = traced.call.structure == call.structure and len(then) == len(now)
    if same and all(map(_is_same, then, now)):
        return
    pairs = zip(then, now, strict=False)
    before, after = next(
        ((a, b) for a, b in pairs if not _is_same(a, b)), (traced.call.structure, call.structure)
    )
    name = getattr(call.function, "__name__", repr(call.function))
    raise ValueError(
        f"strategy.run was given other arguments for {name!r} than at its first call: a step is "
        "traced once, and workers have those of the first call. Put what changes into the elements "
        "of the data set, or into a tf.Variable made in the strategy's scope; or give strategy.run "
        f"a function of its own for each value, by functools.partial. Received: {after!r}, after "
        f"{before!r}."
    )


def _is_same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if type(one) is not type(other) or isinstance(one, (tf.Variable, keras.Variable)):
        return False
    if isinstance(one, (np.ndarray, tf.Tensor)):
        has_nan = tf.as_dtype(one.dtype).is_floating or tf.as_dtype(one.dtype).is_complex
        return one.dtype == other.dtype and bool(np.array_equal(one, other, equal_nan=has_nan))
    equal = one == other
    both_nan = isinstance(one, float) and one != one and other != other
    return both_nan or equal is True or (isinstance(equal, np.bool_) and bool(equal))
