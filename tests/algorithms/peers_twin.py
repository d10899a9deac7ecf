"""Strom's peers in NumPy, each with a copy and a residual of its own, on a clock of their own.

A worker that begins at t has taken in what had arrived by then; it computes for C, and its message
is with all workers at t + C + L, when it begins again. What happens at one moment does so in the
order in which it was begun; a worker's next mini-batch begins after what was begun before.
"""

import heapq
import itertools

import numpy as np


class Peer:
    """A worker: its copy, the messages that it has taken in, its slots and its residual."""

    def __init__(self, weights, seconds, latency, optimizer):
        self.w = np.array(weights, np.float64)
        self.slot = np.zeros_like(self.w)
        self.residual = np.zeros_like(self.w)
        self.seconds, self.latency, self.optimizer = seconds, latency, optimizer
        self.read = 0

    def take_in(self, log):
        for sent in log[self.read :]:
            self.w = self.w + sent
        self.read = len(log)


def momentum(rate, m):
    """Keras's SGD: v <- m v - rate g; w <- w + v."""

    def change(peer, g):
        peer.slot = m * peer.slot - rate * g
        return peer.slot

    return change


def run(peers, gradient, batches, tau):
    """One pass over the mini-batches; gives the staleness of each message, in order."""
    log, queue, turns, staleness, order = [], list(batches), [], [], itertools.count()

    def begin(now, number):
        if not queue:
            return
        peer = peers[number]
        peer.take_in(log)
        peer.residual = peer.residual + peer.optimizer(peer, gradient(peer.w, queue.pop(0)))
        sent = np.where(np.abs(peer.residual) > tau, tau * np.sign(peer.residual), 0.0)
        peer.residual = peer.residual - sent
        arrives = now + peer.seconds + peer.latency
        heapq.heappush(turns, (arrives, next(order), number, sent, peer.read))

    for number in range(len(peers)):
        begin(0.0, number)
    while turns:
        now, _, number, sent, read = heapq.heappop(turns)
        if sent is None:
            begin(now, number)
            continue
        staleness.append(len(log) - read)
        log.append(sent)
        heapq.heappush(turns, (now, next(order), number, None, None))
    for peer in peers:
        peer.take_in(log)
    return staleness
