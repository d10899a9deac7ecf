"""Several rounds in one call, where each is of one mini-batch, and nothing needs the chief between.

A call costs the chief, the worker and each ps more than a small round. So a worker that fetches and
sends at each mini-batch may make several rounds in a call, one behind the other: each fetches anew,
and its message counts by itself. The chief learns of all of them at the end, and nobody else can be
told of what is between; so only where nobody waits for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tf_dsgd.membership.deadlines import ROW_SECONDS
from tf_dsgd.membership.task import Task

if TYPE_CHECKING:
    from tf_dsgd.engine.scheduler import Scheduler


def most(scheduler: Scheduler) -> int:
    """Rounds that a call may have at most, by the exchange rule."""
    exchange = scheduler.exchange
    alone = exchange.push_every == exchange.fetch_every == 1
    if not alone or exchange.bounds_staleness or exchange.in_turn:
        return 1
    return min(scheduler.rounds_a_call, scheduler.longest_call)


def messages(scheduler: Scheduler, task: Task) -> int:
    """How many rounds a worker makes in the call that is next; 1 as a rule.

    Several only if there are as many mini-batches for each worker, so that all end together; if it
    fetches first; and if its last message was quick, so that an interrupt is answered soon.
    """
    number = most(scheduler)
    if (
        number == 1
        or scheduler.draining
        or scheduler.hurried
        or scheduler.available < number * len(scheduler.present)
        or task.leases
        or not (task.fetch_next and task.clock)
        or task.took * number > ROW_SECONDS
        or scheduler.limit(task) < number
    ):
        return 1
    exchange, step = scheduler.exchange, task.step
    for k in range(step, step + number):
        ends = exchange.push_due(k + 1) and exchange.fetch_due(k + 1)
        if not ends or exchange.steps_to_event(k) != 1:
            return 1
    return number
