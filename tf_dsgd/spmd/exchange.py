"""Sums and means of arrays over equal processes.

TensorFlow's `CollectiveReduce` packs what it sends into protocol buffers, and took two to three
times as long as what is done here. Each process puts its arrays into variables of its own
TensorFlow server; after all have met, each reads the others', which TensorFlow sends as they lie in
memory. Of more than two processes each adds up one part and the others read the result (so each
sends and receives 2 (M - 1) / M times the bytes of its arrays, as in a ring).
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import tensorflow as tf

from tf_dsgd.spmd.collectives import Group, Program
from tf_dsgd.spmd.sessions import Cell

How = Literal["mean", "sum", "first"]

_SMALL = 4096  # elements: what is smaller is not worth a second turn


class Spec(NamedTuple):
    """An array of an exchange and what becomes of it.

    Args:
        shape: its shape.
        dtype: its NumPy type; numbers or bool.
        how: "mean" (of floating-point arrays) or "sum" over the processes, or that of the "first".
    """

    shape: tuple[int, ...]
    dtype: Any
    how: How


def exchange(group: Group, specs: Sequence[Spec]) -> Exchange:
    """The sums and means of such arrays; the same object for the same shapes."""
    found = group.made.get(tuple(specs))
    if found is None:
        found = group.made[tuple(specs)] = Exchange(group, specs)
    return found


class Exchange:
    """Sums and means of arrays of fixed shapes, made by `exchange`.

    Arrays of a kind travel joined. Means of types of less than 32 bits are computed in float32. All
    processes get the same bits. `offer`, then a meeting of the group, then `take`; or all in one
    by a call.

    Args:
        group: the processes.
        specs: the arrays, equal in all processes.
    """

    def __init__(self, group: Group, specs: Sequence[Spec]):
        self._group = group
        self._specs = list(specs)
        lanes: dict[tuple[str, str], _Lane] = {}
        self._places = [_place(lanes, spec) for spec in self._specs]
        self._lanes = list(lanes.values())
        for lane in self._lanes:
            lane.make(group.size)
        self._shared = group.size > 1 and bool(self._lanes)
        self._turn = 0
        digest = hashlib.blake2b(repr(self._specs).encode(), digest_size=7)
        self._digest = digest.hexdigest()
        self._number = int.from_bytes(digest.digest(), "big")

    def __call__(self, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        """The results, in memory that later calls use again.

        Args:
            arrays: one for each spec.
        """
        self.offer(arrays)
        if self._shared:
            self._group.agree(self._number)
        return self.take()

    def offer(self, arrays: Sequence[np.ndarray]) -> None:
        """Puts this process's arrays where the others will read them.

        There are two such places, used in turns: others may still read what was offered last. They
        have read what was offered before that, since all have met since.
        """
        for array, spec, (lane, start) in zip(arrays, self._specs, self._places, strict=True):
            mine = spec.how != "first" or self._group.rank == 0
            target = lane.flat[start : start + math.prod(spec.shape)]
            target[:] = np.asarray(array).reshape(-1) if mine else 0
        if not self._shared:
            return
        with self._group.unbroken():
            program = self._program()
            wires = program.wires[self._turn]
            slices = [lane.flat[a:b] for lane in self._lanes for a, b in lane.slices]
            program.run(wires.store, dict(zip(wires.fed, slices, strict=True)))

    def take(self) -> list[np.ndarray]:
        """The results, once all have offered and met, in memory that later calls use again."""
        if self._shared:
            with self._group.unbroken():
                program = self._program()
                wires = program.wires[self._turn]
                self._turn = 1 - self._turn
                results, _ = program.run([wires.whole, wires.share], {})
                if wires.shares:
                    self._group.agree(self._number)
                    results |= program.run(wires.shares, {})
                for k, slices in results.items():
                    self._lanes[k].receive(slices)
        return [
            lane.result[start : start + math.prod(spec.shape)]
            .reshape(spec.shape)
            .astype(spec.dtype, copy=False)
            for spec, (lane, start) in zip(self._specs, self._places, strict=True)
        ]

    def _program(self) -> Program:
        key = ("exchange", tuple(self._specs))
        return self._group.program(key, lambda: [self._wires(t) for t in (0, 1)], at=None)

    def _wires(self, turn: int) -> _Wires:
        """The operations of one turn.

        A process may be here alone, when the others are elsewhere, which their meeting then shows.
        """
        group = self._group
        ranks = range(group.size)
        fed, store, share = [], [], []
        whole: dict[int, list[Any]] = {}
        shares: dict[int, list[Any]] = {}
        for k, lane in enumerate(self._lanes):
            key = f"{self._digest}/{turn}/{k}"
            totals = []
            for number, (start, stop) in enumerate(lane.slices):
                cells = [
                    Cell(group.device(r), f"{key}/{number}", lane.dtype, stop - start)
                    for r in ranks
                ]
                fed.append(tf.compat.v1.placeholder(lane.dtype, [stop - start]))
                # The variable would share memory with what is fed, which `take` writes to.
                store.append(cells[group.rank].assign(tf.raw_ops.DeepCopy(x=fed[-1])))
                if not lane.split or number == group.rank:
                    total = tf.math.add_n([cell.read() for cell in cells])
                    if lane.final == "mean":
                        total = total / tf.constant(group.size, lane.dtype)
                    totals.append(total)
            if not lane.split:
                whole[k] = totals
                continue
            sizes = [stop - start for start, stop in lane.slices]
            cells = [Cell(group.device(r), f"{key}/share", lane.dtype, sizes[r]) for r in ranks]
            share.append(cells[group.rank].assign(totals[0]))
            shares[k] = [cell.read() for cell in cells]
        return _Wires(fed, store, whole, share, shares)


class _Wires(NamedTuple):
    """The tensors and operations of one turn; dicts are from a lane's number to its slices."""

    fed: list[Any]
    store: list[Any]
    whole: dict[int, list[Any]]  # the results of lanes that each process adds up by itself
    share: list[Any]  # adds up and keeps this process's share of the others
    shares: dict[int, list[Any]]  # the results of those


class _Lane:
    """Arrays of one type and one operation, joined."""

    def __init__(self, dtype: str, final: str):
        self.dtype, self.final, self.size = np.dtype(dtype), final, 0

    def make(self, processes: int) -> None:
        """The memory, and the slices that a process adds up: all, or one for each process."""
        self.flat = self.result = np.zeros(self.size, self.dtype)
        self.split = processes > 2 and self.size >= _SMALL
        pieces = processes if self.split else 1
        bounds = [self.size * k // pieces for k in range(pieces + 1)]
        self.slices = list(itertools.pairwise(bounds))

    def receive(self, results: Sequence[np.ndarray]) -> None:
        """Takes the results of the slices."""
        if len(results) == 1:
            (self.result,) = results
            return
        for (start, stop), values in zip(self.slices, results, strict=True):
            self.flat[start:stop] = values


def _place(lanes: dict[tuple[str, str], _Lane], spec: Spec) -> tuple[_Lane, int]:
    """Where an array stands among those of its kind."""
    dtype = np.dtype(spec.dtype)
    floating = dtype.kind not in "biu"  # NumPy calls bfloat16 "V"
    if spec.how == "mean" and not floating:
        raise ValueError(f'"mean" is for floating-point arrays. Received: {spec}.')
    kind = ("float64" if dtype == np.float64 else "float32") if floating else "int64"
    final = "mean" if spec.how == "mean" else "sum"
    lane = lanes.setdefault((kind, final), _Lane(kind, final))
    start = lane.size
    lane.size += math.prod(spec.shape)
    return lane, start
