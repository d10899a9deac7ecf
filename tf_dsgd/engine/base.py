"""What engines share: handing batches out, and bringing all workers to rest."""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import functools
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import tensorflow as tf

from tf_dsgd.algorithm import ExchangeRule
from tf_dsgd.aside import Aside
from tf_dsgd.engine.program import Program
from tf_dsgd.engine.schedule import Recorder
from tf_dsgd.engine.shard import Shard
from tf_dsgd.engine.snapshot import Snapshot
from tf_dsgd.engine.state import Store
from tf_dsgd.engine.timing import Stopwatch

# Batches waiting for workers take at most this much memory, if there are more than one a worker.
_WAITING_BYTES = 256 << 20


@dataclasses.dataclass
class WorkerState:
    """Where one worker stands, as the host sees it."""

    index: int
    step: int = 0
    """Mini-batches done since the last drain."""
    clock: int = 0
    """Messages sent since the last drain."""
    unsent: int = 0
    """Mini-batches whose gradients were not sent yet."""
    fetch_next: bool = True
    watch: Stopwatch = dataclasses.field(default_factory=Stopwatch, compare=False)
    """What its time goes to."""

    def reset(self) -> None:
        """At a drain: periods start anew, and the next round begins with a fetch."""
        self.step = self.clock = self.unsent = 0
        self.fetch_next = True


