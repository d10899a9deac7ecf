"""What `strategy.placement()` gives: which layers are on which device, and what goes between."""

from __future__ import annotations

import dataclasses
import re


@dataclasses.dataclass(frozen=True)
class PartInfo:
    """One part of every replica."""

    part: int
    devices: tuple[str, ...]
    """Each worker's."""
    layers: tuple[str, ...]
    """Paths; none before a model is trained."""
    parameters: int


@dataclasses.dataclass(frozen=True)
class Edge:
    """What goes from one part to another in a mini-batch, forward and backward."""

    start: int
    end: int
    tensors: int
    bytes_per_example: float
    """Of tensors with an axis of examples."""
    bytes: int
    """Of all others; where a mini-batch has a fixed size, of its tensors, too."""


@dataclasses.dataclass(frozen=True)
class PartsTable:
    """All parts and edges; printed it is a table."""

    parts: tuple[PartInfo, ...]
    edges: tuple[Edge, ...]

    def __str__(self) -> str:
        rows = [("part", "device of worker 0", "parameters", "layers")]
        rows += [
            (
                f"{part.part}",
                _short(part.devices[0]),
                f"{part.parameters:,}",
                ", ".join(part.layers) or "-",
            )
            for part in self.parts
        ]
        rows += [("", "", "", "")] * bool(self.edges)
        rows += [("edge", "tensors", "bytes per example", "other bytes")] * bool(self.edges)
        rows += [
            (f"{e.start}-{e.end}", f"{e.tensors}", f"{e.bytes_per_example:,.0f}", f"{e.bytes:,}")
            for e in self.edges
        ]
        widths = [max(len(row[column]) for row in rows) for column in range(3)]
        lines = ["  ".join([*map(str.ljust, row[:3], widths), row[3]]).rstrip() for row in rows]
        return "\n".join(lines)


def _short(device: str) -> str:
    """A device's name, as in "CPU:0", and before it the task where that is another process."""
    task = re.search(r"/job:(\w+)/.*task:(\d+)/", device)
    name = device.rpartition("device:")[2]
    return name if task is None else f"{task[1]} {task[2]}, {name}"
