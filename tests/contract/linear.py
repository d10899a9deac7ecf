"""A regression by a linear model, for twins in NumPy: its mini-batches, and their gradients."""

import numpy as np

FEATURES, BATCH = 4, 8


def data(batches, seed=0):
    random = np.random.default_rng(seed)
    x = random.standard_normal((batches * BATCH, FEATURES)).astype("float32")
    y = (x @ random.standard_normal((FEATURES, 1)) + 0.5).astype("float32")
    return x, y


def split(x, y):
    return [(x[i : i + BATCH], y[i : i + BATCH]) for i in range(0, len(x), BATCH)]


def gradient(w, batch):
    """Of the mean squared error of x @ w + b; w's last row is the bias."""
    x, y = batch
    x = np.concatenate([x, np.ones((len(x), 1), x.dtype)], 1)
    return 2.0 / len(x) * x.T @ (x @ w - y)
