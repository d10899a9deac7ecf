"""When a worker that waits for others computes a straggler's lease, too."""

from __future__ import annotations

from collections.abc import Sequence

from tf_dsgd.membership.lease import Lease
from tf_dsgd.membership.task import Task, TaskState


def backup_due(
    tasks: Sequence[Task], task: Task, least: float | None
) -> tuple[float, Lease] | None:
    """When a worker that waits runs a straggler's lease: that which was begun first.

    It has waited long enough then; and so would it have, had it begun together with that one. Long
    enough is as long as its own last message took, times the lease's messages, and never less than
    `least` seconds: then all of it costs at most twice the work of the slowest. None if it does not
    wait, or nobody straggles.
    """
    since = task.waits_since
    if since is None or least is None:
        return None
    straggling = [
        (lease.begun, other.index, lease)
        for other in tasks
        if other.state in (TaskState.IN_ROUND, TaskState.SILENT) and other is not task
        for lease in other.leases
        if lease.begun is not None and lease.runner is None
    ]
    if not straggling:
        return None
    begun, _, lease = min(straggling)
    took = task.took * lease.messages
    return max(since, begun + took) + max(least, took), lease
