"""`ModelParallel`: which layers are on which of a worker's devices."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import keras

from tf_dsgd import _tf_parts
from tf_dsgd.checks import called, positive_int, whole
from tf_dsgd.cluster import Cluster, resolve
from tf_dsgd.strategies.parts.cutting import cut


@called(examples={"parts": '{"encoder/.*": 0, "decoder/.*": 1}'})
@dataclasses.dataclass(frozen=True)
class ModelParallel:
    """Lays each worker's replica over several devices, for a model too large or too slow for one.

    Use it as `model_parallel=` of a strategy, on a cluster with `devices_per_worker`, or with
    `tasks_per_worker` where a replica is a group of processes. A layer's
    copy of the weights, its forward and its backward are on the device of its part; what layers of
    two parts give each other is all that travels between devices. The numbers are those of a
    replica on one device.

    Args:
        parts: from regular expressions to parts, numbered from 0. A layer's path is the names from
            the model to the layer, joined by "/". A pattern is to match it whole, or from one of
            its names on; so `"encoder/.*"` is all that the layer `encoder` holds. The first
            pattern that matches counts; of a layer inside another the innermost match. What no
            pattern matches goes with the part of its inputs, which is said once. Or `"auto"`: a
            sequential or functional model is cut, in the order of its layers, into as many parts
            as a worker has devices, such that the largest cost is as small as can be; a layer costs
            its number of parameters, and of values that it gives for one example.
        microbatches: m, in how many pieces a mini-batch flows through the parts, so that one part
            computes on a piece while the next computes on the one before; at least 1. The gradient
            is the mean of the pieces', weighted by their examples: that of the whole mini-batch,
            where the loss is a mean over examples. Clipping comes after the sum. What depends on
            other examples of a mini-batch (BatchNormalization in training, a mean over what a mask
            leaves) is of a piece. A mini-batch must have at least m examples.

    Raises:
        TypeError, ValueError: for a wrong argument, naming it.

    Example:

    >>> tf_dsgd.ModelParallel({"encoder/.*": 0, "decoder/.*": 1}, microbatches=4)
    ModelParallel(parts={'encoder/.*': 0, 'decoder/.*': 1}, microbatches=4)
    """

    parts: Mapping[str, int] | str
    microbatches: int = dataclasses.field(default=1, kw_only=True)

    def __post_init__(self) -> None:
        if not (isinstance(self.parts, str) and self.parts == "auto"):
            object.__setattr__(self, "parts", _checked(self.parts))
        object.__setattr__(self, "microbatches", positive_int("microbatches", self.microbatches))

    @property
    def num_parts(self) -> int:
        """The highest part that is named, and one; 1 where parts are found by themselves."""
        return 1 if isinstance(self.parts, str) else 1 + max(self.parts.values())


def _checked(parts: Any) -> dict[str, int]:
    if not isinstance(parts, Mapping) or not parts:
        raise TypeError(
            "parts must be a dict from regular expressions on layers' paths to parts, such as "
            f'{{"encoder/.*": 0, "decoder/.*": 1}}, or "auto". Received: {parts!r}.'
        )
    found = {}
    for pattern, part in parts.items():
        if not isinstance(pattern, str):
            raise TypeError(
                "parts must map regular expressions, which are strings, to parts. "
                f"Received: {pattern!r}: {part!r}."
            )
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(
                f"parts has {pattern!r}, which is no regular expression: {error}."
            ) from error
        number = whole(part)
        if number is None or not 0 <= number < 1 << 31:
            raise ValueError(
                "parts must map patterns to integers of at least 0, the numbers of parts. "
                f"Received: {pattern!r}: {part!r}."
            )
        found[pattern] = number
    return found


def checked(value: Any, cluster: Any, split: bool = False) -> Any:
    """The cluster on which a strategy with `model_parallel=value` is made.

    Raises:
        TypeError, ValueError: if `value` is none, or does not go with the cluster, or with
            `placement` (`split`).
    """
    if value is None:
        return cluster
    if not isinstance(value, ModelParallel):
        raise TypeError(
            "model_parallel must be a tf_dsgd.ModelParallel, such as tf_dsgd.ModelParallel("
            f'{{"encoder/.*": 0, "decoder/.*": 1}}), or None. Received: {value!r}.'
        )
    if split:
        raise ValueError(
            "model_parallel and placement do not go together yet: of a table that is split by rows "
            f"no part has a copy. Leave one of the two out. Received: model_parallel={value!r}."
        )
    found: Cluster = resolve(cluster)
    if value.num_parts > found.devices_per_worker:
        raise ValueError(
            f"model_parallel names part {value.num_parts - 1}, and a worker of {found!r} has "
            f"{found.devices_per_worker} device(s), from part 0 on. Give the cluster "
            f"{found.gives_devices}={value.num_parts}, or name other parts. Received: {value!r}."
        )
    return found


@dataclasses.dataclass(frozen=True)
class Layered:
    """A layer of a model, its path without the model's name, and its part, if it has one."""

    layer: Any
    path: str
    part: int | None
    """Of its own, or of the layer that holds it; None: that of its inputs."""
    is_own: bool
    """Whether the part is its own."""


def laid_out(model: keras.Model, value: ModelParallel, devices: int) -> list[Layered]:
    """The layers of a model, those that hold others before these, and their parts.

    Raises:
        ValueError: if a pattern matches nothing, or `"auto"` cannot cut the model.
    """
    if isinstance(value.parts, str):
        own = cut(model, devices)
        return list(_walk(model, lambda names, layer: own.get(id(layer))))
    patterns = {re.compile(pattern): part for pattern, part in value.parts.items()}
    unused = set(value.parts)

    def matched(names: Sequence[str], layer: Any) -> int | None:
        del layer
        ends = ["/".join(names[k:]) for k in range(len(names))]
        ends += [f"{end}/" for end in ends]
        found = [p for p in patterns if any(map(p.fullmatch, ends))]
        unused.difference_update(p.pattern for p in found)
        return patterns[found[0]] if found else None

    layers = list(_walk(model, matched))
    if unused:
        raise ValueError(
            f"model_parallel has {sorted(unused)}, and no layer of the model {model.name!r} has "
            "such a path. A pattern is to match a path whole, or from one of its names on. The "
            f"paths are {[layered.path for layered in layers]}."
        )
    return layers


def _walk(
    model: Any,
    matched: Any,
    names: tuple[str, ...] = (),
    part: int | None = None,
    seen: set[int] | None = None,
) -> Iterator[Layered]:
    """One that several layers hold comes once, where it is found first."""
    seen = set() if seen is None else seen
    names = (*names, model.name)
    for layer in _tf_parts.layers_within(model):
        if id(layer) in seen:
            continue
        seen.add(id(layer))
        path = (*names, layer.name)
        own = matched(path, layer)
        here = part if own is None else own
        yield Layered(layer, "/".join(path[1:]), here, own is not None)
        yield from _walk(layer, matched, names, here, seen)
