"""A fixed turn: workers take mini-batches in order, 0, 1, .., n - 1, 0, and send in that order.

So mini-batch k is worker k mod n's, and updates come in the order of the mini-batches. Of two
workers that one comes first which has done less since the last drain, and of equals the one with
the lower number. Only those count that have, or may get, work: whoever is lost, or finds no
mini-batch left at a drain, is passed over, and nobody waits for it.

Somebody can always go on. Of those that count, take the first one to send. If it has mini-batches,
it computes them and sends. If it has none, it has taken no more than any other, and takes next.
"""

from __future__ import annotations

from collections.abc import Iterable

from tf_dsgd.membership.task import Task


def takes_next(task: Task, others: Iterable[Task]) -> bool:
    """Whether the next mini-batch is this worker's; `others` have, or may get, work."""
    mine = task.step, task.index
    return all(mine < (other.step, other.index) for other in others)


def sends_next(task: Task, others: Iterable[Task]) -> bool:
    """Whether the next message is this worker's; `others` have, or may get, work."""
    mine = task.clock, task.index
    return all(mine < (other.clock, other.index) for other in others)
