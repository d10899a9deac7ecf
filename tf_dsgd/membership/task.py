"""A task: one worker of a cluster, where it stands, and what it has under way.

idle       between two calls
in a round a call to it is under way, for which others may have to wait
silent     it has not answered for long: calls to it were ended, and it takes no more work
lost       its process is gone, or counts as gone; its shards take nothing more from it
refused    it is there, and may not join: it runs another version of the package
joining    it is there again, and its variables are made; what it had left open is its own
"""

from __future__ import annotations

import enum

from tf_dsgd.membership.lease import Lease, LeaseState
from tf_dsgd.membership.states import Stateful


class TaskState(enum.Enum):
    """Where a task stands."""

    IDLE = "idle"
    IN_ROUND = "in a round"
    SILENT = "silent"
    LOST = "lost"
    REFUSED = "refused"
    JOINING = "joining"


_S = TaskState
ALLOWED = {
    _S.IDLE: {_S.IN_ROUND, _S.SILENT, _S.LOST},
    _S.IN_ROUND: {_S.IDLE, _S.SILENT, _S.LOST},
    _S.SILENT: {_S.LOST},
    _S.LOST: {_S.JOINING, _S.REFUSED},
    _S.REFUSED: {_S.LOST},
    _S.JOINING: {_S.IDLE, _S.LOST},
}
PRESENT = (_S.IDLE, _S.IN_ROUND, _S.SILENT)
ABSENT = {_S.LOST, _S.REFUSED, _S.JOINING}


class Task(Stateful[TaskState]):
    """One worker, as whoever hands out its work sees it.

    Args:
        index: its number, from 0.
        now: seconds, by any clock.
        here: whether it is there.
    """

    def __init__(self, index: int, now: float = 0.0, *, here: bool = True):
        super().__init__(TaskState.IDLE if here else TaskState.LOST, ALLOWED)
        self.index = index
        self.since = now
        """Since when it has been lost, if it is."""
        self.incarnation = 0
        """Counts how often it was lost: shards take messages of the latest one alone."""
        self.number = 0
        """Of its last message that is known to count, or will never come."""
        self.several_from = 0
        """The number of its messages from which on a call to it may have several rounds."""
        self.step = 0
        """Mini-batches done since the last drain."""
        self.clock = 0
        """Messages sent since the last drain."""
        self.fetch_next = True
        self.open: Lease | None = None
        """What it computes, and adds to."""
        self.sent: Lease | None = None
        """What it has collected, and shards may not have yet."""
        self.running: Lease | None = None
        """Another's lease that it completes, or computes as a backup task."""
        self.owes: Lease | None = None
        """A lease of its own that was counted by another's message: its own will be refused."""
        self.took = 0.0
        """How long its last message took."""
        self.waits_since: float | None = None
        """Since when it has waited for others."""
        self.read_since: float | None = None
        """Since when what it has to show is read, by a call that nobody needs."""
        self.read_is_slow = False
        """Whether that takes so long that nobody waits for it."""
        self.lacked_function = False
        """Whether it was lost for a function that it did not know, and did no round since."""

    @property
    def is_present(self) -> bool:
        """Whether it takes part."""
        return self._state in PRESENT

    @property
    def leases(self) -> list[Lease]:
        """Its own, whose gradients no shard is known to have; the older first."""
        return [lease for lease in (self.sent, self.open) if lease is not None]

    @property
    def unsent(self) -> int:
        """Mini-batches of those."""
        return sum(lease.steps for lease in self.leases)

    @property
    def is_shared(self) -> bool:
        """Whether it may not add to its lease, as another may have sent it, or will."""
        return self.owes is not None or any(
            lease.state is LeaseState.SHARED for lease in self.leases
        )

    def forget_round(self) -> None:
        """It was lost: what it had begun is nobody's; how many messages it sent stays."""
        self.step, self.fetch_next = 0, True
        self.waits_since = self.read_since = None
        self.read_is_slow = False

    def rest(self) -> None:
        """At a drain: periods begin anew, and the next round with a fetch."""
        self.step = self.clock = 0
        self.fetch_next = True

    def __repr__(self) -> str:
        return f"Task {self.index} ({self.state.value}, incarnation {self.incarnation})"
