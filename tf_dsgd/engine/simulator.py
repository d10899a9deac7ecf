"""Workers as turns on a virtual clock: any delay can be produced, and any run repeated.

One worker's round, from time t, with network time L and compute time C per mini-batch:

    t                    fetch: the shard's weights at t are on the worker at t + L
    t + L                computes its mini-batches, from batches taken at t
    t + L + n C          sends, if a push is due
    t + L + n C + L      the shard applies the message; the next round begins

A round without a fetch saves the first L, one without a push the last. After a drain all go on from
one instant, in the order of their numbers. Who does what next is the scheduler's, as on a cluster.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tf_dsgd._tf_errors import said_in_short
from tf_dsgd.engine import simulated_state
from tf_dsgd.engine.base import Engine, nothing_to_explain, steps_tensor
from tf_dsgd.engine.faults import Faults, FaultScript, InParts
from tf_dsgd.engine.interrupts import held_back
from tf_dsgd.engine.links import Delay, Links
from tf_dsgd.engine.program import Program
from tf_dsgd.engine.schedule import BatchQueues
from tf_dsgd.engine.scheduler import Scheduler
from tf_dsgd.engine.snapshot import Snapshot
from tf_dsgd.engine.sources import Queue
from tf_dsgd.engine.state import Store, named
from tf_dsgd.engine.virtual_clock import Turn, VirtualClock
from tf_dsgd.engine.work import Next, Source, What
from tf_dsgd.membership.lease import Lease, LeaseState
from tf_dsgd.membership.task import Task


class SimulatorEngine(Engine):
    """Deterministic asynchrony in one thread, with deterministic faults.

    Args:
        store: what workers own.
        scheduler: who does what next.
        compute: virtual seconds of a mini-batch, for each worker.
        network: virtual seconds of what workers send and fetch.
        seed: of these.
        faults: what befalls workers and shards; None where nothing does, nor can.
    """

    virtual_clock = True

    def __init__(
        self,
        store: Store,
        scheduler: Scheduler,
        compute: Sequence[Delay],
        network: Links,
        seed: int,
        faults: FaultScript | None,
    ):
        super().__init__(store, scheduler)
        self._compute = compute
        self._network = network
        self._random = [
            np.random.default_rng(np.random.SeedSequence([seed, m]))
            for m in range(store.num_workers)
        ]
        self._faults = None if faults is None else Faults(self, faults)
        self.turns = VirtualClock()
        """What is still to happen."""
        self._blocked: list[Task] = []
        self._idle = list(self.tasks)
        self._arrived: Any = None
        """What came to the shard, which takes it in before anything else."""
        self._queues = BatchQueues(store.num_workers)
        self._counts: dict[int, Any] = {}

    @property
    def can_record(self) -> bool:
        return self._faults is None

    @property
    def struck(self) -> list[tuple[float, Any]]:
        """The faults that have happened so far, and when."""
        return [] if self._faults is None else self._faults.script.struck

    @property
    def now(self) -> float:
        """Virtual seconds since the strategy was made."""
        return self.turns.now

    def clock(self) -> float:
        return self.now

    def state(self) -> dict[str, np.ndarray]:
        state = {
            "virtual_seconds": np.array(self.now),
            "delays": simulated_state.random_state(self._random),
        }
        if self._faults is not None:
            state["late_work"] = simulated_state.late_work(self.tasks, self.turns.turns)
        return state

    def check(self, state: Mapping[str, np.ndarray]) -> None:
        """Anything can be set: what another engine wrote has nothing of this one's."""

    def restore(self, state: Mapping[str, np.ndarray]) -> None:
        if not {"delays", "virtual_seconds"} <= state.keys():
            return  # of a run that was not simulated
        self.turns.now = float(state["virtual_seconds"])
        simulated_state.restore_random_state(self._random, state["delays"])
        if self._faults is not None and "late_work" in state:
            for task, time in simulated_state.restore_late_work(self.scheduler, state["late_work"]):
                self._idle.remove(task)
                self.turns.put(time, task)

    def quiesce(self) -> None:
        for turn in self.turns.under_way():
            self._refuse(turn.task, turn.message)
        self.turns.turns = []
        self._idle = list(self.scheduler.present)

    @contextlib.contextmanager
    def explained(self) -> Iterator[None]:
        self.unless_another_does(self.take_in)
        yield

    def tracing(self) -> contextlib.AbstractContextManager[None]:
        return nothing_to_explain()

    def _source(self, stream: Any) -> Source | None:
        if self._faults is None:
            return None  # workers' own functions take from the queue
        return Queue(stream.queue, contextlib.nullcontext, stacked=False)

    def _at_rest(self, task: Task, action: Callable[[], Any]) -> None:
        action()

    def snapshot(self) -> Snapshot:
        self.take_in()
        return self.counted()

    def prepare(self, program: Program) -> None:
        _ = program.work, program.collect, program.deliver
        _ = program.fetch, program.push, program.flush, program.show, program.begin_anew

    def _grant(self, program: Program, stream: Any) -> None:
        self._switch(program, stream)
        self.scheduler.available += 1
        for task in self._idle:
            self.turns.put(self.now, task)
        self._idle = []
        self._advance()

    def _await_begun(self, program: Program) -> None:
        """A round is computed when it begins."""

    def _drain(self) -> None:
        if self._program is None:
            return
        self.wake()
        self.scheduler.draining = True
        try:
            self._advance()
        finally:
            self.scheduler.draining = False
        self.take_in()
        self._idle.sort(key=lambda task: task.index)  # whatever came before
        self._come_to_rest()

    # -- the clock --------------------------------------------------------------------------

    def _advance(self) -> None:
        """Takes turns until one needs a batch that was not handed out yet."""
        self.program.running.begin()
        self._take_turns()
        while self._faults is not None and not self.turns.turns and self._is_stuck():
            self._faults.check_somebody_comes_back()
            self.turns.take_event()
            self._take_turns()

    def _take_turns(self) -> None:
        task = None
        try:
            with said_in_short(), held_back() as let_interrupts_through:
                while self.turns.turns:
                    task = self.turns.turns[0].task
                    taken = self._next_turn()
                    task = None
                    if not taken:
                        break
                    let_interrupts_through()
                left = self.scheduler.draining and self.scheduler.available
                nothing_comes = not self.turns.turns and not self.turns.events
                if left and nothing_comes and self.scheduler.present:
                    raise self.nobody_begins()
        except BaseException as error:
            if task is not None:
                error.add_note(f"Raised on worker {task.index}.")
            self._give_up(None if task is None else task.index)
            raise

    def _give_up(self, failed: int | None) -> None:
        """After an error: what is under way arrives, and what is left is dropped."""
        self.mend()
        self.take_in()
        for turn in self.turns.under_way():
            if turn.lease is not None:
                self.deliver(turn.message)
                self.scheduler.counted(turn.task, turn.lease, self.now)
        self.turns.turns, self._blocked, self._queues = [], [], BatchQueues(self.num_workers)
        if self._faults is not None:
            self._faults.script.with_message.clear()
        self._discard(failed)
        self._idle = list(self.scheduler.present)

    def _is_stuck(self) -> bool:
        """Whether only an event can let anybody go on."""
        scheduler = self.scheduler
        left = scheduler.available or scheduler.orphans
        waits = left and (scheduler.draining or not scheduler.present)
        return bool(waits) or any(t.running is not None for t in self.tasks)

    def _waits_in_vain(self) -> bool:
        """Whether nobody is left but workers whose message another has sent."""
        return not self.scheduler.unfinished and all(
            t.task.owes is not None for t in self.turns.turns
        )

    # -- turns ------------------------------------------------------------------------------

    def _next_turn(self) -> bool:
        """Takes the earliest turn; False if it needs a batch that was not handed out yet."""
        turn, scheduler = self.turns.turns[0], self.scheduler
        if self._faults is not None and scheduler.draining and self._waits_in_vain():
            return False
        if self.turns.is_event_next():
            self.turns.take_event()
            return True
        task = turn.task
        if turn.lease is not None:
            self._arrive(self.turns.take_turn())
            return True
        scheduler.ends(task)
        other = scheduler.for_others(task, None)
        if other is not None:
            self.turns.take_turn()
            self._do(task, other)
            return True
        may_begin = scheduler.may_begin(task)
        steps = scheduler.round_steps(task) if may_begin else 0
        must_send = task.is_shared and task.open is not None
        if may_begin and not steps and not scheduler.draining and not must_send:
            return False
        self.turns.take_turn()
        if steps:
            self._round(task, steps)
        elif must_send:
            self._send(task, self.now)
        else:
            self._rest(task)
        return True

    def _do(self, task: Task, other: Next) -> None:
        """What a worker does besides its own mini-batches."""
        if other.what is What.SEND_REFUSED:
            self.take_in()
            self._refuse(task, self.program.collect[task.index]())
            self.watches[task.index].enter("wait", at=self.now)
            self.turns.put(self.now, task)
            self.wake()
        elif other.lease is not None and other.what is What.COMPLETE:
            self._complete(task, other.lease)
        elif other.lease is not None:
            self._back_up(task, other.lease)

    def _rest(self, task: Task) -> None:
        """The worker waits for others, or, at a drain, sends what it has and is done."""
        if self.scheduler.draining and not self.scheduler.available:
            if task.open is not None:
                self._send(task, self.now)
                return
            self._idle.append(task)
        else:
            self._blocked.append(task)
        self.scheduler.waits(task, self.now)
        self._watch(task)

    def wake(self) -> None:
        for task in sorted(self._blocked, key=lambda t: t.index):
            self.turns.put(self.now, task)
        self._blocked = []
        self.turns.release()

    def _round(self, task: Task, steps: int) -> None:
        fault = None if self._faults is None else self._faults.due(task, steps)
        if self._faults is not None and fault is not None and fault.phase == "fetch":
            self.turns.put(self.now, task)
            self._faults.strike(task, fault)
            return
        m, fetches, exchange = task.index, task.fetch_next, self.scheduler.exchange
        lease = self.scheduler.taken(task, steps)
        if exchange.in_turn:
            self.wake()
        self.scheduler.begins(task, self.now)
        queue = self._batches(lease, steps)
        task.fetch_next = exchange.fetch_due(task.step)
        sends = exchange.push_due(task.step)
        version, *message = self._work(m, fetches, sends, steps, queue)
        if self.recorder is not None:
            if fetches:
                self.recorder.note(m, "fetch", version)
            self.recorder.stepped(m, steps)
        time = self._computed(task, fetches, steps)
        if sends:
            self._sent(task, time, message)
        else:
            self.watches[m].enter("wait", at=time)
            self.turns.put(time, task)
        for each in [*self._blocked, *self._idle]:
            self._watch(each)
        if self._faults is not None and fault is not None:
            self._faults.after_round(task, fault)

    def _batches(self, lease: Lease, steps: int) -> Any:
        """The queue from which a worker takes its next mini-batches."""
        if self._faults is not None:
            return self._queued(lease.owner, lease.parts[-1])
        if self.recorder is None:
            return self._stream.queue
        self.recorder.take(lease.owner, steps, self._stream.queue)
        return self.recorder.queues.of(lease.owner)

    def _queued(self, worker: int, batches: Iterable[Any]) -> tf.Tensor:
        queue = self._queues.of(worker)
        for batch in batches:
            tf.raw_ops.QueueEnqueueV2(handle=queue, components=[batch])
        return queue

    def _work(self, m: int, fetches: bool, sends: bool, steps: int, queue: Any) -> Any:
        """Takes in what arrived, fetches, does local steps, collects what is sent."""
        program, count = self.program, self._count(steps)
        if self._faults is not None:
            # By calls of their own: nothing can be traced once variables of lost workers are gone.
            self.take_in()
            version = program.fetch[m]() if fetches else None
            program.work[m](count, queue)
            return version, *(program.collect[m]() if sends else ())
        if self._arrived is None:
            return program.turn(fetches, sends)[m](count, queue)
        message = tf.nest.flatten(self._arrived, expand_composites=True)
        self._arrived = None
        return program.turn(fetches, sends, arrived=True)[m](count, queue, *message)

    def _count(self, steps: int) -> Any:
        if steps not in self._counts:
            self._counts[steps] = steps_tensor(steps)
        return self._counts[steps]

    def _computed(self, task: Task, fetches: bool, steps: int) -> float:
        """When a round that begins now has computed its mini-batches."""
        m, watch = task.index, self.watches[task.index]
        random, time, spent = self._random[m], self.now, 0.0
        if fetches and self.program.show is None:  # peers have what came
            watch.enter("fetch", at=time)
            time += self._network.fetch(m, random, time)
        watch.enter("compute", at=time)
        for _ in range(steps):
            spent += self._compute[m].draw(random, time + spent)
        return time + spent

    def _send(self, task: Task, time: float) -> None:
        self.scheduler.begins(task, time)
        self._sent(task, time, self.program.collect[task.index]())

    def _sent(self, task: Task, time: float, message: Any) -> None:
        m = task.index
        self.watches[m].enter("push", at=time)
        lease = self.scheduler.collected(task, message)
        arrives = time + self._network.message(m, self._random[m], time, message)
        self.turns.put(arrives, task, lease, message)

    # -- messages ---------------------------------------------------------------------------

    def take_in(self) -> None:
        """The shard takes the message that came last, if it has not."""
        message, self._arrived = self._arrived, None
        if message is not None:
            self.deliver(message)

    def deliver(self, message: Any) -> None:
        """The shards take a message in, or those that lack it."""
        if not isinstance(message, InParts):
            self.program.deliver(*message)
        elif message.shards:
            self.program.deliver_to(message.shards)(*message.message)

    def _arrive(self, turn: Turn) -> None:
        task, lease, message = turn.task, turn.lease, turn.message
        if lease in task.leases and not self.scheduler.may_send(task):
            self.turns.hold(turn)
            return
        self.take_in()
        if self._faults is not None and self._faults.cuts_off(turn):
            return
        self.watches[task.index].enter("wait", at=self.now)
        if lease is None or lease.state is LeaseState.SUPERSEDED:
            self._refuse(task, message)  # as far as it was not taken in before
        elif isinstance(message, InParts):
            self.deliver(message)
            self.scheduler.counted(task, lease, self.now)
        else:
            self._arrived = message
            self.note(task, "push")
            self.scheduler.counted(task, lease, self.now)
        self.scheduler.ends(task)
        self.turns.put(self.now, task)
        self.wake()

    def _refuse(self, task: Task, message: Any) -> None:
        """A straggler has sent its message, which is refused: a backup task was first."""
        if message is None:
            message = self.program.collect[task.index]()
        self.deliver(message)
        self.scheduler.caught_up(task)

    def leave(self, task: Task) -> list[Any]:
        """A worker is lost: it takes no more turns; gives its messages that were on their way."""
        on_their_way = self.turns.drop(task)
        self._blocked = [t for t in self._blocked if t is not task]
        self.wake()
        for idle in self._idle:
            if idle is not task:
                self.turns.put(self.now, idle)
        self._idle = []
        return on_their_way

    # -- leases that others run -------------------------------------------------------------

    def _complete(self, task: Task, lease: Lease) -> None:
        """Computes a message again, and sends it, at once, as the one that was cut off."""
        self.take_in()
        message, computed = self._run(task, lease)
        self.deliver(message)
        self.scheduler.ran(task, lease)
        self.turns.put(computed, task)

    def _run(self, task: Task, lease: Lease) -> tuple[Any, float]:
        """Another worker's message, after a fetch, and when it is computed."""
        m, program = task.index, self.program
        if program.algorithm.local.repeatable:
            # What the server rule remembers is of whom the message is.
            program.fetch_as[m](tf.constant(lease.owner, tf.int64))
        else:
            program.fetch[m]()
        for part in lease.parts:
            program.work[m](self._count(len(part)), self._queued(m, part))
        program.running.begin()
        heads, message = program.collect[m]()
        name = tf.constant(lease.name, tf.int64)
        return (named(heads, name), message), self._computed(task, True, lease.steps)

    def _watch(self, task: Task) -> None:
        """Has a worker that waits look again when what it waits for straggles."""
        due = self.scheduler.backup_due(task) if self.scheduler.backs_up else None
        if due is not None:
            self.turns.after(due[0] - self.now, functools.partial(self._look, task))

    def _look(self, task: Task) -> None:
        """A worker has waited until now: it may compute a straggler's lease."""
        waiting = self._blocked if task in self._blocked else self._idle
        other = self.scheduler.for_others(task, self.now) if task in waiting else None
        if other is not None:
            waiting.remove(task)
            self._do(task, other)

    def _back_up(self, task: Task, lease: Lease) -> None:
        m = task.index
        self.take_in()
        self.scheduler.begins(task, self.now)
        message, computed = self._run(task, lease)
        self.watches[m].enter("push", at=computed)
        arrives = computed + self._network.message(m, self._random[m], computed, message)
        happens = functools.partial(self._has_backed_up, task, lease, message)
        self.turns.after(arrives - self.now, happens)

    def _has_backed_up(self, task: Task, lease: Lease, message: Any) -> None:
        if task.running is not lease:
            return  # it was lost, or an error has ended training
        self.take_in()
        self.deliver(message)
        self.scheduler.ran(task, lease)
        self.scheduler.ends(task)
        self.watches[task.index].enter("wait", at=self.now)
        self.turns.put(self.now, task)
        self.wake()
