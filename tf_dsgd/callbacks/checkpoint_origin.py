"""What a checkpoint is of, and in what a run differs from it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import keras

# Keras numbers the names that it makes up: those of a second model in one process are others.
_NUMBER = re.compile(r"_\d+")


def origin_of(model: keras.Model, strategy: Any) -> dict[str, Any]:
    """What a checkpoint of this run is of; as JSON has it."""
    outer = getattr(strategy, "outer_optimizer", None)
    return {
        "strategy": type(strategy).__name__,
        "number of workers": strategy.num_workers,
        "optimizer": _name(model.optimizer),
        "outer optimizer": _name(outer),
        "weights": _variables(model.weights),
        "optimizer variables": _variables(model.optimizer.variables if model.optimizer else []),
    }


def check_origin(path: Path, found: Mapping[str, Any], here: Mapping[str, Any]) -> None:
    """Compares a checkpoint's origin with a run.

    Raises:
        ValueError: naming the checkpoint's file and the first difference.
    """
    for what, mine in here.items():
        theirs = found.get(what)
        if isinstance(mine, list) and isinstance(theirs, list):
            difference = _first_difference(theirs, mine)
        else:
            difference = "" if theirs == mine else f"{theirs} there, and {mine} here"
        if difference:
            raise ValueError(
                f"{path} is of another run: its {what}: {difference}. Go on with the same script, "
                "give each run a backup_dir of its own, or delete the folder to begin anew."
            )


def _name(optimizer: Any) -> str | None:
    if optimizer is None:
        return None
    inner = getattr(optimizer, "inner_optimizer", None)
    name = type(optimizer).__name__
    return name if inner is None else f"{name} of {_name(inner)}"


def _variables(variables: Iterable[Any]) -> list[list[Any]]:
    return [[v.path, list(v.shape), keras.backend.standardize_dtype(v.dtype)] for v in variables]


def _first_difference(theirs: list[Any], mine: list[Any]) -> str:
    for place, (a, b) in enumerate(zip(theirs, mine, strict=False)):
        if not (isinstance(a, list) and len(a) == len(b) and isinstance(a[0], str)):
            return f"number {place} is {a} there, and {_shown(b)} here"
        if [_NUMBER.sub("", a[0]), *a[1:]] != [_NUMBER.sub("", b[0]), *b[1:]]:
            return f"number {place} is {_shown(a)} there, and {_shown(b)} here"
    return "" if len(theirs) == len(mine) else f"{len(theirs)} there, and {len(mine)} here"


def _shown(variable: list[Any]) -> str:
    path, shape, dtype = variable
    return f"{path} {shape} {dtype}"
