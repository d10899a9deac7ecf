"""How long what simulated workers send and fetch is on its way: a delay, and its bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import tensorflow as tf

from tf_dsgd.engine.state import Store


class Delay(Protocol):
    """Virtual seconds, one number after another (`tf_dsgd.simulation.delays`)."""

    def draw(self, random: np.random.Generator, now: float) -> float: ...


class Links:
    """Each worker's link to the shards: seconds = a delay + bytes / `bytes_per_second`.

    A link is one worker's own, and each message has all of it: there is no queue on the shards'
    side. Bytes are those of tensors as they travel, encoded; a message's header is among them.

    Args:
        delays: of each worker.
        bytes_per_second: of each link; None where bytes take no time.
        store: whose workers count what a fetch brings them.
    """

    def __init__(self, delays: Sequence[Delay], bytes_per_second: float | None, store: Store):
        self._delays = delays
        self._rate = bytes_per_second
        self._store = store
        store.counts_fetched = bytes_per_second is not None

    def message(self, m: int, random: np.random.Generator, now: float, message: Any) -> float:
        """Virtual seconds of a message of worker `m`."""
        seconds = self._delays[m].draw(random, now)
        if self._rate is None:
            return seconds
        return seconds + _bytes_of(message) / self._rate

    def fetch(self, m: int, random: np.random.Generator, now: float) -> float:
        """Virtual seconds of what worker `m` has just fetched."""
        seconds = self._delays[m].draw(random, now)
        if self._rate is None:
            return seconds
        return seconds + int(self._store.fetched.of(m)) / self._rate


def _bytes_of(message: Any) -> int:
    parts = tf.nest.flatten(message, expand_composites=True)
    return sum(int(part.shape.num_elements()) * part.dtype.size for part in parts)
