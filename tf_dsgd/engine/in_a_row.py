"""Several rounds in one call, where each is of one mini-batch, and nothing needs the chief between.

A call costs the chief, the worker and each ps more than a small round. So a worker that fetches and
sends at each mini-batch may make several rounds in a call, one behind the other: each fetches anew,
and its message counts by itself. The chief learns of all of them at the end, and nobody else can be
told of what is between; so only where nobody waits for it.
"""

from __future__ import annotations

import math
from typing import Protocol

from tf_dsgd.engine.work import Exchange
from tf_dsgd.membership.deadlines import FAST_SECONDS, ROW_SECONDS
from tf_dsgd.membership.task import Task

# Of a call of several, where a step has at most so many operations: of a larger one a call costs
# little beside it, and TensorFlow takes long to prepare several.
ROUNDS = 4
MOST_OPERATIONS = 1000
# As many mini-batches were handed out before workers are told of several rounds at once: each
# worker takes seconds to prepare a function of several, and saves a few milliseconds a round. One
# that came back sends as many messages first: for each that prepares it, TensorFlow leaves some MB
# in the chief's and the shards' processes for good.
PAYS_AFTER = 1000


class Arrivals:
    """How mini-batches come to be handed out: only for those that come fast it pays to wait."""

    def __init__(self) -> None:
        self.last = -math.inf
        """When the last one came."""
        self.are_fast = False

    def came(self, now: float) -> None:
        """One more is there."""
        self.are_fast = now - self.last < FAST_SECONDS
        self.last = now

    def look(self, now: float) -> None:
        """Somebody looks for one."""
        self.are_fast = self.are_fast and now - self.last < FAST_SECONDS


class Scheduler(Protocol):
    """What is asked of a scheduler."""

    exchange: Exchange
    rounds_a_call: int
    longest_call: int
    available: int
    draining: bool
    wants_short_round: bool
    arrivals: Arrivals
    tasks: list[Task]

    @property
    def present(self) -> list[Task]: ...
    def limit(self, task: Task) -> int: ...
    def portion(self, steps: int) -> int: ...


def suits(exchange: Exchange) -> bool:
    """Whether an exchange rule allows several rounds in a call."""
    alone = exchange.push_every == exchange.fetch_every == 1
    return alone and not (exchange.bounds_staleness or exchange.in_turn)


def number(scheduler: Scheduler) -> int:
    """Rounds that a call has, where it has several; 1 where it may not, or has no room for them.

    It is all or one: what makes several is traced with their number.
    """
    several = scheduler.rounds_a_call
    fits = several <= min(scheduler.longest_call, room(scheduler, several))
    return several if fits and suits(scheduler.exchange) else 1


def room(scheduler: Scheduler, steps: int) -> int:
    """How many mini-batches may wait where workers begin with so many."""
    return 2 * len(scheduler.tasks) * scheduler.portion(steps)


def messages(scheduler: Scheduler, task: Task) -> int:
    """How many rounds a worker makes in the call that is next: 1 as a rule, or several.

    Several only if it fetches first, and if its last message was quick, so that an interrupt is
    answered soon. 0 where it should wait a moment for as many mini-batches: many workers are
    faster than these come, and would take them one by one.
    """
    several = number(scheduler)
    if (
        several == 1
        or scheduler.wants_short_round
        or not _may_make(task, several)
        or not task.fetch_next
        or task.leases
        or scheduler.limit(task) < several
    ):
        return 1
    exchange, step = scheduler.exchange, task.step
    for k in range(step, step + several):
        ends = exchange.push_due(k + 1) and exchange.fetch_due(k + 1)
        if not ends or exchange.steps_to_event(k) != 1:
            return 1
    if scheduler.arrivals.are_fast and not scheduler.draining:
        return several if scheduler.available >= several else 0
    # Nothing more comes soon, and all should end together.
    others = scheduler.present
    even = task.took <= 2 * min(other.took for other in others)
    return several if even and scheduler.available >= several * len(others) else 1


def _may_make(task: Task, several: int) -> bool:
    """Whether it is known to be quick, and to stay."""
    is_quick = task.clock > 0 and task.took * several <= ROW_SECONDS
    return is_quick and task.number >= task.several_from


def until(scheduler: Scheduler) -> float | None:
    """When a worker that waits does so no longer for a call of several."""
    waits = scheduler.available and scheduler.arrivals.are_fast and number(scheduler) > 1
    return scheduler.arrivals.last + FAST_SECONDS if waits else None


def wakes(scheduler: Scheduler) -> bool:
    """Whether a worker that waits is woken for the mini-batch that has come now."""
    several = number(scheduler)
    if several == 1 or not scheduler.arrivals.are_fast:
        return True
    if scheduler.available == 1 or scheduler.available % several == 0:  # it takes note, or begins
        return True
    return not all(_may_make(task, several) for task in scheduler.present)


def is_left(scheduler: Scheduler) -> bool:
    """After a worker took some: whether another is woken for what is there, as nobody else will."""
    return number(scheduler) > 1 and scheduler.available > 0 and not scheduler.arrivals.are_fast
