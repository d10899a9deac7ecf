"""What workers have of a weight of which they have no copy."""

from __future__ import annotations

import tensorflow as tf


class NoCopy:
    """Its shape. What is written there is dropped."""

    part = 0

    def __init__(self, primary: tf.Variable, name: str):
        self.name = name
        self.shape = primary.shape
        self.dtype = primary.dtype

    @property
    def template(self) -> NoCopy:
        """Itself, for all workers have the same."""
        return self

    def scatter_add(self, slices: tf.IndexedSlices) -> None:
        """A local step on rows; the next lookup reads them from their shard."""

    def scatter_update(self, slices: tf.IndexedSlices) -> None:
        """Rows that a fetch brought: none."""
