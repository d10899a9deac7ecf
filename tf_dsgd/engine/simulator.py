"""Workers as turns on a virtual clock: any delay can be produced, and any run repeated.

One worker's round, from time t, with network latency L and compute time C per mini-batch:

    t                    fetch: the shard's weights at t are on the worker at t + L
    t + L                computes its mini-batches, from batches taken at t
    t + L + n C          sends, if a push is due
    t + L + n C + L      the shard applies the message; the next round begins

A round without a fetch saves the first L, one without a push the last. Turns at the same instant
run in the order in which they were put on the clock; a drain brings all workers to one instant,
from which they go on in the order of their numbers.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tf_dsgd.algorithm import ExchangeRule
from tf_dsgd.delays import Delay
from tf_dsgd.engine.base import Engine, WorkerState, steps_tensor
from tf_dsgd.engine.interrupts import held_back
from tf_dsgd.engine.program import Program
from tf_dsgd.engine.snapshot import Snapshot
from tf_dsgd.engine.state import Store

_WORD = (1 << 64) - 1


class _Turn(NamedTuple):
    time: float
    order: int  # no two turns have the same, so that comparing goes no further
    worker: WorkerState
    message: Any = None
    """(header, message) about to arrive; None where the worker is about to begin a round."""


class SimulatorEngine(Engine):
    """Deterministic asynchrony in one thread."""

    can_record = True
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
        self._arrived: Any = None
        """(header, message) that came to the shard, which takes it in before anything else."""
        self._counts: dict[int, Any] = {}

    def clock(self) -> float:
        return self.now

    def state(self) -> dict[str, np.ndarray]:
        words = []
        for random in self._random:
            drawn = random.bit_generator.state
            numbers = drawn["state"]["state"], drawn["state"]["inc"]
            halves = [part for n in numbers for part in (n >> 64, n & _WORD)]
            words.append([*halves, drawn["has_uint32"], drawn["uinteger"]])
        return {"virtual_seconds": np.array(self.now), "delays": np.array(words, np.uint64)}

    def restore(self, state: Mapping[str, np.ndarray]) -> None:
        if not {"delays", "virtual_seconds"} <= state.keys():
            return  # of a run that was not simulated
        self.now = float(state["virtual_seconds"])
        for random, words in zip(self._random, state["delays"].tolist(), strict=True):
            a, b, c, d, has, uinteger = words
            random.bit_generator.state = {
                **random.bit_generator.state,
                "state": {"state": a << 64 | b, "inc": c << 64 | d},
                "has_uint32": has,
                "uinteger": uinteger,
            }

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
        self._take_in()
        self._idle.sort(key=lambda worker: worker.index)  # whatever came before
        self._come_to_rest()

    def _take_in(self) -> None:
        """The shard takes the message that came last, if it has not."""
        message, self._arrived = self._arrived, None
        if message is not None:
            self._deliver(message)

    def _deliver(self, message: Any) -> None:
        """The shard takes a message in."""
        self.program.deliver(*message)

    @contextlib.contextmanager
    def explained(self) -> Iterator[None]:
        self._take_in()
        yield

    def snapshot(self) -> Snapshot:
        self._take_in()
        return super().snapshot()

    def _put(self, time: float, worker: WorkerState, message: Any = None) -> None:
        heapq.heappush(self._turns, _Turn(time, next(self._order), worker, message))

    def _advance(self, flushing: bool) -> None:
        """Takes turns until one needs a batch that was not handed out yet."""
        worker = None
        try:
            with held_back() as let_interrupts_through:
                while self._turns:
                    worker = self._turns[0].worker
                    taken = self._next_turn(flushing)
                    worker = None
                    if not taken:
                        break
                    let_interrupts_through()
                if flushing and self._available and not self._turns:
                    self._nobody_has_a_turn()
        except BaseException as error:
            self._take_in()
            turns, self._turns = sorted(self._turns), []
            self._available, self._blocked, self._idle = 0, [], list(self.workers)
            for turn in turns:
                if turn.message is not None:
                    self._deliver(turn.message)
            if worker is not None:
                error.add_note(f"Raised on worker {worker.index}.")
            self._discard(None if worker is None else worker.index)
            raise

    def _nobody_has_a_turn(self) -> None:
        """Called at a drain where batches are left and all workers are blocked."""
        raise self._nobody_begins(self._blocked)

    def _next_turn(self, flushing: bool) -> bool:
        """Takes the earliest turn; False if it needs a batch that was not handed out yet."""
        turn = self._turns[0]
        worker = turn.worker
        steps = 0 if turn.message is not None else self._can_take(worker, flushing)
        waits = turn.message is None and not steps
        if waits and not flushing and self._may_begin(worker):
            return False
        heapq.heappop(self._turns)
        self.now = turn.time
        if turn.message is not None:
            self._arrive(turn)
        elif steps:
            self._round(worker, steps)
        else:
            self._rest(worker, flushing)
        return True

    def _can_take(self, worker: WorkerState, flushing: bool) -> int:
        """How many batches the worker takes if it begins a round now."""
        if not self._may_begin(worker):
            return 0
        return self._round_steps(worker, self._available, flushing)

    def _rest(self, worker: WorkerState, flushing: bool) -> None:
        """The worker waits for others, or, at a drain, sends what it has and is done."""
        if flushing and not self._available:
            if worker.unsent:
                self._send(worker, self.now)
            else:
                self._idle.append(worker)
            return
        self._blocked.append(worker)

    def _wake(self) -> None:
        for worker in sorted(self._blocked, key=lambda w: w.index):
            self._put(self.now, worker)
        self._blocked = []

    def _round(self, worker: WorkerState, steps: int) -> None:
        m, fetches = worker.index, worker.fetch_next
        self._available -= steps
        self._taken(worker, steps)
        queue = self._batches(m, steps)
        worker.fetch_next = self.exchange.fetch_due(worker.step)
        sends = self.exchange.push_due(worker.step)
        version, *message = self._work(m, fetches, sends, steps, queue)
        if self.recorder is not None:
            if fetches:
                self.recorder.note(m, "fetch", version)
            self.recorder.stepped(m, steps)
        time = self._computed(worker, fetches, steps)
        if sends:
            self._sent(worker, time, message)
        else:
            worker.watch.enter("wait", at=time)
            self._put(time, worker)

    def _batches(self, worker: int, steps: int) -> Any:
        """The queue from which the worker takes its next mini-batches."""
        if self.recorder is None:
            return self._stream.queue
        self.recorder.take(worker, steps, self._stream.queue)
        return self.recorder.queues.of(worker)

    def _work(self, m: int, fetches: bool, sends: bool, steps: int, queue: Any) -> Any:
        """Takes in what arrived, fetches, does local steps, collects what is sent: in one call."""
        if self._arrived is None:
            return self.program.turn(fetches, sends)[m](self._count(steps), queue)
        message = tf.nest.flatten(self._arrived, expand_composites=True)
        self._arrived = None
        turn = self.program.turn(fetches, sends, arrived=True)[m]
        return turn(self._count(steps), queue, *message)

    def _count(self, steps: int) -> Any:
        if steps not in self._counts:
            self._counts[steps] = steps_tensor(steps)
        return self._counts[steps]

    def _computed(self, worker: WorkerState, fetches: bool, steps: int) -> float:
        """When a round that begins now has computed its mini-batches."""
        m = worker.index
        random, time, spent = self._random[m], self.now, 0.0
        if fetches:
            worker.watch.enter("fetch", at=time)
            time += self._network[m].draw(random, time)
        worker.watch.enter("compute", at=time)
        for _ in range(steps):
            spent += self._compute[m].draw(random, time + spent)
        return time + spent

    def _note(self, worker: int, action: str, version: Any = None) -> None:
        if self.recorder is not None:
            self.recorder.note(worker, action, version)

    def _send(self, worker: WorkerState, time: float) -> None:
        self._sent(worker, time, self.program.collect[worker.index]())

    def _sent(self, worker: WorkerState, time: float, message: Any) -> None:
        m = worker.index
        worker.watch.enter("push", at=time)
        worker.unsent = 0
        self._put(time + self._network[m].draw(self._random[m], time), worker, message)

    def _arrive(self, turn: _Turn) -> None:
        worker = turn.worker
        worker.watch.enter("wait", at=turn.time)
        self._take_in()
        self._arrived = turn.message
        self._note(worker.index, "push")
        worker.clock += 1
        self._put(self.now, worker)
        self._wake()
