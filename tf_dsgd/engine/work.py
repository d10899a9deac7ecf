"""What the scheduler is asked and answers: rules, sources of mini-batches, and what to do next."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from tf_dsgd.membership.lease import Lease

ANY_NUMBER = 1 << 31
# Batches waiting for workers take at most this much memory, if there are more than one a worker.
_WAITING_BYTES = 256 << 20


def portion(steps: int, batch_bytes: int, workers: int) -> int:
    """Mini-batches to begin with where a whole round of them would take too much memory."""
    if not batch_bytes:
        return steps
    return max(1, min(steps, _WAITING_BYTES // batch_bytes // (2 * workers)))


class Exchange(Protocol):
    """What is asked of an exchange rule (`tf_dsgd.algorithm.ExchangeRule`)."""

    @property
    def push_every(self) -> int: ...
    @property
    def fetch_every(self) -> int: ...
    @property
    def bounds_staleness(self) -> bool: ...
    @property
    def in_turn(self) -> bool: ...
    def since(self, steps: int) -> Any: ...
    def steps_to_event(self, step: int) -> int: ...
    def share(self, steps: int, left: int, workers: int) -> int: ...
    def push_due(self, step: int) -> bool: ...
    def fetch_due(self, step: int) -> bool: ...
    def may_join(self, worker: int, steps: int) -> bool: ...
    def may_start(self, clock: int, slowest: int) -> bool: ...


class Source(Protocol):
    """Where mini-batches are drawn from: the chief's queue, or pipelines on the workers.

    A worker draws what it takes in the same moment, so no mini-batch is taken that nobody holds.
    """

    @property
    def is_shared(self) -> bool:
        """Whether each worker has a part of it, with which others go on if need be."""

    def limit(self, worker: int, others: Sequence[int]) -> int:
        """Most mini-batches that the worker can take now, its own or the others'."""

    def draw(self, worker: int, steps: int, others: Sequence[int]) -> Any:
        """So many mini-batches, at most its limit, which the worker takes."""

    def apart(self, part: Any) -> list[Any]:
        """What was drawn, as parts of one mini-batch each."""

    def give_back(self, parts: list[Any]) -> None:
        """They are others' now."""


class What(enum.Enum):
    """What a worker does next."""

    ROUND = "compute mini-batches"
    SEND = "send what it has accrued"
    SEND_REFUSED = "send what another sent in its name, so that it is refused"
    COMPLETE = "complete a lost worker's lease"
    BACK_UP = "compute a straggler's lease, as a backup task"
    WAIT = "wait"
    END = "end"


class Next(NamedTuple):
    """What a worker does next, and on what."""

    what: What
    steps: int = 0
    lease: Lease | None = None
    until: float | None = None
    """When a worker that waits should look again, if nothing wakes it before."""


@dataclasses.dataclass(frozen=True)
class Loss:
    """What becomes of a lost worker's mini-batches."""

    count: int
    """How many go to others."""
    orphan: Lease | None
    """The lease that some shards have and others do not."""

    def words(self) -> str:
        """What is said of that."""
        what = "mini-batch goes" if self.count == 1 else "mini-batches go"
        again = ", its last message is completed for ps tasks that had not got it"
        return f"{self.count} unfinished {what} to others{'' if self.orphan is None else again}"
