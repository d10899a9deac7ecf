"""Mini-batches that are kept from one pass over the data for the passes after it.

A batch method goes over the same data again and again, and asks nothing of their order. So after
the first pass nothing is read, shuffled or gathered: its mini-batches are handed out again, if they
take little memory.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import tensorflow as tf


@dataclasses.dataclass(frozen=True)
class Part:
    """Some mini-batches in a row.

    Attributes:
        batches: a vector of `tf.variant`, each an optional that holds a mini-batch.
        examples: in each of them.
        sizes: the bytes of each.
    """

    batches: tf.Tensor
    examples: tuple[int, ...]
    sizes: tuple[int, ...]


class Kept:
    """All mini-batches of a pass over the data, once one was kept whole."""

    most_bytes = 1 << 30
    """If a pass takes more, it is not kept."""

    def __init__(self) -> None:
        self.parts: Sequence[Part] | None = None
        """In order; None before a pass was kept whole."""


class Record:
    """The mini-batches of a pass that is under way.

    Args:
        kept: where they stay when the pass has ended.
    """

    def __init__(self, kept: Kept):
        self._kept = kept
        self._parts: list[Part] = []
        self._bytes = 0

    def add(self, part: Part) -> None:
        """The next mini-batches of the pass."""
        self._bytes += sum(part.sizes)
        if self.fits:
            self._parts.append(part)
        else:
            self._parts.clear()

    @property
    def fits(self) -> bool:
        """Whether the pass takes little enough memory, as far as it has come."""
        return self._bytes <= self._kept.most_bytes

    def end(self) -> None:
        """The pass has no more."""
        if self.fits:
            self._kept.parts = tuple(self._parts)
