"""What `print(strategy)` shows: one screen."""

from __future__ import annotations

import dataclasses
from typing import Any

from tf_dsgd.algorithm import Codec


def describe(strategy: Any) -> str:
    """Workers, shards, rules and what was counted so far; training is not waited for."""
    peers = strategy.algorithm.between_peers
    lines = [
        ("workers", f"{strategy.num_workers}, of {strategy.cluster!r}"),
        *_shards(strategy),
        *_tables(strategy),
        *_parts(strategy),
        ("on workers", _rule(strategy.algorithm.local)),
        ("exchange", _rule(strategy.algorithm.exchange)),
        *_messages(strategy.algorithm.codec, strategy.engine.store.residuals_lost),
        ("on shards" if peers is None else "peers", _rule(strategy.algorithm.server)),
        *_counts(strategy),
    ]
    return "\n".join([type(strategy).__name__, *(f"  {name:<10}  {text}" for name, text in lines)])


def _shards(strategy: Any) -> list[tuple[str, str]]:
    shards = strategy.shards()
    return [
        (
            f"shard {index}" if len(shards) > 1 else "shard",
            f"{shard.device or 'this process'}: {shard.variables} variables, "
            f"{shard.bytes / 1e6:.1f} MB",
        )
        for index, shard in enumerate(shards)
    ]


def _tables(strategy: Any) -> list[tuple[str, str]]:
    """What is split by rows, which an averaging strategy trains otherwise than the rest."""
    found = strategy.placement.split.tables
    shapes = [f"{path} {' x '.join(f'{n:,}' for n in shape)}" for path, shape in found.items()]
    averaged = strategy.algorithm.local.sends == "state"
    how = ", updated as each message comes, and not averaged" if averaged else ""
    return [("tables", f"{', '.join(shapes)}: split by rows{how}")] if shapes else []


def _parts(strategy: Any) -> list[tuple[str, str]]:
    parts = strategy.placement.parts
    text = "of each worker; strategy.placement() shows what is where"
    return [] if parts is None else [("parts", f"{parts.store.num_parts} {text}")]


def _messages(codec: Any, lost: int) -> list[tuple[str, str]]:
    """Nothing where they travel as they are."""
    if type(codec) is Codec:
        return []
    gone = f"{lost} {'time' if lost == 1 else 'times'} gone with a lost worker"
    return [("messages", repr(codec)), *([("held back", gone)] if lost else [])]


def _counts(strategy: Any) -> list[tuple[str, str]]:
    try:
        found = strategy.steps, strategy.updates, strategy.staleness()
    except RuntimeError as error:  # a task with shards is lost; who prints may be looking why
        first_line = f"{error}".partition("\n")[0]
        return [("steps", f"cannot be read: {first_line}")]
    steps, updates, staleness = found
    counts = [("steps", f"{steps} mini-batches applied"), ("updates", str(updates))]
    return [*counts, ("staleness", str(staleness) if staleness.count else "no messages yet")]


def _rule(rule: Any) -> str:
    """A rule with those of its settings that are not the defaults."""
    if not dataclasses.is_dataclass(rule):
        return type(rule).__name__
    settings = []
    for field in dataclasses.fields(rule):
        value = getattr(rule, field.name)
        if repr(value) != repr(field.default):
            shown = getattr(value, "__name__", None) or repr(value)
            settings.append(f"{field.name}={shown}")
    return f"{type(rule).__name__}({', '.join(settings)})"
