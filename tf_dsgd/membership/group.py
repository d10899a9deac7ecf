"""The processes of one worker: one, or as many as its replica has parts.

A worker is there if all of them are, and lost as soon as one is. So they join together: whoever has
a part of a function of several processes knows where the other parts were.
"""

from __future__ import annotations

from collections.abc import Sequence

from tf_dsgd.membership.peer import Peer, PeerState


class Group:
    """A worker, as TensorFlow knows its processes.

    Args:
        peers: its processes, in the order of its parts; calls go to the first.
    """

    def __init__(self, peers: Sequence[Peer]):
        self.peers = tuple(peers)
        self.addresses = tuple(peer.address for peer in peers)

    @property
    def is_member(self) -> bool:
        """Whether TensorFlow has all of it, and has told all of it of all functions."""
        return all(peer.state is PeerState.MEMBER for peer in self.peers)

    @property
    def is_known(self) -> bool:
        """Whether TensorFlow's cluster has all of it."""
        return all(peer.is_known for peer in self.peers)

    @property
    def known(self) -> list[Peer]:
        """Those that TensorFlow's cluster has."""
        return [peer for peer in self.peers if peer.is_known]

    def enter(self) -> None:
        """TensorFlow is about to have all of it as members."""
        for peer in self.peers:
            if peer.state is not PeerState.MEMBER:
                peer.become(PeerState.MEMBER)

    def leave_out(self, *, joining: bool = False) -> None:
        """It was lost, or failed as it joined (`joining`)."""
        for peer in self.peers:
            peer.leave_out(joining=joining)

    def stays_away(self, now: float) -> bool:
        """Whether one of it left a moment ago."""
        return any(peer.stays_away(now) for peer in self.peers)

    def __repr__(self) -> str:
        return f"Group{self.peers!r}"
