"""A simulated cluster whose workers die, stop and come back, and whose ps tasks die.

What becomes of a lost worker's mini-batches and messages is decided as on a cluster of processes:
its shards are fenced, and the numbers of the messages that they have tell what is done
(`Unapplied`). A message that some shards lack is computed again by another worker, and sent in the
lost one's name. So is a message that is late, where others wait for it (`LateWork`).
"""

from __future__ import annotations

import collections
import functools
import heapq
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tf_dsgd.algorithm import ExchangeRule
from tf_dsgd.delays import Delay
from tf_dsgd.engine.absence import LosesWorkers
from tf_dsgd.engine.base import WorkerState
from tf_dsgd.engine.late import Again, LateWork
from tf_dsgd.engine.schedule import BatchQueues
from tf_dsgd.engine.simulator import SimulatorEngine
from tf_dsgd.engine.state import Store, named
from tf_dsgd.engine.unapplied import CutOff, Unapplied
from tf_dsgd.faults import Fault
from tf_dsgd.resuming import advice, shards_lost


class _Event(NamedTuple):
    time: float
    order: int  # no two have the same, so that comparing goes no further
    happens: Callable[[], None]


class _Remainder(NamedTuple):
    """Stands for a message of which some shards have taken their part before."""

    message: Any
    shards: tuple[int, ...]
    """Those that have not."""


