"""Downpour SGD in NumPy, from algorithm 1.1 of Dean et al. (2012), on a clock of its own.

A worker's step from time t, with network latency L and compute time C: a fetch reads the weights
as they are at t and takes L; computing takes C; a push takes L more, and when the shard has applied
it the worker's next step begins.
"""

import heapq

import numpy as np


class Server:
    """The shard: weights, a version, and one of three optimizers, as Keras writes them."""

    def __init__(self, weights, rate, rule="sgd"):
        self.w = np.array(weights, np.float64)
        self.rate, self.rule = rate, rule
        self.slot = np.full_like(self.w, 0.1 if rule == "adagrad" else 0.0)
        self.version = 0
        self.staleness = []

    def push(self, accrued, seen):
        self.staleness.append(self.version - seen)
        if self.rule == "sgd":
            self.w -= self.rate * accrued
        elif self.rule == "momentum":
            self.slot = 0.9 * self.slot - self.rate * accrued
            self.w += self.slot
        elif self.rule == "adagrad":
            self.slot += accrued**2
            self.w -= self.rate * accrued / np.sqrt(self.slot + 1e-7)
        self.version += 1


class Worker:
    """A replica: its copy of the weights, what it has accrued, its steps since the last drain."""

    def __init__(self, server, seconds, *, push_every, fetch_every, local_rate, network=0.0):
        self.server, self.seconds, self.network = server, seconds, network
        self.push_every, self.fetch_every, self.local_rate = push_every, fetch_every, local_rate
        self.steps = self.total = 0
        self.accrued = None

    def begin(self, gradient, batch):
        """Computes, and returns the seconds until `end`."""
        seconds = self.seconds
        if self.steps % self.fetch_every == 0:
            self.local, self.version = self.server.w.copy(), self.server.version
            seconds += self.network
        if (self.steps + 1) % self.push_every == 0:
            seconds += self.network
        if self.accrued is None:
            self.accrued, self.seen = np.zeros_like(self.local), self.version
        g = gradient(self.local, batch)
        self.accrued += g
        self.local -= self.local_rate * g
        return seconds

    def end(self):
        self.steps += 1
        self.total += 1
        if self.steps % self.push_every == 0:
            self.push()

    def push(self):
        if self.accrued is not None:
            self.server.push(self.accrued, self.seen)
        self.accrued = None


def run(server, workers, gradient, epochs):
    """Hands the batches of each epoch to whichever worker is free first; drains at its end."""
    now = 0.0
    for batches in epochs:
        queue = list(batches)
        ends = []
        for number, worker in enumerate(workers):
            _start(worker, number, now, queue, gradient, ends)
        while ends:
            now, number = heapq.heappop(ends)
            workers[number].end()
            _start(workers[number], number, now, queue, gradient, ends)
        for worker in workers:
            worker.push()
            worker.steps = 0


def _start(worker, number, now, queue, gradient, ends):
    if queue:
        heapq.heappush(ends, (now + worker.begin(gradient, queue.pop(0)), number))