class Engine(abc.ABC):
    """Runs programs: `grant` batches to it one by one, `settle` before looking at the model."""

    longest_call: ClassVar[int] = 1 << 31
    """Most mini-batches that a worker takes at a time. Few enough that workers share a short epoch,
    and that not many are handed out when training is interrupted."""
    virtual_clock: ClassVar[bool] = False
    """Whether seconds are simulated."""

    def __init__(self, store: Store, exchange: ExchangeRule):
        self.store = store
        self.shards: list[Shard] = []
        self.exchange = exchange
        self.workers = [WorkerState(m) for m in range(store.num_workers)]
        self._late = [w for w in self.workers if not exchange.may_join(w.index, 0)]
        """Workers that did not join yet."""
        self.handed_out = 0
        """Mini-batches given to workers since training began; warm start counts them."""
        self._may_hold = False
        """Whether shards may hold messages that they have collected and not used."""
        self._longest_call = min(exchange.push_every, exchange.fetch_every, self.longest_call)
        self._audited = 0
        """Mini-batches that had been handed out at the last audit."""
        self._surplus: list[int] = []
        """What each shard had counted then beyond that, by errors that ended training."""
        self._unused = [0] * store.num_workers
        """Numbers under which a worker sent nothing: its message went by another's."""
        self.last_backup: str | None = None
        """Where the last checkpoint is, for an error that says what is lost."""
        self.recorder: Recorder | None = None
        """Takes down who fetched and sent what, where that was asked for."""
        self._program: Program | None = None
        self._stream: Any = None

    @property
    def num_workers(self) -> int:
        """Number of workers."""
        return len(self.workers)

    @property
    def program(self) -> Program:
        """The program that the workers run now."""
        if self._program is None:
            raise RuntimeError("No step was handed to the workers yet.")
        return self._program

    can_record: ClassVar[bool] = False
    """Whether this engine keeps a recorder informed."""

    def messages_sent(self) -> list[int] | None:
        """Messages that each worker has sent under new numbers; None where only shards can tell."""
        return [n - u for n, u in zip(self.numbers(), self._unused, strict=True)]

    def numbers(self) -> list[int]:
        """The number of each worker's last message."""
        return self.store.sequences()

    def clock(self) -> float:
        """Seconds, from any beginning."""
        return time.perf_counter()

    def state(self) -> dict[str, np.ndarray]:
        """What a checkpoint has to hold of the engine itself; called at rest."""
        return {}

    def check(self, state: Mapping[str, np.ndarray]) -> None:
        """Raises a ValueError if `restore` cannot set this."""

    def restore(self, state: Mapping[str, np.ndarray]) -> None:
        """Sets what `state` gave, of an engine of this kind or of another."""

    def snapshot(self) -> Snapshot:
        """What shards and workers have counted so far. Waits for no worker's round."""
        now = self.clock()
        return Snapshot(
            seconds=now,
            wall_seconds=time.perf_counter(),
            shards=tuple(shard.books() for shard in self.shards),
            spent=np.stack([worker.watch.read(now) for worker in self.workers]),
        )

    @contextlib.contextmanager
    def explained(self) -> Iterator[None]:
        """Within, state is read or written from outside; what TensorFlow raises is explained."""
        yield

    @contextlib.contextmanager
    def tracing(self) -> Iterator[None]:
        """Within, a step is traced; waits before for a worker where none is there."""
        yield

    @abc.abstractmethod
    def prepare(self, program: Program) -> None:
        """Traces what this engine will call; on the thread, and in the context, of the step."""

    @abc.abstractmethod
    def grant(self, program: Program, stream: Any) -> None:
        """Lets the workers take one more batch; may wait for room. Raises workers' errors."""

    @abc.abstractmethod
    def settle(self) -> None:
        """Waits until every batch handed out is done and every message is in the shard."""

    def _switch(self, program: Program, stream: Any) -> None:
        if program is not self._program or stream is not self._stream:
            self.settle()
            self._release_stream()
            self._program, self._stream = program, stream

    def _release_stream(self) -> None:
        """Lets go of the batches' source in a thread of its own.

        TensorFlow's iterators, when freed, may wait for a second for the thread that tunes them.
        """
        last = [self._stream]
        self._stream = None
        if last[0] is not None:
            Aside(functools.partial(_let_go, last), "tf_dsgd frees a dataset", daemon=False)

    def _round_steps(self, worker: WorkerState, available: int, flushing: bool) -> int:
        """How many batches a worker takes now; 0 if it should wait for more."""
        if not available:
            return 0  # a rule is not asked for what comes after the end
        steps = min(self.exchange.steps_to_event(worker.step), self.longest_call)
        steps = min(steps, self._limit(worker))
        if available >= steps:
            return steps
        enough = available and steps and (flushing or available >= self._portion(steps))
        return available if enough else 0

    def _limit(self, worker: WorkerState) -> int:
        """Most batches that this worker in particular can take now."""
        return 1 << 31

    def _portion(self, steps: int) -> int:
        """Batches to begin with where a whole round of them would take too much memory."""
        size = self._stream.batch_bytes
        if not size:
            return steps
        return max(1, min(steps, _WAITING_BYTES // size // (2 * self.num_workers)))

    def _slowest(self, *clocks: int, but: WorkerState | None = None) -> int:
        """The least of `clocks` and those of workers that take part and have, or may get, work."""
        others = [
            w.clock
            for w in self.workers
            if w is not but and self._joined(w) and (w.unsent or self._limit(w) > 0)
        ]
        return min([*clocks, *others], default=0)

    def _joined(self, worker: WorkerState) -> bool:
        return self.exchange.may_join(self._place(worker), self.handed_out)

    def _place(self, worker: WorkerState) -> int:
        """The worker's number among those that are there: who begins alone must be one of them."""
        return worker.index

    def _may_begin(self, worker: WorkerState, *, sending: bool = False) -> bool:
        """Whether the worker may begin a round; with `sending`, once its message was sent."""
        if not self._joined(worker):
            return False
        # Most rules do not look at the slowest, whom to find takes a look at every worker.
        may_start, clock = self.exchange.may_start, worker.clock + sending
        return may_start(clock, 0) or may_start(clock, self._slowest(clock, but=worker))

    def _nobody_begins(self, waiting: Sequence[WorkerState]) -> RuntimeError:
        """The error that it is where these wait for one another, and mini-batches are left."""
        standing = "; ".join(
            f"worker {w.index} has sent {w.clock} messages since the last drain and has "
            f"{w.unsent} mini-batches unsent"
            for w in waiting
        )
        return RuntimeError(
            f"Mini-batches are left, and no worker may begin: {standing}. Each waits for another, "
            f"by may_start of {type(self.exchange).__name__}. If that is a rule of tf_dsgd, please "
            "report it."
        )

    def _taken(self, worker: WorkerState, steps: int) -> None:
        slowest = self._slowest() if self._late else 0
        self.handed_out += steps
        worker.step += steps
        worker.unsent += steps
        self._may_hold = self._may_hold or steps > 0
        for late in list(self._late):
            if self.exchange.may_join(self._place(late), self.handed_out):
                late.clock = max(late.clock, slowest)  # nobody waits until it has caught up
                self._late.remove(late)

    def _flush(self) -> None:
        """At the end of a drain: shards use what they have collected."""
        if self._may_hold and self.program.flush is not None:
            self.program.flush()
        if self._may_hold and self.program.keeps_weights:
            for worker in self.workers:
                if self.store.present[worker.index]:
                    self._fetch_at_rest(worker)
        self._may_hold = False

    def _come_to_rest(self) -> None:
        """The end of a drain, when every message was taken in."""
        with self.explained():
            self._flush()
            self._audit()
        self._reset()

    def _audit(self) -> None:
        """Every shard has counted each mini-batch that was handed out, once."""
        if self.handed_out == self._audited or not self.shards:
            return
        counted = [shard.steps_done() for shard in self.shards]
        surplus = [count - self.handed_out for count in counted]
        if surplus != (self._surplus or [0] * len(counted)):
            message = (
                f"The ledger does not balance: {self.handed_out} mini-batches were handed out, and "
                f"shards have counted {counted} (before: {self._audited}, and {self._surplus}). "
                "Gradients were lost or used twice: that is a defect of tf_dsgd; please report it."
            )
            self._balance(counted)
            raise RuntimeError(message)
        self._audited = self.handed_out

    def _balance(self, counted: list[int] | None = None) -> None:
        """From now on audits compare with what is counted now."""
        if counted is None:
            counted = [shard.steps_done() for shard in self.shards]
        self._audited = self.handed_out
        self._surplus = [count - self.handed_out for count in counted]

    def _fetch_at_rest(self, worker: WorkerState) -> None:
        version = self.program.fetch[worker.index]()
        if self.recorder is not None:
            self.recorder.note(worker.index, "fetch", version)

    def _reset(self) -> None:
        for worker in self.workers:
            worker.reset()
        self.exchange = self.exchange.since(self.handed_out // self.num_workers)

    def restored(self, numbers: Sequence[int], handed_out: int) -> None:
        """After the shards' books were restored: messages are numbered from `numbers` on."""
        self.store.restore_sequences(numbers)
        unused = np.array(numbers) - self.shards[0].books().numbered
        self._unused = [int(n) for n in unused]
        self.handed_out = handed_out
        self._balance()
        self._reset()

    def _discard(self, failed: int | None) -> None:
        """After an error: sends what is whole, has the failed worker's message refused."""
        for worker in self.workers:
            if worker.unsent:
                self.program.push[worker.index](tf.constant(worker.index != failed))
        self._stream = None
        self._balance()
        self._reset()


def _let_go(last: list[Any]) -> None:
    stream = last.pop()
    if stream.pipelines is not None:
        stream.pipelines.end()


def steps_tensor(steps: int) -> tf.Tensor:
    """A count as the traced functions take it."""
    return tf.constant(steps, tf.int32)
