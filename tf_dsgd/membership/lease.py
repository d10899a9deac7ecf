"""A lease: the mini-batches of one message, from being drawn to being counted.

Or of several: where messages are of one mini-batch each, a worker may make some in one call.

It says in whose name they count (owner, incarnation, number), what they are, who computes them, and
whether they count yet. A lost worker, a message that came to some shards only, and a straggler with
a backup task are one thing: an open lease that another worker runs. This is what Sandblaster does
with the portions of stragglers (Dean et al., NIPS 2012, section 4.2), and MapReduce, too.

    open        its owner adds mini-batches to it, and computes them
    sent        collected: its message is on its way, and nothing is added
    shared      a backup task computes it, too: nothing is added, and shards take what comes first
    superseded  counted by the backup's message; the owner's own, still to come, will be refused
    orphaned    its owner is lost, and some shards have its message: another completes it
    counted     every shard has it
    returned    no shard has it, and none will: its mini-batches belong to others

All that a message stands for is fixed before another may send it, since nobody can know in time
whose came first: whoever sends under a number sends the mini-batches of the lease of that number.
"""

from __future__ import annotations

import enum
from typing import Any

from tf_dsgd.membership.states import Stateful


class LeaseState(enum.Enum):
    """Where a lease stands."""

    OPEN = "open"
    SENT = "sent"
    SHARED = "shared"
    SUPERSEDED = "superseded"
    ORPHANED = "orphaned"
    COUNTED = "counted"
    RETURNED = "returned"


_S = LeaseState
ALLOWED = {
    _S.OPEN: {_S.SENT, _S.SHARED, _S.COUNTED, _S.ORPHANED, _S.RETURNED},
    _S.SENT: {_S.SHARED, _S.COUNTED, _S.ORPHANED, _S.RETURNED},
    _S.SHARED: {_S.COUNTED, _S.SUPERSEDED, _S.ORPHANED, _S.RETURNED},
    _S.SUPERSEDED: {_S.COUNTED},
    _S.ORPHANED: {_S.COUNTED, _S.RETURNED},  # returned: an error has ended training
    _S.COUNTED: set(),
    _S.RETURNED: set(),
}
CLOSED = {_S.COUNTED, _S.RETURNED}


class Lease(Stateful[LeaseState]):
    """The mini-batches of one message, or of several that follow one another.

    Args:
        owner: the worker in whose name they count.
        incarnation: the owner's.
        number: the first message's, counted from 1 for each worker.
    """

    def __init__(self, owner: int, incarnation: int, number: int):
        super().__init__(LeaseState.OPEN, ALLOWED)
        self.owner = owner
        self.incarnation = incarnation
        self.number = number
        self.steps = 0
        """Mini-batches that were taken for it."""
        self.messages = 1
        """How many it stands for, numbered from `number` on; of one mini-batch each, if several."""
        self.parts: list[Any] = []
        """Those, in whatever form they are drawn."""
        self.message: Any = None
        """What was collected and waits on the owner, if it travels during the next round."""
        self.runner: int | None = None
        """Who completes it, or computes it as a backup task."""
        self.begun: float | None = None
        """When its owner began to compute."""

    @property
    def name(self) -> tuple[int, int, int]:
        """What its first message's header begins with: worker, incarnation, number."""
        return self.owner, self.incarnation, self.number

    @property
    def last(self) -> int:
        """The number of its last message."""
        return self.number + self.messages - 1

    def each(self) -> list[tuple[tuple[int, int, int], list[Any]]]:
        """Of each message its name and its parts, if there are several after `take_apart`."""
        if self.messages == 1:
            return [(self.name, list(self.parts))]
        owner, incarnation, first = self.name
        return [((owner, incarnation, first + k), [part]) for k, part in enumerate(self.parts)]

    def take_apart(self, source: Any) -> None:
        """From here on each part is one message's; `source` is where they were drawn."""
        if 1 < self.messages != len(self.parts):
            self.parts = source.apart(self.parts[0])

    def cut(self, messages: int) -> Lease:
        """What comes behind so many messages, as a lease of its own; `parts` are of one each."""
        rest = Lease(self.owner, self.incarnation, self.number + messages)
        rest.messages = rest.steps = self.messages - messages
        rest.parts = self.parts[messages:]
        self.messages = self.steps = messages
        self.parts = self.parts[:messages]
        return rest

    def has_ended(self) -> bool:
        """Whether it counts, or never will."""
        return self.state in CLOSED

    def __repr__(self) -> str:
        return (
            f"Lease {self.number} of worker {self.owner} (incarnation {self.incarnation}, "
            f"{self.state.value}, {self.steps} mini-batches, runner {self.runner})"
        )