class FaultySimulatorEngine(LosesWorkers, SimulatorEngine):
    """Deterministic asynchrony with deterministic faults.

    Args:
        store: what workers own.
        exchange: the exchange rule.
        compute: virtual seconds of a mini-batch, for each worker.
        network: virtual seconds of a message, for each worker.
        seed: of these.
        faults: what happens.
        timeout_seconds: how many virtual seconds a worker may be stopped until it counts as lost.
        late_after_seconds: how many another waits for it until it is late; None for without end.
    """

    can_record = False

    def __init__(
        self,
        store: Store,
        exchange: ExchangeRule,
        compute: Sequence[Delay],
        network: Sequence[Delay],
        seed: int,
        faults: Iterable[Fault],
        timeout_seconds: float,
        late_after_seconds: float | None,
    ):
        store.may_be_late = late_after_seconds is not None
        super().__init__(store, exchange, compute, network, seed)
        self._faults = sorted(faults, key=lambda fault: fault.step)
        self._timeout = timeout_seconds
        self.struck: list[tuple[float, Fault]] = []
        """What has happened so far, and when."""
        self._taken_by = [0] * self.num_workers
        """Mini-batches that each worker has begun."""
        self._with_message: dict[int, Fault] = {}
        """By worker: what happens as its next message comes to the shards."""
        self._lost: dict[int, float] = {}
        self._events: list[_Event] = []
        self._event_order = itertools.count()
        self._unapplied = Unapplied(self.num_workers)
        self._cut_off: list[CutOff] = []
        self._lateness = LateWork(self.num_workers, late_after_seconds)
        self._drains = False
        self._returned: collections.deque[Any] = collections.deque()
        self._queues = BatchQueues(self.num_workers)

    def state(self) -> dict[str, np.ndarray]:
        # Of workers that were overtaken: when what they have under way is refused.
        refused_at = {turn.worker.index: turn.time for turn in sorted(self._turns)}
        return super().state() | {"late_work": self._lateness.state(refused_at)}

    def restore(self, state: Mapping[str, np.ndarray]) -> None:
        super().restore(state)
        if "late_work" not in state:
            return
        for m, time in self._lateness.restore(state["late_work"]).items():
            self._idle.remove(self.workers[m])
            self._put(time, self.workers[m])

    def restored(self, numbers: Sequence[int], handed_out: int) -> None:
        super().restored(numbers, handed_out)
        overtaken = self._lateness.overtaken  # they number the message that others have sent
        self.store.restore_sequences([n - (m in overtaken) for m, n in enumerate(numbers)])

    # -- turns ------------------------------------------------------------------------------

    def _advance(self, flushing: bool) -> None:
        super()._advance(flushing)
        self._drains = flushing
        while not self._turns and self._is_stuck(flushing):
            self._check_somebody_comes_back()
            self._next_event()
            super()._advance(flushing)

    def _nobody_has_a_turn(self) -> None:
        if not self._events and len(self._lost) < self.num_workers:
            super()._nobody_has_a_turn()

    def _check_somebody_comes_back(self) -> None:
        left = self._available + sum(len(part) for cut in self._cut_off for part in cut.held)
        if not self._events:
            raise RuntimeError(
                f"All workers were lost, and none comes back, to do {left} mini-batches that were "
                "handed out. Give one of them back_after."
            )
        if len(self._lost) < self.num_workers:
            return
        if self._events[0].time - max(self._lost.values()) > self._timeout:
            raise TimeoutError(
                f"All workers were lost, and none came back within {self._timeout:g} virtual "
                f"seconds, to do {left} mini-batches that were handed out. Allow more time with "
                "tf_dsgd.SimulatedCluster(worker_timeout_seconds=...). "
                f"{advice(self.last_backup)}"
            )

    def _is_stuck(self, flushing: bool) -> bool:
        if self._lateness.unfinished:
            return True
        unfinished = bool(self._available or self._cut_off)
        return unfinished and (flushing or len(self._lost) == self.num_workers)

    def _next_turn(self, flushing: bool) -> bool:
        turn = self._turns[0]
        self._drains = flushing
        if flushing and self._waits_in_vain():
            return False
        if self._events and self._events[0].time <= turn.time:
            self._next_event()
            return True
        worker = turn.worker
        if turn.message is None and worker.index in self._lateness.overtaken:
            self._take_turn()
            self._take_in()
            self._deliver(self.program.collect[worker.index]())  # it is refused
            self._catch_up(worker)
            return True
        cut_off = None if turn.message is not None else self._to_complete(worker)
        if cut_off is None:
            return super()._next_turn(flushing)
        self._take_turn()
        self._complete(worker, cut_off)
        return True

    def _waits_in_vain(self) -> bool:
        """Whether nobody is left but workers that were overtaken."""
        if self._available or self._cut_off or self._lateness.unfinished:
            return False
        return all(turn.worker.index in self._lateness.overtaken for turn in self._turns)

    def _take_turn(self) -> None:
        self.now = heapq.heappop(self._turns).time

    def _next_event(self) -> None:
        event = heapq.heappop(self._events)
        self.now = max(self.now, event.time)
        event.happens()

    def _after(self, seconds: float, happens: Callable[[], None]) -> None:
        event = _Event(self.now + seconds, next(self._event_order), happens)
        heapq.heappush(self._events, event)

    def _round(self, worker: WorkerState, steps: int) -> None:
        fault = self._due(worker, steps)
        if fault is not None and fault.phase == "fetch":
            self._put(self.now, worker)
            self._strike(worker, fault)
            return
        self._taken_by[worker.index] += steps
        self._lateness.computes(worker.index, self.now)
        super()._round(worker, steps)
        for waiting in [*self._blocked, *self._idle]:
            self._watch(waiting)
        if fault is not None and fault.phase == "compute":
            self._strike(worker, fault)
        elif fault is not None:
            self._with_message[worker.index] = fault

    def _work(self, m: int, fetches: bool, sends: bool, steps: int, queue: Any) -> Any:
        """By calls of their own: nothing can be traced once variables of lost workers are gone."""
        self._take_in()
        version = self.program.fetch[m]() if fetches else None
        self.program.work[m](self._count(steps), queue)
        return version, *(self.program.collect[m]() if sends else ())

    def _batches(self, worker: int, steps: int) -> Any:
        drawn = [self._draw() for _ in range(steps)]
        self._unapplied.held[worker].append(drawn)
        return self._queued(worker, drawn)

    def _draw(self) -> Any:
        """A mini-batch: of a lost worker, if there is one."""
        if self._returned:
            return self._returned.popleft()
        return tf.raw_ops.QueueDequeueV2(handle=self._stream.queue, component_types=[tf.variant])

    def _queued(self, worker: int, batches: Iterable[Any]) -> tf.Tensor:
        queue = self._queues.of(worker)
        for batch in batches:
            tf.raw_ops.QueueEnqueueV2(handle=queue, components=batch)
        return queue

    def _arrive(self, turn: Any) -> None:
        worker, message = turn.worker, turn.message
        fault = self._with_message.pop(worker.index, None)
        if fault is None and worker.index in self._lateness.overtaken:
            self._take_in()
            self._deliver(message)  # it is refused, as far as it was not taken in before
            self._catch_up(worker)
            return
        if fault is None and not isinstance(message, _Remainder):
            super()._arrive(turn)
            self._unapplied.acknowledge(worker.index)
            self._lateness.has_sent(worker.index, self.now)
            return
        self._take_in()
        if fault is None:
            self._deliver(message)
            self._put(self.now, worker)
            self._acknowledge(worker)
            return
        shards = tuple(range(len(self.shards)))
        half = len(shards) if fault.phase == "lock" else len(shards) // 2
        self._deliver(_Remainder(message, shards[:half]))
        rest = _Remainder(message, shards[half:])
        self._put(self.now, worker, rest)
        self._strike(worker, fault)
        if not fault.stops and not half:
            self._deliver(rest)  # after its sender was replaced

    def _acknowledge(self, worker: WorkerState) -> None:
        worker.watch.enter("wait", at=self.now)
        worker.clock += 1
        self._unapplied.acknowledge(worker.index)
        self._lateness.has_sent(worker.index, self.now)
        self._wake()

    def _deliver(self, message: Any) -> None:
        if not isinstance(message, _Remainder):
            super()._deliver(message)
        elif message.shards:
            self.program.deliver_to(message.shards)(*message.message)

    # -- faults -----------------------------------------------------------------------------

    def _due(self, worker: WorkerState, steps: int) -> Fault | None:
        """What happens in a round of so many mini-batches that begins now."""
        done = self._taken_by[worker.index]
        for fault in self._faults:
            if fault.job == "ps" and fault.step <= self.handed_out:
                self._faults.remove(fault)
                self.struck.append((self.now, fault))
                raise shards_lost([f"/job:ps/task:{fault.index}"], self.last_backup)
            if (fault.job, fault.index) == ("worker", worker.index) and fault.step < done + steps:
                self._faults.remove(fault)
                return fault
        return None

    def _strike(self, worker: WorkerState, fault: Fault) -> None:
        self.struck.append((self.now, fault))
        if not fault.stops:
            self._lose(worker)
            if fault.seconds is not None:
                self._after(fault.seconds, functools.partial(self._come_back, worker, []))
            return
        seconds = fault.seconds or 0.0
        for place, turn in enumerate(self._turns):
            if turn.worker is worker:
                self._turns[place] = turn._replace(time=turn.time + seconds)
        heapq.heapify(self._turns)
        if seconds > self._timeout:
            goes_on = self.now + seconds
            self._after(self._timeout, functools.partial(self._time_out, worker, goes_on))

    def _time_out(self, worker: WorkerState, goes_on: float) -> None:
        late = self._lose(worker)
        self._after(goes_on - self.now, functools.partial(self._come_back, worker, late))

    def _lose(self, worker: WorkerState) -> list[Any]:
        """Fences a worker, gives its mini-batches to others; gives its messages under way."""
        m = worker.index
        self._take_in()
        incarnation = self.store.incarnations[m] + 1
        number = tf.constant([m, incarnation], tf.int64)
        last = [int(shard.fence(number[0], number[1])) for shard in self.shards]
        self.store.lose(m)
        self.store.incarnations[m] = incarnation
        self._lateness.forget(m)
        clock = worker.clock - self._unapplied.applied[m]
        parts, cut_off = self._unapplied.lose(m, last)
        if cut_off is not None:
            self._cut_off.append(cut_off)
        batches = [batch for part in parts for batch in part]
        self._returned.extend(batches)
        self._available += len(batches)
        self.handed_out -= len(batches)
        worker.reset()
        worker.clock = clock + self._unapplied.applied[m]  # as many rounds have it in them
        worker.watch.leave()
        self._lost[m] = self.now
        self._with_message.pop(m, None)
        late = [turn.message for turn in self._turns if turn.worker is worker]
        self._turns = [turn for turn in self._turns if turn.worker is not worker]
        heapq.heapify(self._turns)
        self._blocked = [w for w in self._blocked if w is not worker]
        self._wake()
        for idle in self._idle:
            if idle is not worker:
                self._put(self.now, idle)
        self._idle = []
        return [message for message in late if message is not None]

    def _come_back(self, worker: WorkerState, late: Iterable[Any]) -> None:
        """A worker joins again; what it had sent comes first, and is refused."""
        m = worker.index
        for message in late:
            self._deliver(message)
        self.store.renew(m, self.store.incarnations[m], self._unapplied.applied[m])
        worker.clock = max(worker.clock, self._slowest())
        del self._lost[m]
        worker.watch.enter("wait", at=self.now)
        self._put(self.now, worker)
        self._wake()

    # -- messages that were cut off ---------------------------------------------------------

    def _limit(self, worker: WorkerState) -> int:
        if any(cut_off.worker == worker.index for cut_off in self._cut_off):
            return 0  # a message with a higher number would make its shards refuse that one
        return 0 if self._lateness.stays_behind(worker.index) else super()._limit(worker)

    def _to_complete(self, worker: WorkerState) -> CutOff | None:
        if not self._cut_off or worker.unsent or not self._may_begin(worker):
            return None
        # One who came back completes its own, before it numbers messages anew.
        mine = (c for c in self._cut_off if c.worker == worker.index or c.worker in self._lost)
        return next(mine, None)

    def _complete(self, worker: WorkerState, cut_off: CutOff) -> None:
        """Computes a message again, and sends it, at once, as the one that was cut off."""
        self._cut_off.remove(cut_off)
        lost = cut_off.worker
        again = Again(lost, self.store.incarnations[lost], cut_off.sequence, cut_off.held)
        self._take_in()
        self.program.fetch[worker.index]()
        message, computed = self._compute_again(worker, again)
        self._deliver(message)
        self._put(computed, worker)

    def _compute_again(self, worker: WorkerState, again: Again) -> tuple[Any, float]:
        """Another worker's message, after a fetch, and when it is computed."""
        m, steps = worker.index, 0
        for part in again.held:
            self.program.work[m](self._count(len(part)), self._queued(m, part))
            steps += len(part)
        heads, message = self.program.collect[m]()
        self._unapplied.applied[m] += 1  # its own next number: nothing was sent under it
        self._unused[m] += 1
        worker.fetch_next = True
        return (named(heads, again.name), message), self._computed(worker, True, steps)

    # -- messages that are late -------------------------------------------------------------

    def _rest(self, worker: WorkerState, flushing: bool) -> None:
        super()._rest(worker, flushing)
        if worker in self._blocked or worker in self._idle:
            self._lateness.waits(worker.index, self.now)
            self._watch(worker)

    def _watch(self, worker: WorkerState) -> None:
        """Has a worker that waits look again when what it waits for is late."""
        due = self._lateness.due(worker.index) if self.program.can_be_late else None
        if due is not None:
            self._after(due[0] - self.now, functools.partial(self._stand_in, worker, due))

    def _stand_in(self, worker: WorkerState, due: tuple[float, int]) -> None:
        """A worker has waited until then: it computes what that one is late with."""
        m, late = worker.index, due[1]
        waiting = self._blocked if worker in self._blocked else self._idle
        if self._lateness.due(m) != due or worker not in waiting or worker.unsent:
            return  # one of the two went on
        if self._may_begin(worker) and not (self._drains and not self._available):
            return
        again = self._late_message(late)
        self._lateness.stands_in(m, again)
        waiting.remove(worker)
        self._take_in()
        self.program.fetch_as[m](tf.constant(late, tf.int64))
        message, computed = self._compute_again(worker, again)
        worker.watch.enter("push", at=computed)
        arrives = computed + self._network[m].draw(self._random[m], computed)
        happens = functools.partial(self._has_stood_in, worker, again, message)
        self._after(arrives - self.now, happens)

    def _has_stood_in(self, worker: WorkerState, again: Again, message: Any) -> None:
        if not self._lateness.has_stood_in(worker.index):
            return  # an error has ended training meanwhile
        self._take_in()
        self._deliver(message)
        self._overtake(again)
        worker.watch.enter("wait", at=self.now)
        self._put(self.now, worker)
        self._wake()

    def _catch_up(self, worker: WorkerState) -> None:
        super()._catch_up(worker)
        worker.watch.enter("wait", at=self.now)
        self._put(self.now, worker)
        self._wake()

    def _discard(self, failed: int | None) -> None:
        self._cut_off = []
        self._returned.clear()
        self._queues = BatchQueues(self.num_workers)
        self._unapplied.clear()
        for m in self._lateness.clear():  # what they have accrued was sent by others: it is refused
            self.program.push[m](tf.constant(True))
        self._with_message = {}
        self._idle = [worker for worker in self._idle if worker.index not in self._lost]
        super()._discard(failed)
