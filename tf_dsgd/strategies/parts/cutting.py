"""Cuts a chain of layers into parts of about equal cost."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import keras


def cut(model: keras.Model, parts: int) -> dict[int, int]:
    """From layers' ids to their parts, for `ModelParallel("auto")`.

    A layer costs its number of parameters, and of values that it gives for one example, which is
    what it keeps for its backward.

    Raises:
        ValueError: if the model is neither sequential nor functional, or has fewer layers.
    """
    layers = [each for each in model.layers if not isinstance(each, keras.layers.InputLayer)]
    functional = hasattr(model, "operations") or isinstance(model, keras.Sequential)
    if not functional or len(layers) < parts:
        kind = "sequential or functional" if not functional else f"of at least {parts} layers"
        raise ValueError(
            f'ModelParallel("auto") cuts a model that is {kind}. Received: {model.name!r}, a '
            f"{type(model).__name__} with {len(layers)} layers. Name the parts: "
            'ModelParallel({"encoder/.*": 0, "decoder/.*": 1}).'
        )
    ends = balanced([_cost(layer) for layer in layers], parts)
    return {id(layer): sum(i >= end for end in ends[:-1]) for i, layer in enumerate(layers)}


def _cost(layer: Any) -> int:
    try:
        given = keras.tree.flatten(layer.output)
    except (AttributeError, ValueError):  # it has none, or was called more than once
        given = []
    values = sum(math.prod(d or 1 for d in tensor.shape[1:]) for tensor in given)
    return int(layer.count_params()) + values


def balanced(costs: Sequence[int], parts: int) -> list[int]:
    """Where each part of a chain ends, such that the largest cost of a part is the smallest.

    Each part has one layer at least. Of cuts alike the first part is the longest.

    >>> from tf_dsgd.strategies.parts.cutting import balanced
    >>> balanced([1, 1, 1, 3], 2)
    [3, 4]
    """
    total = [0]
    for cost in costs:
        total.append(total[-1] + cost)
    # best[i]: (the largest cost, where each part ends) of the first i layers in k parts.
    best: dict[int, tuple[int, list[int]]] = {0: (0, [])}
    for k in range(1, parts + 1):
        following = {}
        for i in range(k, len(costs) - (parts - k) + 1):
            ways = [
                (max(worst, total[i] - total[j]), [*ends, i])
                for j, (worst, ends) in best.items()
                if j < i
            ]
            following[i] = min(ways, key=lambda way: (way[0], [-end for end in way[1]]))
        best = following
    return best[len(costs)][1]
