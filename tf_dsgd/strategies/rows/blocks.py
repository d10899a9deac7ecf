"""First values of a table that no process holds whole: drawn block by block, where they stay.

Each shard draws whole blocks and keeps the rows that are its own. A block's numbers depend on the
seed and on its place in the table, so a table begins the same however many shards it is split over.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf_dsgd.checks import named

_MOST_ROWS = 65_536
_MOST_BYTES = 64_000_000

_ENTRYWISE = (
    *("Zeros", "Ones", "Constant", "RandomNormal", "RandomUniform", "TruncatedNormal"),
    *("VarianceScaling", "GlorotNormal", "GlorotUniform", "HeNormal", "HeUniform"),
    *("LecunNormal", "LecunUniform"),
)
_BY_BLOCKS = {getattr(keras.initializers, name) for name in _ENTRYWISE}
"""Initializers that draw each entry by itself. Of a subclass nobody knows."""


class _BlockSeed(keras.random.SeedGenerator):
    """The seed of one block, without the variable of an ordinary generator."""

    def __init__(self, seed: int, block: tf.Tensor):
        self._pair = tf.stack([tf.constant(seed, tf.int64), tf.cast(block, tf.int64)])

    def next(self, ordered: bool = True) -> tf.Tensor:
        """Two numbers, the same at each call."""
        del ordered
        return tf.cast(self._pair, tf.uint32)


class Blocks:
    """The first values of a table.

    Args:
        initializer: Keras's initializer, as the layer has it.
        shape: of the whole table.
        dtype: its type.
        name: of the table, for errors.

    Raises:
        ValueError: for an initializer that does not draw each entry by itself.
    """

    def __init__(self, initializer: Any, shape: Sequence[int], dtype: str, name: str):
        axes = [getattr(initializer, f"{side}_axes", None) for side in ("input", "output")]
        if isinstance(initializer, keras.initializers.Constant) and np.ndim(initializer.value):
            raise ValueError(
                f"The table {name!r} is split by rows and drawn block by block, and its "
                "initializer holds all of it. Begin with zeros, and set the rows afterwards: "
                f"layer.set_weights([matrix]). Received: {type(initializer).__name__} of shape "
                f"{np.shape(initializer.value)}."
            )
        if type(initializer) not in _BY_BLOCKS or axes != [None, None]:
            raise ValueError(
                f"The table {name!r} is split by rows and drawn block by block, for which an "
                f"initializer must draw each entry by itself, as {', '.join(_ENTRYWISE)} do. Use "
                "one of them, without axes, and assign other values afterwards. Received: "
                f"{named(initializer)}."
            )
        self._initializer = initializer
        self._seed = _seed_of(initializer)
        self._shape = list(shape)
        self._dtype = dtype
        self.rows = rows_of_block(shape, tf.as_dtype(dtype))
        self.number = -(-self._shape[0] // self.rows)

    def draw(self, block: tf.Tensor) -> tf.Tensor:
        """Block number `block`, `[rows, ...]`; of the last one more than the table has."""
        initializer = copy.copy(self._initializer)
        if self._seed is not None:
            initializer.seed = _BlockSeed(self._seed, block)
        shape = [self.rows, *self._shape[1:]]
        if isinstance(initializer, keras.initializers.VarianceScaling):
            initializer.scale *= _fan(initializer, shape) / _fan(initializer, self._shape)
        return initializer(tuple(shape), dtype=self._dtype)


def rows_of_block(shape: Sequence[int], dtype: tf.DType) -> int:
    """Rows of a block of such a table; the same however it is split."""
    row = dtype.size
    for size in shape[1:]:
        row *= size
    return max(1, min(int(shape[0]), _MOST_ROWS, _MOST_BYTES // max(row, 1)))


def _seed_of(initializer: Any) -> int | None:
    seed = getattr(initializer, "seed", None)
    if isinstance(seed, keras.random.SeedGenerator):
        numbers = keras.ops.convert_to_numpy(seed.next())  # the generator's seed, and its count
        seed = int(np.random.SeedSequence(numbers.ravel().tolist()).generate_state(1)[0])
    return None if seed is None else int(seed) % 2**32


def _fan(initializer: Any, shape: Sequence[int]) -> float:
    """What `VarianceScaling` divides its scale by (Glorot and Bengio, 2010; He et al., 2015)."""
    field = 1
    for size in shape[:-2]:
        field *= size
    into, out = shape[-2] * field, shape[-1] * field
    fan = {"fan_in": into, "fan_out": out}.get(initializer.mode, (into + out) / 2.0)
    return max(1.0, float(fan))
