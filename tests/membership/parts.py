"""Rules, shards, processes and sources of mini-batches, each a few numbers."""

import dataclasses
from collections import Counter, deque


class Gone(Exception):
    """A call to a worker failed: its process is gone, or counts as gone."""


@dataclasses.dataclass
class Rule:
    """An exchange rule: periods, how far a worker may be ahead, whether workers end together."""

    push_every: int = 1
    fetch_every: int = 1
    bound: int | None = None
    warm_start: int = 0
    in_turn: bool = False
    end_together: bool = False

    @property
    def bounds_staleness(self):
        return self.bound is not None

    def since(self, steps):
        return self

    def steps_to_event(self, step):
        return min(
            self.push_every - step % self.push_every, self.fetch_every - step % self.fetch_every
        )

    def share(self, steps, left, workers):
        return min(steps, -(-left // workers)) if self.end_together else steps

    def push_due(self, step):
        return step % self.push_every == 0

    def fetch_due(self, step):
        return step % self.fetch_every == 0

    def may_join(self, worker, steps):
        return worker == 0 or steps >= self.warm_start

    def may_start(self, clock, slowest):
        return self.bound is None or clock - slowest <= self.bound


class Shard:
    """Takes each message of the latest incarnation once, whole."""

    def __init__(self, workers):
        self.incarnations = [0] * workers
        self.last = [0] * workers
        self.applied = [0] * workers
        self.counts = Counter()
        self.messages = {}

    def receive(self, name, ids):
        worker, incarnation, number = name
        if incarnation != self.incarnations[worker] or number <= self.last[worker]:
            return
        self.last[worker] = number
        self.applied[worker] += 1
        self.counts.update(ids)
        self.messages[worker, number] = tuple(ids)

    def fence(self, worker, incarnation):
        self.incarnations[worker] = max(self.incarnations[worker], incarnation)
        return self.last[worker]


class Process:
    """A worker's process: what it has accrued, and its numbers."""

    def __init__(self, worker, incarnation, sequence):
        self.worker, self.incarnation, self.sequence = worker, incarnation, sequence
        self.accrued = []
        self.alive, self.stopped, self.cut = True, False, False

    def collect(self):
        ids, self.accrued = self.accrued, []
        self.sequence += 1
        return (self.worker, self.incarnation, self.sequence), ids


class Queue:
    """The chief's queue; what lost workers had drawn comes first."""

    is_shared = False

    def __init__(self):
        self.ids, self.returned = deque(), deque()

    def limit(self, worker, others):
        return 1 << 31

    def draw(self, worker, steps, others):
        return [(self.returned or self.ids).popleft() for _ in range(steps)]

    def apart(self, part):
        return [[one] for one in part]

    def give_back(self, parts):
        self.returned.extend(i for part in parts for i in part)


class Pipelines:
    """Mini-batches that workers draw by themselves, a list for each; others' once one is lost."""

    is_shared = True

    def __init__(self, sizes):
        first = 0
        self.own = []
        for size in sizes:
            self.own.append(deque(range(first, first + size)))
            first += size
        self.returned = deque()

    def _upcoming(self, worker, others):
        for p in [worker, -1, *others]:
            ids = self.returned if p < 0 else self.own[p]
            if ids:
                return ids
        return ()

    def limit(self, worker, others):
        return len(self._upcoming(worker, others))

    def draw(self, worker, steps, others):
        ids = self._upcoming(worker, others)
        assert steps <= len(ids)
        return [ids.popleft() for _ in range(steps)]

    def apart(self, part):
        return [[one] for one in part]

    def give_back(self, parts):
        self.returned.extend(i for part in parts for i in part)
