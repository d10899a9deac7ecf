"""A virtual clock: workers' turns and other events, in the order of their time.

Turns at one instant run in the order in which they were put on the clock, and events before turns.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

from tf_dsgd.membership.lease import Lease
from tf_dsgd.membership.task import Task


class Turn(NamedTuple):
    """A worker begins a round, or what it has sent arrives."""

    time: float
    order: int  # no two have the same, so that comparing goes no further
    task: Task
    lease: Lease | None = None
    """What is about to arrive; None where the worker is about to begin a round."""
    message: Any = None


class Event(NamedTuple):
    """Something else happens."""

    time: float
    order: int  # as that of turns
    happens: Callable[[], None]


class VirtualClock:
    """Time, and what is still to happen."""

    def __init__(self) -> None:
        self.now = 0.0
        """Virtual seconds since the strategy was made."""
        self.turns: list[Turn] = []
        self.events: list[Event] = []
        self._held: list[Turn] = []
        self._order = itertools.count()

    def put(self, time: float, task: Task, lease: Lease | None = None, message: Any = None) -> None:
        """A worker's turn, or the arrival of what it has sent."""
        heapq.heappush(self.turns, Turn(time, next(self._order), task, lease, message))

    def hold(self, turn: Turn) -> None:
        """What has arrived waits until `release`."""
        self._held.append(turn)

    def release(self) -> None:
        """What was held arrives now, once more."""
        held, self._held = self._held, []
        for turn in held:
            self.put(self.now, turn.task, turn.lease, turn.message)

    def under_way(self) -> list[Turn]:
        """All turns in their order, those that were held at this instant."""
        self.release()
        return sorted(self.turns)

    def after(self, seconds: float, happens: Callable[[], None]) -> None:
        """Something happens so many seconds from now."""
        heapq.heappush(self.events, Event(self.now + seconds, next(self._order), happens))

    def is_event_next(self) -> bool:
        """Whether an event comes before the next turn."""
        return bool(self.events) and (not self.turns or self.events[0].time <= self.turns[0].time)

    def take_turn(self) -> Turn:
        """It is the next turn's time."""
        turn = heapq.heappop(self.turns)
        self.now = turn.time
        return turn

    def take_event(self) -> None:
        """The next event happens."""
        event = heapq.heappop(self.events)
        self.now = max(self.now, event.time)
        event.happens()

    def delay(self, task: Task, seconds: float) -> None:
        """All that a worker is about to do comes later."""
        self.turns = [
            turn._replace(time=turn.time + seconds) if turn.task is task else turn
            for turn in self.turns
        ]
        heapq.heapify(self.turns)

    def drop(self, task: Task) -> list[Any]:
        """Nothing that a worker was about to do happens; gives its messages on their way."""
        self.release()
        dropped = [turn.message for turn in self.turns if turn.task is task]
        self.turns = [turn for turn in self.turns if turn.task is not task]
        heapq.heapify(self.turns)
        return [message for message in dropped if message is not None]
