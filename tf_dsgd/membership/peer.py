"""What TensorFlow knows of a worker task: one peer for each, whichever strategies use it.

stranger    TensorFlow does not have it in its cluster
member      it has, and has told it of all functions
left out    it has, but it was lost since: it may not know all functions
left        TensorFlow let go of it, so that it can join as a new one, a moment later
"""

from __future__ import annotations

import enum

from tf_dsgd.membership import deadlines
from tf_dsgd.membership.states import Stateful


class PeerState(enum.Enum):
    """What TensorFlow knows of a task."""

    STRANGER = "stranger"
    MEMBER = "member"
    LEFT_OUT = "left out"
    LEFT = "left"


_S = PeerState
ALLOWED = {
    _S.STRANGER: {_S.MEMBER},
    _S.MEMBER: {_S.LEFT_OUT, _S.STRANGER},
    _S.LEFT_OUT: {_S.MEMBER, _S.STRANGER, _S.LEFT},
    _S.LEFT: {_S.MEMBER},
}


class Peer(Stateful[PeerState]):
    """A worker task, as TensorFlow knows it.

    Args:
        index: the task's index in the cluster.
        address: where it is.
    """

    def __init__(self, index: int, address: str):
        super().__init__(PeerState.STRANGER, ALLOWED)
        self.index = index
        self.address = address
        self._left = 0.0
        self._stays = 0.0

    @property
    def is_known(self) -> bool:
        """Whether TensorFlow's cluster has it."""
        return self.state in (PeerState.MEMBER, PeerState.LEFT_OUT)

    def leave_out(self, *, joining: bool = False) -> None:
        """It was lost, or failed as it joined (`joining`)."""
        if self.state is PeerState.MEMBER:
            self.become(PeerState.LEFT_OUT)
        if not joining:
            self._stays = 0.0

    def forget(self) -> None:
        """TensorFlow let go of it as another joined, since it did not answer."""
        if self.is_known:
            self.become(PeerState.STRANGER)

    def leave(self) -> None:
        """It leaves to join anew; from now on TensorFlow does not have it, also if that fails."""
        self.become(PeerState.LEFT)

    def has_left(self, now: float) -> None:
        """It stays away for a moment, twice as long each time that it fails to join."""
        self._left = now
        self._stays = min(max(2 * self._stays, deadlines.LEFT_SECONDS), deadlines.MOST_LEFT_SECONDS)

    def stays_away(self, now: float) -> bool:
        """Whether that moment is not over."""
        return now - self._left < self._stays

    def __repr__(self) -> str:
        return f"Worker task {self.index} at {self.address} ({self.state.value})"
