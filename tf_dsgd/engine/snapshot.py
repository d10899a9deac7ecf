"""What shards and workers had counted at one moment, and what lies between two moments."""

from __future__ import annotations

import dataclasses

import numpy as np

from tf_dsgd.engine.ledger import Counters


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """All counts at one moment; or, as the difference of two, all that was counted between them."""

    seconds: float
    """The engine's clock."""
    wall_seconds: float
    """This machine's clock; another one where the engine's is virtual."""
    shards: tuple[Counters, ...]
    spent: np.ndarray
    """Seconds that each worker spent on each of `timing.KINDS`: `[workers, kinds]`."""
    undivided: float = 0.0
    """Seconds of all workers that are not in there, as it is not known yet on what they were spent;
    of a difference, those at both of its ends."""

    @property
    def steps(self) -> int:
        """Mini-batches whose gradients or updates were applied."""
        return int(self.shards[0].steps.sum())

    def since(self, before: Snapshot) -> Snapshot:
        """What was counted from `before` on."""
        return Snapshot(
            self.seconds - before.seconds,
            self.wall_seconds - before.wall_seconds,
            tuple(a.since(b) for a, b in zip(self.shards, before.shards, strict=True)),
            self.spent - before.spent,
            self.undivided + before.undivided,
        )
