"""Who waits, who computes, and who computes another's mini-batches again because they are late.

Where workers wait for the slowest, by their rule or at a drain, one that has waited long enough
computes the late one's message again and sends it in the late one's name. Shards take what comes
first, and refuse the other as a repetition. This is what Sandblaster does with late portions (Dean
et al., NIPS 2012, section 4.2), and MapReduce with late tasks.

Long enough is as long as the waiting worker's own last message took, and never less than the
patience: then all of it costs at most twice the work of the slowest.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf


@dataclasses.dataclass(frozen=True)
class Again:
    """A message that another worker computes again, and what it is sent as."""

    worker: int
    incarnation: int
    sequence: int
    held: list[Any]
    """What it is computed of."""

    @property
    def name(self) -> tf.Tensor:
        """What its header begins with."""
        return tf.constant([self.worker, self.incarnation, self.sequence], tf.int64)


class LateWork:
    """The books of this, kept by the engine, under its lock where it has threads.

    Args:
        num_workers: number of workers.
        patience_seconds: how long somebody waits at least; None for without end.
    """

    def __init__(self, num_workers: int, patience_seconds: float | None):
        self.patience = patience_seconds
        self._begun: list[float | None] = [None] * num_workers
        """When each began its unsent message."""
        self._took = [0.0] * num_workers
        """How long each one's last message took."""
        self._computes = [False] * num_workers
        """Whether a call is under way on each, so that others may have to wait for it."""
        self._waits: list[float | None] = [None] * num_workers
        """Since when each has waited for others."""
        self._stand_ins: dict[int, Again] = {}
        """By the worker that computes it."""
        self._shared: set[int] = set()
        """Late workers whose unsent message another computes, too, or has computed before it was
        lost: nobody may know then whether it was sent."""
        self.overtaken: set[int] = set()
        """Late workers whose message was sent by another; what they still send is refused."""
        self._reads: dict[int, float] = {}
        """Workers of which something is read for the chief to show, and since when."""
        self.slow_readers: set[int] = set()
        """Those of them of which it has been read for so long that nobody waits for it."""

    def computes(self, worker: int, now: float) -> None:
        """A worker begins to compute what it has taken."""
        self._waits[worker] = None
        self._computes[worker] = True
        if self._begun[worker] is None:
            self._begun[worker] = now

    def sends(self, worker: int) -> None:
        """What a worker has computed is under way."""
        self._computes[worker] = True

    def has_computed(self, worker: int) -> None:
        """A worker is between two calls."""
        self._computes[worker] = False

    def has_sent(self, worker: int, now: float) -> None:
        """A worker's message was taken in."""
        self._shared.discard(worker)
        begun, self._begun[worker] = self._begun[worker], None
        if begun is not None:
            self._took[worker] = now - begun

    def waits(self, worker: int, now: float) -> None:
        """A worker may not go on before others have sent."""
        if self._waits[worker] is None:
            self._waits[worker] = now

    def due(self, worker: int) -> tuple[float, int] | None:
        """When a worker that waits stands in for another, the one that has computed for longest.

        Then it has waited long enough; and so would it have, had it begun together with that one.
        """
        since = self._waits[worker]
        if since is None or self.patience is None:
            return None
        taken = {again.worker for again in self._stand_ins.values()} | self.overtaken
        late = [
            (begun, m)
            for m, begun in enumerate(self._begun)
            if begun is not None and self._computes[m] and m not in taken
        ]
        if not late:
            return None
        begun, m = min(late)
        took = self._took[worker]
        return max(since, begun + took) + max(self.patience, took), m

    def stands_in(self, worker: int, again: Again) -> None:
        """A worker begins to compute another's message."""
        self._stand_ins[worker] = again
        self._shared.add(again.worker)

    def has_stood_in(self, worker: int) -> bool:
        """It has sent it, and waits anew; False if that is forgotten."""
        self._waits[worker] = None
        return self._stand_ins.pop(worker, None) is not None

    def is_read(self, worker: int, now: float) -> None:
        """What a worker has to show is under way."""
        self._reads[worker] = now

    def was_read(self, worker: int) -> None:
        """It has come, or will not."""
        del self._reads[worker]
        self.slow_readers.discard(worker)

    def look_at_readers(self, now: float) -> None:
        """Takes note of who is slow."""
        if self.patience is not None:
            slow = (m for m, since in self._reads.items() if now - since > self.patience)
            self.slow_readers.update(slow)

    def overtakes(self, late: int) -> None:
        """Another has sent this one's message."""
        self.overtaken.add(late)

    def stays_behind(self, worker: int) -> bool:
        """Whether a worker may not add to its message, as another may have sent it, or will."""
        return worker in self.overtaken | self._shared or any(
            again.worker == worker for again in self._stand_ins.values()
        )

    @property
    def unfinished(self) -> bool:
        """Whether anybody stands in for another, or has to send what will be refused.

        Not one that was overtaken and still computes: a drain need not wait for it.
        """
        return bool(self._stand_ins) or any(not self._computes[m] for m in self.overtaken)

    def clear(self) -> set[int]:
        """After an error nobody is late; gives those that were overtaken."""
        overtaken = set(self.overtaken)
        for worker in range(len(self._begun)):
            self.forget(worker)
        return overtaken

    def forget(self, worker: int) -> None:
        """A worker is lost, or at rest."""
        self._begun[worker] = self._waits[worker] = None
        self._computes[worker] = False
        self.overtaken.discard(worker)
        self._shared.discard(worker)
        self._stand_ins.pop(worker, None)

    # -- in a checkpoint --------------------------------------------------------------------

    def state(self, refused_at: Mapping[int, float]) -> np.ndarray:
        """What a checkpoint has of it, `[workers, 6]`, at rest: nobody stands in for another.

        Args:
            refused_at: when each that was overtaken sends what is refused; the earliest first.
        """
        ranks = {m: float(rank) for rank, m in enumerate(refused_at)}
        rows = zip(self._begun, self._took, self._computes, self._waits, strict=True)
        return np.array(
            [
                [*map(_number, row), _number(refused_at.get(m)), _number(ranks.get(m))]
                for m, row in enumerate(rows)
            ]
        )

    def restore(self, state: np.ndarray) -> dict[int, float]:
        """Sets what `state` gave; gives `refused_at`."""
        found = []
        for m, row in enumerate(state.tolist()):
            begun, took, computes, waits, refused_at, rank = row
            self._begun[m], self._waits[m] = _or_none(begun), _or_none(waits)
            self._took[m], self._computes[m] = took, bool(computes)
            if not math.isnan(rank):
                found.append((rank, m, refused_at))
        self.overtaken = {m for _, m, _ in found}
        return {m: refused_at for _, m, refused_at in sorted(found)}


def _number(value: float | None) -> float:
    return math.nan if value is None else float(value)


def _or_none(value: float) -> float | None:
    return None if math.isnan(value) else value
