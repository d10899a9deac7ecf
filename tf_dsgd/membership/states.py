"""States with a table of what may follow what; everything else raises."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Set
from typing import Generic, TypeVar

S = TypeVar("S", bound=enum.Enum)


class Stateful(Generic[S]):
    """Something that is in one state, and says so when it would go where it cannot.

    Args:
        state: the first one.
        allowed: state -> those that may follow it.
    """

    def __init__(self, state: S, allowed: Mapping[S, Set[S]]):
        self._state = state
        self._allowed = allowed

    @property
    def state(self) -> S:
        """Where it stands."""
        return self._state

    def become(self, state: S) -> None:
        """Goes there.

        Raises:
            RuntimeError: where that does not follow; a defect of tf_dsgd.
        """
        if state not in self._allowed[self._state]:
            raise RuntimeError(
                f"{self!r} cannot become {state.value}: that does not follow {self._state.value}. "
                "That is a defect of tf_dsgd; please report it."
            )
        self._state = state
