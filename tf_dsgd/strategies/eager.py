"""Steps that `strategy.run` gets from Python, outside of any `tf.function`: each is traced once.

What was traced of a function is kept by that function, or by the object whose method it is, so that
it is freed with that.
"""

from __future__ import annotations

import dataclasses
import weakref
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf_dsgd import _tf
from tf_dsgd.strategies.dataset import Token
from tf_dsgd.strategies.handing_out import FitProgram
from tf_dsgd.strategies.step import is_train_step

_NAME = "_tf_dsgd_programs"


class _Kept(weakref.WeakKeyDictionary[Any, list["_Traced"]]):
    """By strategy: what was traced of a function, or of an object's methods; a copy has nothing."""

    def __reduce__(self) -> Any:
        return _Kept, ()

    def __deepcopy__(self, memo: Any) -> _Kept:
        return _Kept()


@dataclasses.dataclass(frozen=True)
class _Traced:
    function: Any
    element_spec: str
    compiled: tuple[Any, ...]
    given: tuple[Any, list[Any]]
    program: FitProgram


class Given:
    """What `strategy.run` is called with from Python, once for each call.

    Args:
        strategy: whose `run` it is.
        fn: the step.
        element_spec: of the batch.
        arguments: of the step, the batch's token among them.
    """

    def __init__(self, strategy: Any, fn: Any, element_spec: Any, arguments: Any):
        self._strategy = strategy
        self._function = fn
        self._spec = str(element_spec)
        self._compiled = _tf.compiled_as(fn.__self__) if is_train_step(fn) else ()
        structure = tf.nest.map_structure(lambda x: isinstance(x, Token), arguments)
        others = [x for x in tf.nest.flatten(arguments) if not isinstance(x, Token)]
        self._others = structure, others

    def find(self) -> FitProgram | None:
        """What was traced for such a call before.

        Raises:
            ValueError: if that was for other arguments, whose values it has.
        """
        for each in self._all():
            same = each.function == self._function and each.element_spec == self._spec
            if same and _are(each.compiled, self._compiled):
                self._check(each)
                return each.program
        return None

    def keep(self, program: FitProgram) -> None:
        """From now on this is found."""
        structure, others = self._others
        given = structure, [np.array(x) if isinstance(x, np.ndarray) else x for x in others]
        self._all().append(_Traced(self._function, self._spec, self._compiled, given, program))

    def _all(self) -> list[_Traced]:
        owner = getattr(self._function, "__self__", self._function)
        held = getattr(owner, "__dict__", None)
        if not isinstance(held, dict):  # one that takes no attributes: as long as the strategy
            held = vars(self._strategy)
        return held.setdefault(_NAME, _Kept()).setdefault(self._strategy, [])

    def _check(self, traced: _Traced) -> None:
        structure, others = traced.given
        if structure == self._others[0] and all(map(_is_same, others, self._others[1])):
            return
        changed = (
            (then, now)
            for then, now in zip(others, self._others[1], strict=False)
            if not _is_same(then, now)
        )
        then, now = next(changed, (structure, self._others[0]))
        name = getattr(self._function, "__name__", repr(self._function))
        raise ValueError(
            f"strategy.run was given other arguments for {name!r} than at its first call: a step "
            "is traced once, and workers have those of the first call. Put what changes into the "
            "elements of the data set, or into a tf.Variable made in the strategy's scope; or give "
            "strategy.run a function of its own for each value, by functools.partial. Received: "
            f"{now!r}, after {then!r}."
        )


def _is_same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if type(one) is not type(other) or isinstance(one, (tf.Variable, keras.Variable)):
        return False
    if isinstance(one, (np.ndarray, tf.Tensor)):
        return one.dtype == other.dtype and bool(np.array_equal(one, other))
    equal = one == other
    return equal is True or (isinstance(equal, np.bool_) and bool(equal))


def _are(some: tuple[Any, ...], others: tuple[Any, ...]) -> bool:
    return len(some) == len(others) and all(a is b for a, b in zip(some, others, strict=True))
