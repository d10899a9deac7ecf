"""A schedule in NumPy and plain Python, from SimulatedCluster's documented timing alone."""

from __future__ import annotations

import heapq
import itertools


class Twin:
    """Subclass it with an algorithm's mathematics; `run` calls it in the schedule's order."""

    push_every = 1
    fetch_every = 1
    barrier = False
    """Whether all send before any begins its next round."""

    def fetch(self, worker): ...

    def step(self, worker, batch): ...

    def message(self, worker): ...

    def arrive(self, worker, message, staleness):
        """Returns whether the weights changed."""

    def flush(self):
        return False

    version = 0

    def run(self, num_workers, compute, network, batches):
        order = itertools.count()
        turns = [(0.0, next(order), m, None) for m in range(num_workers)]
        done = [0] * num_workers
        unsent = [0] * num_workers
        fetched_at = [self.version] * num_workers
        base = [0] * num_workers
        clocks = [0] * num_workers
        blocked, position = [], 0
        while turns:
            now, _, m, message = heapq.heappop(turns)
            if message is not None:
                clocks[m] += 1
                tensors, version = message
                self.version += bool(self.arrive(m, tensors, self.version - version))
                heapq.heappush(turns, (now, next(order), m, None))
                for b in sorted(blocked):
                    heapq.heappush(turns, (now, next(order), b, None))
                blocked = []
                continue
            left = len(batches) - position
            fetch_due = done[m] % self.fetch_every == 0
            if not left:
                if unsent[m]:
                    message = (self.message(m), base[m])
                    unsent[m] = 0
                    heapq.heappush(turns, (now + network[m], next(order), m, message))
                continue
            if self.barrier and clocks[m] > min(clocks):
                blocked.append(m)
                continue
            steps = min(
                self.push_every - done[m] % self.push_every,
                self.fetch_every - done[m] % self.fetch_every,
                left,
            )
            time = now
            if fetch_due:
                self.fetch(m)
                fetched_at[m] = self.version
                time += network[m]
            if not unsent[m]:
                base[m] = fetched_at[m]
            for _ in range(steps):
                self.step(m, batches[position])
                position += 1
                time += compute[m]
            done[m] += steps
            unsent[m] += steps
            if done[m] % self.push_every == 0:
                message = (self.message(m), base[m])
                unsent[m] = 0
                heapq.heappush(turns, (time + network[m], next(order), m, message))
            else:
                heapq.heappush(turns, (time, next(order), m, None))
        self.version += bool(self.flush())
