"""Codecs in NumPy, straight from the papers: (state, gradient) -> what is applied.

`state` is one worker's, for one weight; of a table, its rows that the message names. `rounded` is
what travelling makes of a number, where a weight has fewer bits than its codec computes with.
"""

import fractions

import ml_dtypes
import numpy as np
import tensorflow as tf


def exactly(value):
    """What travels with all its bits."""
    return value


def to_bfloat16(value):
    """What travels in 16 bits."""
    return np.asarray(value).astype(ml_dtypes.bfloat16).astype("float32")


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
        k = int(np.ceil(fractions.Fraction(str(fraction)) * g.size))
        places = np.argsort(-np.abs(v).ravel(), kind="stable")[:k]
        chosen = np.zeros(g.size, bool)
        chosen[places] = True
        chosen = chosen.reshape(g.shape)
        state["residual"] = np.where(chosen, 0, v).astype(g.dtype)
        state["momentum"] = np.where(chosen, 0, u).astype(g.dtype)
        return np.where(chosen, v, 0).astype(g.dtype)

    return message


def one_bit(rounded=exactly):
    """Seide et al., 2014, equations 2 and 3, column by column."""

    def message(state, g):
        p = state["residual"] + g
        sent = np.zeros_like(p)
        columns = p.shape[-1] if p.ndim > 1 else 1
        matrix, result = p.reshape(-1, columns), sent.reshape(-1, columns)
        for j in range(columns):
            for sign in (matrix[:, j] >= 0, matrix[:, j] < 0):
                if sign.any():
                    result[sign, j] = rounded(matrix[sign, j].mean())
        state["residual"] = p - sent
        return sent

    return message


def ef_sign(rounded=exactly):
    """Karimireddy et al., 2019, algorithm 1; the sign of 0 is 1."""

    def message(state, g):
        p = state["residual"] + g
        sent = rounded(np.abs(p).mean()) * np.where(p >= 0, 1, -1) if p.size else p
        state["residual"] = p - sent
        return sent.astype(g.dtype)

    return message


def power_sgd(rank, rounded=exactly):
    """Vogels et al., 2019, algorithm 1, of one worker; vectors, and thin matrices, as they are."""

    def message(state, g):
        if g.ndim < 2 or min(g.size // g.shape[-1], g.shape[-1]) <= rank:
            return g
        m = (state["residual"] + g).reshape(-1, g.shape[-1])
        if "right" not in state:
            shape = [g.shape[-1], rank]
            state["right"] = tf.random.stateless_normal(shape, (2, 7), dtype=g.dtype).numpy()
        p = rounded(np.linalg.qr(m @ state["right"])[0])
        state["right"] = m.T @ p
        sent = rounded(p @ rounded(state["right"]).T).reshape(g.shape)
        state["residual"] = (m.reshape(g.shape) - sent).astype(g.dtype)
        return sent.astype(g.dtype)

    return message


def qsgd(levels, uniform):
    """Alistarh et al., 2017, section 3.1; `uniform` is the numbers that were drawn."""

    def message(state, g):
        norm = np.linalg.norm(g)
        level = np.floor(np.abs(g) / norm * levels + uniform) if norm else np.zeros_like(g)
        return (norm / levels * np.sign(g) * np.minimum(level, levels)).astype(g.dtype)

    return message
