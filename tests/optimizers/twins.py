"""The rules in NumPy, in double precision, straight from their equations.

A twin holds one weight, `w`. Its workers `fetch` it whole; a message is a gradient and the rows
that it touches, all of them if it is dense. `no_delay` applies a gradient that nobody fetched for.
"""

import numpy as np


class Twin:
    def __init__(self, start, num_workers):
        self.w = np.array(start, np.float64)
        self.version = 0
        self.fetched_at = [0] * num_workers
        self.seen = [self.state() for _ in range(num_workers)]

    def state(self):
        """What a worker that fetches is taken to have seen."""
        return self.w.copy()

    def fetch(self, worker):
        self.fetched_at[worker] = self.version
        self.seen[worker] = self.state()

    def push(self, worker, g, rows=slice(None), version=None):
        """`version` is that of the fetch before the first gradient, if not of the last fetch."""
        version = self.fetched_at[worker] if version is None else version
        self._apply(g, rows, self.seen[worker], self.version - version)
        self.version += 1

    def no_delay(self, g, rows=slice(None)):
        self._apply(g, rows, self.state(), 0)

    def _apply(self, g, rows, seen, staleness):
        self.update(np.asarray(g, np.float64)[rows], rows, seen[rows], staleness)


class AdaptiveRevision(Twin):
    def __init__(self, start, num_workers, alpha, initial=1.0):
        shape = np.shape(start)
        self.alpha = alpha
        self.gbar = np.zeros(shape)
        self.z, self.top = np.full(shape, initial), np.full(shape, initial)
        super().__init__(start, num_workers)

    def state(self):
        return self.gbar.copy()

    def update(self, g, rows, gbar_old, staleness):
        g_bck = self.gbar[rows] - gbar_old
        eta_old = self.alpha / np.sqrt(self.top[rows])
        self.z[rows] += g**2 + 2 * g * g_bck
        self.top[rows] = np.maximum(self.z[rows], self.top[rows])
        eta = self.alpha / np.sqrt(self.top[rows])
        self.w[rows] += -eta * g + (eta_old - eta) * g_bck
        self.gbar[rows] += g

    def slots(self):
        return [self.gbar, self.z, self.top]


class DelayCompensatedSGD(Twin):
    def __init__(self, start, num_workers, eta, lam, m=None, epsilon=1e-7):
        self.eta, self.lam, self.m, self.epsilon = eta, lam, m, epsilon
        self.mean_square = np.zeros(np.shape(start))
        super().__init__(start, num_workers)

    def update(self, g, rows, w_seen, staleness):
        lam = self.lam
        if self.m is not None:
            mean = self.m * self.mean_square[rows] + (1 - self.m) * g * g
            self.mean_square[rows] = mean
            lam = self.lam / np.sqrt(mean + self.epsilon)
        self.w[rows] -= self.eta * (g + lam * g * g * (self.w[rows] - w_seen))

    def slots(self):
        return [] if self.m is None else [self.mean_square]


class FASGD(Twin):
    def __init__(self, start, num_workers, alpha, gamma=0.9, beta=0.9, epsilon=1e-7, first=1.0):
        self.alpha, self.gamma, self.beta, self.epsilon = alpha, gamma, beta, epsilon
        shape = np.shape(start)
        self.n, self.b, self.v = np.zeros(shape), np.zeros(shape), np.full(shape, first)
        super().__init__(start, num_workers)

    def update(self, g, rows, seen, staleness):
        n = self.gamma * self.n[rows] + (1 - self.gamma) * g**2
        b = self.gamma * self.b[rows] + (1 - self.gamma) * g
        deviation = np.sqrt(n - b**2 + self.epsilon)
        v = self.beta * self.v[rows] + (1 - self.beta) * deviation
        self.n[rows], self.b[rows], self.v[rows] = n, b, v
        self.w[rows] -= self.alpha / (v * max(staleness, 1)) * g

    def slots(self):
        return [self.n, self.b, self.v]
