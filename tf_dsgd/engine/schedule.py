"""A schedule: who fetched, stepped and pushed, in order; checked, recorded, and played.

An entry is `(worker, action)` or `(worker, action, what)`:

    (m, "fetch")            worker m fetches
    (m, "fetch", version)   and the shard must be at that version
    (m, "step", (3, 4))     it computes gradients on the mini-batches 3 and 4
    (m, "push", (3, 4))     the same, and sends what is accrued
    (m, "push", ())         it only sends
    (m, "step"), (m, "push")  on the next mini-batch that no earlier entry named
    (m, "flush")            the shard uses what its rule has collected so far

Mini-batches are numbered from 0 in the order in which they are handed out. The order of the entries
is that in which the shard answers. A step may stand anywhere between its worker's fetch and push:
nobody else sees it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tf_dsgd import checks

ACTIONS = ("fetch", "step", "push", "flush")


class Entry(NamedTuple):
    """One entry, with its mini-batches named."""

    worker: int
    action: str
    batches: tuple[int, ...] = ()
    version: int | None = None


def checked(schedule: Iterable[Any], num_workers: int) -> list[Entry]:
    """The entries of a caller's schedule.

    Raises:
        ValueError: naming the entry.
    """
    entries: list[Entry] = []
    used: dict[int, int] = {}
    following = 0
    for place, given in enumerate(checks.entries("schedule", schedule, "a sequence of entries")):
        where = f"schedule[{place}]"
        worker, action, what = action_of(where, given, num_workers)
        if action in ("fetch", "flush"):
            version = None if what is None else _number(where, given, what)
            entries.append(Entry(worker, action, (), version))
            continue
        if what is None:
            while following in used:
                following += 1
            what = (following,)
        if isinstance(what, (str, bytes)) or not isinstance(what, Sequence):
            raise ValueError(
                f"{where} must name its mini-batches by a sequence of numbers, () for none. "
                f"Received: {given!r}."
            )
        batches = tuple(_number(where, given, b) for b in what)
        for batch in batches:
            if batch in used:
                raise ValueError(
                    f"{where} uses mini-batch {batch}, as schedule[{used[batch]}] does; each is "
                    f"used once. Received: {given!r}."
                )
            used[batch] = place
        entries.append(Entry(worker, action, batches))
    return entries


def action_of(where: str, given: Any, num_workers: int | None) -> tuple[int, str, Any]:
    """(worker, action, what) of an entry; `what` is None where it was left out."""
    if (
        not isinstance(given, (tuple, list))
        or len(given) not in (2, 3)
        or not isinstance(given[1], str)
        or given[1] not in ACTIONS
    ):
        raise ValueError(
            f"{where} must be (worker, action) or (worker, action, what), with an action of "
            f"{', '.join(map(repr, ACTIONS))}. Received: {given!r}."
        )
    worker = _number(where, given, given[0])
    if num_workers is not None and worker >= num_workers:
        raise ValueError(
            f"{where} is of worker {worker}, and there are {num_workers}, from 0 to "
            f"{num_workers - 1}. Received: {given!r}."
        )
    return worker, given[1], given[2] if len(given) == 3 else None


def _number(where: str, given: Any, value: Any) -> int:
    found = checks.whole(value)
    if found is None or not 0 <= found < 1 << 31:
        raise ValueError(
            f"{where} has {value!r} where an integer of at least 0, below 2**31, is expected. "
            f"Received: {given!r}."
        )
    return found


class BatchQueues:
    """A queue of mini-batches for each worker, so that it is known who gets which."""

    def __init__(self, num_workers: int):
        self._queues: list[Any] = [None] * num_workers

    def of(self, worker: int) -> tf.Tensor:
        """A worker's queue."""
        if self._queues[worker] is None:
            self._queues[worker] = tf.queue.FIFOQueue(1 << 30, [tf.variant], shapes=[[]])
        return self._queues[worker].queue_ref

    def put(self, worker: int, batch: Any) -> None:
        """Gives a worker a mini-batch."""
        optional = tf.experimental.Optional.from_value(batch)
        tf.raw_ops.QueueEnqueueV2(
            handle=self.of(worker), components=tf.nest.flatten(optional, expand_composites=True)
        )

    def move(self, source: tf.Tensor, worker: int) -> None:
        """Takes the next mini-batch of `source` for a worker."""
        batch = tf.raw_ops.QueueDequeueV2(handle=source, component_types=[tf.variant])
        tf.raw_ops.QueueEnqueueV2(handle=self.of(worker), components=batch)


class Recorder:
    """Takes down what workers do, in the order in which the shard answers.

    Mini-batches reach the workers by queues of their own, since of two workers that take from one
    queue nobody knows who got which.
    """

    def __init__(self, num_workers: int):
        self.entries: list[tuple[Any, ...]] = []
        self.queues = BatchQueues(num_workers)
        self.first_batch: int | None = None
        """Where a schedule is played: the first mini-batch that was recorded."""
        self._next = 0
        self._taken: list[list[int]] = [[] for _ in range(num_workers)]
        self._mutex = threading.Lock()

    def take(self, worker: int, steps: int, source: tf.Tensor) -> None:
        """The worker takes the next mini-batches."""
        with self._mutex:
            for _ in range(steps):
                self.queues.move(source, worker)
                self._taken[worker].append(self._next)
                self._next += 1

    def stepped(self, worker: int, steps: int) -> None:
        """The worker has used the first mini-batches of those that it took."""
        taken = self._taken[worker]
        self.entries.append((worker, "step", tuple(taken[:steps])))
        del taken[:steps]

    def note(self, worker: int, action: str, version: Any = None) -> None:
        """A fetch, a push or a flush; called inside the shard's lock."""
        if action == "fetch":
            self.entries.append((worker, action, int(version)))
        elif action == "push":
            self.entries.append((worker, action, ()))
        else:
            self.entries.append((worker, action))
