"""n-softsync's server in NumPy, from the paper's equations, with Keras's optimizers by hand."""

import numpy as np

FACTORS = {
    None: lambda tau: 1.0,
    "inverse": lambda tau: 1.0 / max(tau, 1),
    "half_life": lambda tau: 0.5**tau,
    "zero": lambda tau: 0.0,
}


class Optimizer:
    """Steps as Keras writes them, each as a function of one gradient and one rate."""

    def __init__(self, name, rate):
        self.name, self.rate, self.steps = name, rate, 0
        self.first = self.second = 0.1 if name == "adagrad" else 0.0

    def step(self, g, scale):
        """The change of the weights for gradient g at `scale` times the rate."""
        self.steps += 1
        rate = self.rate * scale
        if self.name == "sgd":
            return -rate * g
        if self.name == "momentum":
            self.first = 0.9 * self.first - rate * g
            return self.first
        if self.name == "adagrad":
            self.first = self.first + g**2
            return -rate * g / np.sqrt(self.first + 1e-7)
        if self.name == "rmsprop":
            self.first = 0.9 * self.first + 0.1 * g**2
            return -rate * g / np.sqrt(self.first + 1e-7)
        self.first = 0.9 * self.first + 0.1 * g
        self.second = 0.999 * self.second + 0.001 * g**2
        rate *= np.sqrt(1 - 0.999**self.steps) / (1 - 0.9**self.steps)
        return -rate * self.first / (np.sqrt(self.second) + 1e-7)


class Server:
    """Collects c messages (g_l, tau_l); then makes one step."""

    def __init__(self, weights, gradients_per_update, factor, optimizer):
        self.w = np.array(weights, np.float64)
        self.c, self.factor, self.optimizer = gradients_per_update, factor, optimizer
        self.version, self.collected, self.staleness = 0, [], []

    def receive(self, g, tau):
        """Tells whether the weights changed."""
        self.staleness.append(tau)
        self.collected.append((self.factor(tau), g))
        return len(self.collected) == self.c and self.flush()

    def flush(self):
        if not self.collected:
            return False
        count = len(self.collected)
        total = sum(f for f, _ in self.collected)
        weighted = sum(f * g for f, g in self.collected)
        self.collected = []
        if self.optimizer.name in ("sgd", "momentum"):  # the paper's equation as it stands
            self.w = self.w + self.optimizer.step(weighted / count, 1.0)
        else:
            mean = weighted / total if total else np.zeros_like(weighted)
            self.w = self.w + self.optimizer.step(mean, total / count)
        self.version += 1
        return True
