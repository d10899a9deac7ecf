"""Messages between workers in several processes: who has which, which count, and in which order.

A worker leaves what it sends in its own mailbox, under a key; from there it goes to all others, by
a call for each. When everybody has it, and not before, it gets the next number, and counts. So who
takes in messages takes all that have a number, in that order, and waits for none; and a message
whose sender is lost before that counts nowhere: its mini-batches go to another worker. There are no
holes in the numbers, and nothing need be forwarded for a lost sender.

Whether a message counts is the ledger's word, as it is where there are servers (`Wire.count` of
`engine.post`); here it gets its place in the order. The chief keeps this, under its lock; what a
message says it never sees.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True)
class Due:
    """What a worker takes in now, and what it throws away."""

    messages: tuple[tuple[int, int], ...]
    """(key, number) of each message, in order."""
    thrown: tuple[int, ...]
    """Keys of those that never count."""
    version: int
    """The number of the last message that the worker has taken in after that."""


class Box:
    """One worker's mailbox.

    Args:
        incarnation: the worker's.
        entry: another number each time that anybody joins.
        taken: the number of the last message that is in its model.
    """

    def __init__(self, incarnation: int, entry: int, taken: int):
        self.incarnation = incarnation
        self.entry = entry
        self.taken = taken
        self.keys: set[int] = set()
        """Of all messages that are in it."""
        self.thrown: set[int] = set()
        """Those among them that never count."""
        self.is_full = False
        """Whether all that comes after the worker's model is there, or taken in."""
        self.has_begun = False
        """Whether the worker has that model."""


class Mailboxes:
    """The mailboxes of all workers that take part, and the order of what counts.

    Args:
        version: how many messages have counted before.
    """

    def __init__(self, version: int = 0):
        self.version = version
        self._boxes: dict[int, Box] = {}
        self._numbered: dict[int, int] = {}
        """number -> key, as far back as somebody has not taken it in."""
        self._under_way: dict[int, int] = {}
        """key -> sender."""
        self._last_key = self._last_entry = 0

    # -- who takes part ---------------------------------------------------------------------

    @property
    def workers(self) -> dict[int, int]:
        """Those that take part, and of which incarnation each is."""
        return {m: box.incarnation for m, box in self._boxes.items()}

    def begin_anew(self, version: int, workers: Mapping[int, int]) -> None:
        """At rest: these workers, with their incarnations, begin with what is read outside.

        That has `version` messages in it, which is all that have counted. From here on all is sent
        to each of them, also before it has begun.
        """
        self.version = version
        self._boxes.clear()
        self._numbered.clear()
        self._under_way.clear()
        for worker, incarnation in workers.items():
            self.joins(worker, incarnation, version)
            self._boxes[worker].is_full = True

    def joins(self, worker: int, incarnation: int, taken: int) -> None:
        """From here on all is sent to a worker; `taken` is what its model has, or will have."""
        self.leaves(worker)
        self._last_entry += 1
        self._boxes[worker] = Box(incarnation, self._last_entry, taken)

    def entry(self, worker: int) -> int:
        """By which a message that is sent to a worker is known to be for this mailbox of it."""
        return self._boxes[worker].entry

    def lacks(self, worker: int) -> list[int]:
        """Keys of what counts, comes after its model, and is not there: sent before it joined."""
        box = self._boxes[worker]
        keys = (self._numbered[number] for number in range(box.taken + 1, self.version + 1))
        return [key for key in keys if key not in box.keys]

    def is_whole(self, worker: int, incarnation: int) -> bool:
        """Whether a worker takes part, and has a model and all that comes after it."""
        return self.is_full(worker, incarnation) and self._boxes[worker].has_begun

    def is_full(self, worker: int, incarnation: int) -> bool:
        """Whether a worker takes part, and has all that comes after the model that it is to have.

        One that has not begun is to have what is read outside.
        """
        box = self._boxes.get(worker)
        return box is not None and box.incarnation == incarnation and box.is_full

    def has_begun(self, worker: int) -> bool:
        """Whether one that takes part has a model."""
        return self._boxes[worker].has_begun

    def begins(self, worker: int) -> None:
        """A worker has its model now, and all that comes after it."""
        missing = self.lacks(worker)
        if missing:
            raise RuntimeError(f"Worker {worker} lacks the messages of the keys {missing}.")
        self._boxes[worker].is_full = self._boxes[worker].has_begun = True

    def taken(self, worker: int) -> int:
        """The number of the last message that is in a worker's model."""
        return self._boxes[worker].taken

    def giver(self, worker: int) -> int | None:
        """From whom that one can have a model, and what comes after it.

        Who has taken in most, the first of them. If that one has not begun itself, the model is
        what is read outside.
        """
        full = [
            (not box.has_begun, -box.taken, m)
            for m, box in self._boxes.items()
            if box.is_full and m != worker
        ]
        return min(full)[2] if full else None

    def leaves(self, worker: int) -> None:
        """A worker is lost, or begins anew: what it sent and not all have never counts."""
        self._boxes.pop(worker, None)
        for key in [key for key, sender in self._under_way.items() if sender == worker]:
            self.discard(key)
        self._forget()

    # -- a message --------------------------------------------------------------------------

    def key(self) -> int:
        """A key that no message had."""
        self._last_key += 1
        return self._last_key

    def posted(self, worker: int, key: int) -> None:
        """A worker has left a message in its own mailbox."""
        self._boxes[worker].keys.add(key)
        self._under_way[key] = worker

    def missing(self, key: int) -> list[int]:
        """To whom a message has to be sent."""
        return [m for m, box in self._boxes.items() if key not in box.keys]

    def arrived(self, worker: int, entry: int, key: int) -> None:
        """A message is in a worker's mailbox, if that is still the same."""
        box = self._boxes.get(worker)
        if box is None or box.entry != entry:
            return
        box.keys.add(key)
        if key not in self._under_way and key not in self._numbered.values():
            box.thrown.add(key)

    def number(self, key: int) -> int:
        """All have a message: it gets the next number."""
        missing = self.missing(key)
        if missing or key not in self._under_way:
            raise RuntimeError(f"The message of key {key} gets no number; missing: {missing}.")
        del self._under_way[key]
        self.version += 1
        self._numbered[self.version] = key
        return self.version

    def discard(self, key: int) -> None:
        """A message never counts."""
        self._under_way.pop(key, None)
        for box in self._boxes.values():
            if key in box.keys:
                box.thrown.add(key)

    # -- taking in --------------------------------------------------------------------------

    def due(self, worker: int) -> Due:
        """What a worker takes in now: all that counts and is not in its model yet."""
        box = self._boxes[worker]
        numbers = range(box.taken + 1, self.version + 1)
        messages = tuple((self._numbered[number], number) for number in numbers)
        return Due(messages, tuple(sorted(box.thrown)), self.version)

    def took(self, worker: int, due: Due) -> None:
        """A worker has taken that in; it is in its mailbox no more."""
        box = self._boxes[worker]
        gone = {*(key for key, _ in due.messages), *due.thrown}
        box.keys -= gone
        box.thrown -= gone
        box.taken = due.version
        self._forget()

    def _forget(self) -> None:
        """The order of what all have taken in is of no use."""
        least = min((box.taken for box in self._boxes.values()), default=self.version)
        for number in [number for number in self._numbered if number <= least]:
            del self._numbered[number]
