"""Which algorithms can be played: events, or a schedule, without a cluster."""

from __future__ import annotations

from tf_dsgd.algorithm import Algorithm
from tf_dsgd.algorithms.sandblaster import AddUp


def check_played(algorithm: Algorithm) -> None:
    """Of an algorithm that is more than what workers send and what shards do with it.

    Raises:
        ValueError: if it is.
    """
    what = None
    if algorithm.between_peers is not None:
        what = "whose workers send to one another"
    elif algorithm.local.shares_weights:
        what = "whose workers have no copies of the weights (Hogwild!)"
    elif isinstance(algorithm.server, AddUp):
        what = "whose weights a coordinator changes (Sandblaster)"
    if what is not None:
        raise ValueError(
            f"This plays what shards do with messages, and cannot play an algorithm {what}. Train "
            "it on a tf_dsgd.SimulatedCluster."
        )
