"""Search directions from dot products alone: none of this sees a vector.

Shards hold b_0 ... b_2m: the last m steps s, the last m changes y of the gradient, and the gradient
g. All their dot products come in one matrix, and what goes back is the direction's coefficients,
d = sum_j c_j b_j: one round trip for a direction, whatever m is (VL-BFGS: Chen, Wang, Zhou,
Large-scale L-BFGS using MapReduce, NIPS 2014, algorithm 3).

    L-BFGS    the two-loop recursion (Nocedal, Wright, algorithm 7.4) on coefficients
    cg-fr     d = -g + beta d_o,  beta = g'g / g_o'g_o           (Fletcher, Reeves)
    cg-pr                         beta = max(0, g'y / g_o'g_o)   (Polak, Ribiere)
    cg-hs                         beta = g'y / d_o'y             (Hestenes, Stiefel)
    gd        d = -g

with s = a d_o the last step and y = g - g_o, so that conjugate gradients are of the same vectors
with m = 1. Fletcher and Reeves's method begins anew where two gradients in a row are far from
orthogonal, |g'g_o| >= 0.1 g'g (Powell; Nocedal, Wright, (5.52)): it would go on with tiny steps.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

_FAR = 0.1
METHODS = ("lbfgs", "cg-fr", "cg-pr", "cg-hs", "gd")


@dataclasses.dataclass(frozen=True)
class Pair:
    """One step s and change y of the gradient, which are the history's row `slot`."""

    slot: int
    step: float
    """a, of s = a d_o."""
    gradient_square: float
    """g_o'g_o, before the step."""


def rows(method: str, history: int) -> int:
    """m: pairs that a method needs."""
    return history if method == "lbfgs" else 0 if method == "gd" else 1


def coefficients(method: str, dots: np.ndarray, pairs: Sequence[Pair]) -> np.ndarray:
    """c, of d = sum_j c_j b_j, from all dot products and the pairs in use, oldest first."""
    if method == "lbfgs":
        return two_loops(dots, [pair.slot for pair in pairs])
    result = steepest(dots)
    if method == "gd" or not pairs:
        return result
    last = pairs[-1]
    result[last.slot] = _beta(method, dots, last) / last.step
    return result


def steepest(dots: np.ndarray) -> np.ndarray:
    """c of d = -g."""
    result = np.zeros(len(dots))
    result[-1] = -1.0
    return result


def two_loops(dots: np.ndarray, slots: Sequence[int]) -> np.ndarray:
    """c of d = -H g, where b_slot and b_(m + slot) are a step and its change, oldest first."""
    size = len(dots) // 2
    result = steepest(dots)
    if not slots:
        return result
    alphas = {}
    for s in reversed(slots):
        y = size + s
        alphas[s] = dots[s] @ result / dots[s, y]
        result[y] -= alphas[s]
    s, y = slots[-1], size + slots[-1]
    result *= dots[s, y] / dots[y, y]  # H_0 = s'y / y'y (7.20)
    for s in slots:
        y = size + s
        beta = dots[y] @ result / dots[s, y]
        result[s] += alphas[s] - beta
    return result


def _beta(method: str, dots: np.ndarray, last: Pair) -> float:
    size = len(dots) // 2
    s, y, g = last.slot, size + last.slot, len(dots) - 1
    if method == "cg-fr":
        if abs(dots[g, g] - dots[g, y]) >= _FAR * dots[g, g]:
            return 0.0
        return float(dots[g, g]) / last.gradient_square
    if method == "cg-pr":
        return max(0.0, float(dots[g, y]) / last.gradient_square)
    divisor = float(dots[s, y]) / last.step
    return float(dots[g, y]) / divisor if divisor else 0.0
