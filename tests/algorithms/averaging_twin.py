"""Periodic averaging in NumPy, from the papers' equations, with Keras's optimizers by hand."""

import numpy as np

from tests.contract.clockwork import Twin
from tests.contract.linear import gradient


class Local:
    """One worker's optimizer: its step and its state."""

    def __init__(self, name, rate, shape):
        self.name, self.rate = name, rate
        self.shape = shape
        self.reset()

    def reset(self):
        first = 0.1 if self.name == "adagrad" else 0.0
        self.state = [np.full(self.shape, first), np.zeros(self.shape)]
        self.steps = 0

    def change(self, g):
        self.steps += 1
        m, v = self.state
        if self.name == "sgd":
            return -self.rate * g
        if self.name == "momentum":
            self.state[0] = 0.9 * m - self.rate * g
            return self.state[0]
        if self.name == "adagrad":
            self.state[0] = m + g**2
            return -self.rate * g / np.sqrt(self.state[0] + 1e-7)
        self.state = [0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g**2]
        m, v = self.state
        bias = np.sqrt(1 - 0.999**self.steps) / (1 - 0.9**self.steps)
        return -self.rate * bias * m / (np.sqrt(v) + 1e-7)


class Averaging(Twin):
    """Local optimizers, and the mean by mini-batches every `every` steps.

    `outer` takes (W_g, mean) and gives the weights that workers go on with.
    """

    barrier = True

    def __init__(self, start, num_workers, every, optimizer, rate, policy, outer=None):
        self.push_every = self.fetch_every = every
        self.w = start.astype("float64")
        self.policy = policy
        self.outer = outer or (lambda w, mean: mean)
        self.local = [self.w.copy() for _ in range(num_workers)]
        self.optimizers = [Local(optimizer, rate, start.shape) for _ in range(num_workers)]
        self.state = [s.copy() for s in self.optimizers[0].state]
        self.count = [0] * num_workers
        self.collected = []
        self.done = 0

    def fetch(self, m):
        if any(k == m for k, *_ in self.collected):
            self.version += self.flush()
        self.local[m] = self.w.copy()
        if self.policy == "reset":
            self.optimizers[m].reset()
        if self.policy == "average":
            self.optimizers[m].state = [s.copy() for s in self.state]
            self.optimizers[m].steps = self.done // len(self.local)

    def step(self, m, batch):
        self.local[m] = self.local[m] + self.optimizers[m].change(gradient(self.local[m], batch))
        self.count[m] += 1

    def message(self, m):
        count, self.count[m] = self.count[m], 0
        return self.local[m].copy(), [s.copy() for s in self.optimizers[m].state], count

    def arrive(self, worker, message, staleness):
        assert staleness == 0
        self.collected.append((worker, *message))
        return False

    def flush(self):
        if not self.collected:
            return False
        counts = [n for *_, n in self.collected]
        mean = np.average([w for _, w, _, _ in self.collected], axis=0, weights=counts)
        self.w = self.outer(self.w, mean)
        self.state = [
            np.average([s[i] for _, _, s, _ in self.collected], axis=0, weights=counts)
            for i in range(2)
        ]
        self.done += sum(counts)
        self.collected = []
        return True


class BlockMomentum:
    """BMUF as the paper has it: W, and W_g that workers begin with, are two things."""

    def __init__(self, eta, zeta, nesterov):
        self.eta, self.zeta, self.nesterov = eta, zeta, nesterov
        self.delta, self.model = 0.0, None

    def __call__(self, w_g, mean):
        if self.model is None:
            self.model = w_g
        self.delta = self.eta * self.delta + self.zeta * (mean - w_g)
        self.model = self.model + self.delta
        return self.model + self.eta * self.delta if self.nesterov else self.model


class DiLoCo:
    """The outer gradient theta - mean under Nesterov momentum, as PyTorch's SGD has it."""

    def __init__(self, rate, momentum):
        self.rate, self.momentum, self.buffer = rate, momentum, 0.0

    def __call__(self, theta, mean):
        g = theta - mean
        self.buffer = self.momentum * self.buffer + g
        return theta - self.rate * (g + self.momentum * self.buffer)
