"""Codecs in NumPy, straight from the papers: (state, gradient) -> what is applied.

`state` is one worker's, for one weight; of a table, its rows that the message names.
"""

import numpy as np
import tensorflow as tf


def zeros(gradient, *names):
    """A state before the first message."""
    return {name: np.zeros_like(gradient) for name in names}


def threshold(tau, clip=None):
    """Strom, 2015, algorithm 1."""

    def message(state, g):
        r = state["residual"] + g
        sent = np.where(np.abs(r) > tau, tau * np.sign(r), 0).astype(g.dtype)
        r = r - sent
        state["residual"] = r if clip is None else np.clip(r, -clip, clip)
        return sent

    return message


def top_k(fraction, momentum=0.0):
    """Lin et al., 2018, section 3.2; the first of several that are equally large."""

    def message(state, g):
        u = momentum * state["momentum"] + g
        v = state["residual"] + u
        k = int(np.ceil(fraction * g.size))
        places = np.argsort(-np.abs(v).ravel(), kind="stable")[:k]
        chosen = np.zeros(g.size, bool)
        chosen[places] = True
        chosen = chosen.reshape(g.shape)
        state["residual"] = np.where(chosen, 0, v).astype(g.dtype)
        state["momentum"] = np.where(chosen, 0, u).astype(g.dtype)
        return np.where(chosen, v, 0).astype(g.dtype)

    return message


def one_bit():
    """Seide et al., 2014, equations 2 and 3, column by column."""

    def message(state, g):
        p = state["residual"] + g
        sent = np.zeros_like(p)
        columns = p.shape[-1] if p.ndim > 1 else 1
        matrix, result = p.reshape(-1, columns), sent.reshape(-1, columns)
        for j in range(columns):
            for sign in (matrix[:, j] >= 0, matrix[:, j] < 0):
                if sign.any():
                    result[sign, j] = matrix[sign, j].mean()
        state["residual"] = p - sent
        return sent

    return message


def ef_sign():
    """Karimireddy et al., 2019, algorithm 1; the sign of 0 is 1."""

    def message(state, g):
        p = state["residual"] + g
        sent = np.abs(p).mean() * np.where(p >= 0, 1, -1) if p.size else p
        state["residual"] = p - sent
        return sent.astype(g.dtype)

    return message


def power_sgd(rank):
    """Vogels et al., 2019, algorithm 1, of one worker; vectors, and thin matrices, as they are."""

    def message(state, g):
        if g.ndim < 2 or min(g.size // g.shape[-1], g.shape[-1]) <= rank:
            return g
        m = (state["residual"] + g).reshape(-1, g.shape[-1])
        if "right" not in state:
            shape = [g.shape[-1], rank]
            state["right"] = tf.random.stateless_normal(shape, (2, 7), dtype=g.dtype).numpy()
        p, _ = np.linalg.qr(m @ state["right"])
        state["right"] = m.T @ p
        sent = (p @ state["right"].T).reshape(g.shape)
        state["residual"] = (m.reshape(g.shape) - sent).astype(g.dtype)
        return sent.astype(g.dtype)

    return message
