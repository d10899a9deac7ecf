"""Workers as turns on a virtual clock: any delay can be produced, and any run repeated.

One worker's round, from time t, with network latency L and compute time C per mini-batch:

    t                    fetch: the shard's weights at t are on the worker at t + L
    t + L                computes its mini-batches, from batches taken at t
    t + L + n C          sends, if a push is due
    t + L + n C + L      the shard applies the message; the next round begins

A round without a fetch saves the first L, one without a push the last. Turns at the same instant
run in the order in which they were put on the clock; a drain brings all workers to one instant.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tf_dsgd.algorithm import ExchangeRule
from tf_dsgd.engine.base import Engine, WorkerState, steps_tensor
from tf_dsgd.engine.program import Program
from tf_dsgd.engine.state import Store

Delay = Callable[[np.random.Generator], float]


@dataclasses.dataclass(order=True)
class _Turn:
    time: float
    order: int
    worker: WorkerState = dataclasses.field(compare=False)
    message: Any = dataclasses.field(compare=False, default=None)
    """(header, message) about to arrive; None where the worker is about to begin a round."""


class SimulatorEngine(Engine):
    """Deterministic asynchrony in one thread."""

    virtual_clock = True

    def __init__(
        self,
        store: Store,
        exchange: ExchangeRule,
        compute: Sequence[Delay],
        network: Sequence[Delay],
        seed: int,
    ):
        super().__init__(store, exchange)
        self._compute = compute
        self._network = network
        self._random = [
            np.random.default_rng(np.random.SeedSequence([seed, m]))
            for m in range(store.num_workers)
        ]
        self.now = 0.0
        """Virtual seconds since the strategy was made."""
        self._order = itertools.count()
        self._turns: list[_Turn] = []
        self._blocked: list[WorkerState] = []
        self._idle = list(self.workers)
        self._available = 0

    def clock(self) -> float:
        return self.now

    def prepare(self, program: Program) -> None:
        _ = program.work, program.collect, program.deliver
        _ = program.fetch, program.push, program.flush

    def grant(self, program: Program, stream: Any) -> None:
        self._switch(program, stream)
        self._available += 1
        for worker in self._idle:
            self._put(self.now, worker)
        self._idle = []
        self._advance(flushing=False)

    def settle(self) -> None:
        if self._program is None:
            return
        self._wake()
        self._advance(flushing=True)
        if self.program.flush is not None and any(w.clock for w in self.workers):
            self.program.flush()
        self._reset()

    def _put(self, time: float, worker: WorkerState, message: Any = None) -> None:
        heapq.heappush(self._turns, _Turn(time, next(self._order), worker, message))

    def _advance(self, flushing: bool) -> None:
        """Takes turns until one needs a batch that was not handed out yet."""
        worker = None
        try:
            while self._turns:
                turn = self._turns[0]
                worker = turn.worker
                if turn.message is None and not self._can_begin(worker, flushing):
                    if not flushing and self._may_begin(worker) and not self._waits(worker):
                        return  # for more batches
                    heapq.heappop(self._turns)
                    self.now = turn.time
                    self._rest(worker, flushing)
                    continue
                heapq.heappop(self._turns)
                self.now = turn.time
                if turn.message is None:
                    self._round(worker, flushing)
                else:
                    self._arrive(turn)
        except BaseException as error:
            turns, self._turns = sorted(self._turns), []
            self._available, self._blocked, self._idle = 0, [], list(self.workers)
            for turn in turns:
                if turn.message is not None:
                    self.program.deliver(*turn.message)
            if worker is not None:
                error.add_note(f"Raised on worker {worker.index}.")
            self._discard(None if worker is None else worker.index)
            raise

    def _waits(self, worker: WorkerState) -> bool:
        """Whether the exchange rule does not answer the worker's next fetch yet."""
        return (
            self.exchange.waits_for_version
            and worker.fetch_next
            and worker.pushed_at >= 0
            and not self.exchange.may_fetch(worker.pushed_at, int(self.program.shards[0].version))
        )

    def _can_begin(self, worker: WorkerState, flushing: bool) -> bool:
        return (
            self._may_begin(worker)
            and not self._waits(worker)
            and self._round_steps(worker, self._available, flushing) > 0
        )

    def _rest(self, worker: WorkerState, flushing: bool) -> None:
        """The worker waits for others, or, at a drain, sends what it has and is done."""
        if flushing and not self._available:
            if worker.unsent:
                self._send(worker, self.now)
            else:
                self._idle.append(worker)
            return
        self._blocked.append(worker)
        if not self._turns:  # everybody waits: make do with what was collected
            if self.program.flush is not None:
                self.program.flush()
            for blocked in self._blocked:
                blocked.pushed_at = -1
            self._wake()

    def _wake(self) -> None:
        for worker in sorted(self._blocked, key=lambda w: w.index):
            self._put(self.now, worker)
        self._blocked = []

    def _round(self, worker: WorkerState, flushing: bool) -> None:
        program, m = self.program, worker.index
        random = self._random[m]
        steps = self._round_steps(worker, self._available, flushing)
        self._available -= steps
        self._taken(worker, steps)
        time = self.now
        if worker.fetch_next:
            worker.watch.enter("fetch", at=time)
            program.fetch[m]()
            time += self._network[m](random)
        worker.watch.enter("compute", at=time)
        program.work[m](steps_tensor(steps), self._stream.queue)
        time += sum(self._compute[m](random) for _ in range(steps))
        worker.fetch_next = self.exchange.fetch_due(worker.step)
        if self.exchange.push_due(worker.step):
            self._send(worker, time)
        else:
            worker.watch.enter("wait", at=time)
            self._put(time, worker)

    def _send(self, worker: WorkerState, time: float) -> None:
        worker.watch.enter("push", at=time)
        message = self.program.collect[worker.index]()
        worker.unsent = 0
        self._put(time + self._network[worker.index](self._random[worker.index]), worker, message)

    def _arrive(self, turn: _Turn) -> None:
        worker = turn.worker
        worker.watch.enter("wait", at=turn.time)
        if self.exchange.waits_for_version:
            worker.pushed_at = int(self.program.shards[0].version)
        header, message = turn.message
        self.program.deliver(header, message)
        worker.clock += 1
        self._put(self.now, worker)
        self._wake()


def constant(seconds: float) -> Delay:
    """Always the same delay."""
    return lambda _: seconds


def exponential(mean_seconds: float) -> Delay:
    """An exponentially distributed delay."""
    return lambda random: float(random.exponential(mean_seconds))
