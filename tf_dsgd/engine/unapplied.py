"""What the chief keeps of mini-batches until a shard has counted their gradients.

And what becomes of them when a task is lost.
"""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class Kept:
    """A message that was collected and travels during the next round."""

    message: Any
    """(headers, message), on the worker."""
    steps: int
    held: list[Any]
    """What it was computed of."""


@dataclasses.dataclass(frozen=True)
class CutOff:
    """A message that some shards have and others do not, because its worker was lost."""

    worker: int
    sequence: int
    held: list[Any]
    """What it was computed of."""


class Unapplied:
    """Per worker: its message under way, what the next is made of, and how many were applied.

    A worker has at most one message under way, so that the numbers which shards know of a lost
    worker tell what became of each of its mini-batches.
    """

    def __init__(self, num_workers: int):
        self.held: list[list[Any]] = [[] for _ in range(num_workers)]
        """Batches of gradients that were not collected yet."""
        self.kept: list[Kept | None] = [None] * num_workers
        self.applied = [0] * num_workers
        """Number of each worker's last message known to be applied."""

    def keep(self, worker: int, message: Any, steps: int) -> None:
        """A message of so many steps was collected, and is not sent yet."""
        self.kept[worker] = Kept(message, steps, self.held[worker])
        self.held[worker] = []

    def acknowledge(self, worker: int) -> Kept | None:
        """A message was applied: the kept one, which this gives, or all there was."""
        kept, self.kept[worker] = self.kept[worker], None
        if kept is None:
            self.held[worker] = []
        self.applied[worker] += 1
        return kept

    def parts(self, worker: int) -> list[Any]:
        """All that a worker has drawn, and no shard is known to have."""
        kept = self.kept[worker]
        return [*([] if kept is None else kept.held), *self.held[worker]]

    def lose(self, worker: int, last: list[int]) -> tuple[list[Any], CutOff | None]:
        """A worker is gone, of which each shard has applied the messages up to `last`.

        Returns:
            The batches whose gradients no shard has, and the message that only some have.
        """
        kept, held = self.kept[worker], self.held[worker]
        messages = [held] if kept is None else [kept.held, held]
        self.kept[worker], self.held[worker] = None, []
        cut_off = None
        if max(last) > self.applied[worker]:
            first = messages.pop(0)
            if min(last) < max(last):
                cut_off = CutOff(worker, max(last), first)
        self.applied[worker] = max(last)
        return [part for parts in messages for part in parts], cut_off

    def clear(self) -> list[Kept | None]:
        """After an error nothing goes to others; gives the messages that were collected."""
        kept, self.kept = self.kept, [None] * len(self.kept)
        self.held = [[] for _ in self.held]
        return kept
