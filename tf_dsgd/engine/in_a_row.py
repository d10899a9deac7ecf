"""Several rounds in one call, where each is of one mini-batch, and nothing needs the chief between.

A call costs the chief, the worker and each ps more than a small round. So a worker that fetches and
sends at each mini-batch may make several rounds in a call, one behind the other: each fetches anew,
and its message counts by itself. The chief learns of all of them at the end, and nobody else can be
told of what is between; so only where nobody waits for it.
"""

from __future__ import annotations

from typing import Protocol

from tf_dsgd.engine.work import Exchange
from tf_dsgd.membership.deadlines import ROW_SECONDS
from tf_dsgd.membership.task import Task

# Of a call of several, where a step has at most so many operations: of a larger one a call costs
# little beside it, and TensorFlow takes long to prepare several.
ROUNDS = 4
MOST_OPERATIONS = 1000
# As many mini-batches were handed out before workers are told of several rounds at once: each
# worker takes seconds to prepare a function of several, and saves a few milliseconds a round.
PAYS_AFTER = 1000


class Scheduler(Protocol):
    """What is asked of a scheduler."""

    exchange: Exchange
    rounds_a_call: int
    longest_call: int
    available: int
    draining: bool
    hurried: bool

    @property
    def present(self) -> list[Task]: ...
    def limit(self, task: Task) -> int: ...
    def portion(self, steps: int) -> int: ...


def number(scheduler: Scheduler) -> int:
    """Rounds that a call has, where it has several; 1 where the exchange rule allows no more.

    It is all or one: what makes several is traced with their number.
    """
    exchange = scheduler.exchange
    alone = exchange.push_every == exchange.fetch_every == 1
    waits = exchange.bounds_staleness or exchange.in_turn
    several = scheduler.rounds_a_call
    fits = several <= scheduler.longest_call and several == scheduler.portion(several)
    return several if alone and fits and not waits else 1


def messages(scheduler: Scheduler, task: Task) -> int:
    """How many rounds a worker makes in the call that is next: 1 as a rule, or several.

    Several only if it fetches first, and if its last message was quick, so that an interrupt is
    answered soon. 0 where it should wait, as there are not yet as many mini-batches: otherwise
    many workers, who are faster than these come, would take them one by one.
    """
    several = number(scheduler)
    if (
        several == 1
        or scheduler.hurried
        or not (task.fetch_next and task.clock)
        or task.leases
        or not _is_quick(task, several)
        or scheduler.limit(task) < several
    ):
        return 1
    exchange, step = scheduler.exchange, task.step
    for k in range(step, step + several):
        ends = exchange.push_due(k + 1) and exchange.fetch_due(k + 1)
        if not ends or exchange.steps_to_event(k) != 1:
            return 1
    if scheduler.draining:  # nothing more comes, and all should end together
        return several if scheduler.available >= several * len(scheduler.present) else 1
    return several if scheduler.available >= several else 0


def worth_waking(scheduler: Scheduler) -> int:
    """For how many mini-batches a worker that waits is woken."""
    several = number(scheduler)
    if several == 1 or all(_is_quick(task, several) for task in scheduler.present):
        return several
    return 1


def _is_quick(task: Task, several: int) -> bool:
    return task.took * several <= ROW_SECONDS
