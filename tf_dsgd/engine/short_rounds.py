"""Who makes a short round, for which the main thread waits, as at the beginning of an epoch.

What such a round calls is used for nothing else, and takes each worker a second to prepare. So it
is always the same worker's, while that one can.
"""

from __future__ import annotations

from typing import Protocol

from tf_dsgd.membership.task import Task, TaskState


class Scheduler(Protocol):
    """What is asked of a scheduler."""

    last_short_round: Task | None

    def may_begin(self, task: Task) -> bool: ...
    def limit(self, task: Task) -> int: ...


def makes(scheduler: Scheduler, task: Task) -> bool:
    """Whether a worker makes the round: the last that did, or any if that one cannot now."""
    last = scheduler.last_short_round
    if last is None or last is task or last.state is not TaskState.IDLE or last.leases:
        return True
    return not (scheduler.may_begin(last) and scheduler.limit(last))
