"""Workers as processes of a TensorFlow cluster, shards on its ps tasks or on the workers.

The chief has a thread for each worker, which calls one function a round. TensorFlow partitions that
function between the worker, where the local steps run, and the ps tasks, where the weights are read
and the message is applied under each shard's lock; tensors go from one to the other directly.

Batches come from the chief's input, which keeps each until the message with its gradients was
applied; those of a worker that is lost go to others.

Where a worker sends more often than it fetches, a message need not have arrived before the next
mini-batch begins: it is kept on the worker, and travels while the next round computes.
"""

from __future__ import annotations

import collections
import functools
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tf_dsgd.algorithm import ExchangeRule
from tf_dsgd.connection import Connection, say
from tf_dsgd.engine.base import WorkerState, steps_tensor
from tf_dsgd.engine.program import Program
from tf_dsgd.engine.snapshot import Snapshot
from tf_dsgd.engine.stand_in import StandsIn
from tf_dsgd.engine.timing import ROUND

# How often the chief shows the latest outputs of a worker, and asks each what its rounds' time went
# to, once anybody wants to know.
_SHOW_SECONDS = 0.2


class ClusterEngine(StandsIn):
    """Asynchronous workers in other processes, which may come and go."""

    longest_call = 32

    def __init__(
        self,
        connection: Connection,
        exchange: ExchangeRule,
        worker_timeout_seconds: float,
        late_after_seconds: float | None,
    ):
        super().__init__(connection, exchange, worker_timeout_seconds, late_after_seconds)
        now = time.monotonic()
        self._returned: collections.deque[tf.Tensor] = collections.deque()
        """Batches of lost workers, for others."""
        self._outputs: list[tuple[Program, list[tf.Tensor]] | None] = [None] * self.num_workers
        """Each worker's latest, which are there."""
        self._brought: tuple[Program, list[tf.Tensor]] | None = None
        """The latest that are here."""
        self._shown = now
        self._watched = False
        """Whether anybody wants to know what workers' time goes to."""
        self._laps_seen = [np.zeros([2]) for _ in self.workers]
        self._laps_read = [now for _ in self.workers]
        self.overlaps = exchange.push_every < exchange.fetch_every
        """Whether there are messages that no fetch waits for."""
        self._made = True

    def snapshot(self) -> Snapshot:
        self._watched = True
        with self._here():
            return super().snapshot()

    def prepare(self, program: Program) -> None:
        _ = program.work_on, program.fetch, program.push, program.round_on, program.flush
        if self.overlaps:
            _ = program.ahead_on, program.deliver
        if program.can_be_late:
            _ = program.fetch_as
        if program.can_be_late or len(self.shards) > 1:  # or messages may be cut off
            _ = program.push_as
        for shard in self.shards:
            _ = shard.fence
        with self._here():
            program.step.packing.prepare()

    def grant(self, program: Program, stream: Any) -> None:
        if stream.pipelines is not None:
            _ = program.work_from, program.round_from  # traced here, in the main thread
            if self.overlaps:
                _ = program.ahead_from
        super().grant(program, stream)
        self._show()
        self._look_now_and_then()

    def settle(self) -> None:
        super().settle()
        self._show()

    def _fetch_at_rest(self, worker: WorkerState) -> None:
        try:
            self._connection.call(worker.index, functools.partial(super()._fetch_at_rest, worker))
        except tf.errors.OpError as error:
            if not self._worker_failed(worker.index, error):
                raise

    # -- a worker's thread ------------------------------------------------------------------

    def _run(self, worker: WorkerState) -> None:
        with self._executors[worker.index].scope():
            super()._run(worker)

    def _rounds(self, worker: WorkerState) -> None:
        super()._rounds(worker)
        self._read(worker, 0.0)

    def _round(self, worker: WorkerState, program: Program, steps: int) -> int:
        m = worker.index
        if self._stream.pipelines is None:
            if not self._draw(worker, steps):
                return 0
            whole_round = program.round_on
        else:
            whole_round = program.round_from
        with self._changed:
            if worker.unsent < steps:
                return 0  # lost in this moment
            part = self._unapplied.held[m][-1]
            if program.can_be_late:
                self._lateness.computes(m, time.monotonic())
            # What is left is sent with the round, not by a call of its own.
            push = self.exchange.push_due(worker.step) or self._has_all(worker)
        work, inputs = self._inputs(worker, program, part)
        counts = True
        if push and worker.fetch_next:
            worker.watch.enter(ROUND)
            outputs = whole_round[m](*inputs)
            worker.watch.enter("wait")
            counts = self._acknowledge(worker)
        else:
            if worker.fetch_next:
                self._fetch(worker, program)
            worker.watch.enter("compute")
            outputs = self._compute(worker, program, work, inputs)
            worker.watch.enter("wait")
            if push and self._keeps(worker):
                self._unapplied.keep(m, program.collect[m](), worker.unsent)
            elif push:
                counts = self._send(worker, program)
        self._outputs[m] = program, outputs
        with self._changed:
            worker.fetch_next = not counts or self.exchange.fetch_due(worker.step)
        self._read(worker, _SHOW_SECONDS)
        with self._changed:
            self._lateness.has_computed(m)
            nothing_to_add = not push and self._lateness.stays_behind(m)
        if nothing_to_add:
            counts = self._send(worker, program)
        if not counts:
            return 0  # others may be with another program by now
        with self._changed:
            steps = self._take(worker) if self._program is program else 0
        if not steps:
            self._send_kept(worker, program)
        return steps

    def _keeps(self, worker: WorkerState) -> bool:
        """Whether the message that is due may travel during the next round."""
        return (
            self.overlaps
            and not self.exchange.fetch_due(worker.step)
            and self.exchange.may_start(worker.clock + 1, 0)
            and self._available > 0
        )

    def _compute(
        self, worker: WorkerState, program: Program, work: Sequence[Any], inputs: Sequence[Any]
    ) -> Any:
        """Local steps, during which a kept message travels."""
        m = worker.index
        kept = self._unapplied.kept[m]
        if kept is None:
            return work[m](*inputs)
        ahead = program.ahead_on if self._stream.pipelines is None else program.ahead_from
        message = tf.nest.flatten(kept.message, expand_composites=True)
        outputs = ahead[m](*inputs, *message)
        self._acknowledge(worker)
        return outputs

    def _send_kept(self, worker: WorkerState, program: Program) -> None:
        """Sends a kept message where no round follows at once."""
        kept = self._unapplied.kept[worker.index]
        if kept is None:
            return
        worker.watch.enter("push")
        program.deliver(*kept.message)
        worker.watch.enter("wait")
        self._acknowledge(worker)

    def _read(self, worker: WorkerState, seconds: float) -> None:
        """Reads what a worker has to show, if that is `seconds` ago; a drain may not wait for it.

        So the worker's state here may be another epoch's afterwards.
        """
        m, now = worker.index, time.monotonic()
        outputs_due = now - self._shown >= seconds
        laps_due = self._watched and now - self._laps_read[m] >= seconds
        if not outputs_due and not laps_due:
            return
        with self._changed:
            self._lateness.is_read(m, now)
        try:
            if outputs_due:
                self._bring_outputs(worker)
            if laps_due:
                self._divide_rounds(worker)
        finally:
            with self._changed:
                self._lateness.was_read(m)

    def _divide_rounds(self, worker: WorkerState) -> None:
        """Asks a worker how long it fetched and computed."""
        m, now = worker.index, time.monotonic()
        copy = self.store.laps.copies[m]
        if copy is None:
            return  # lost a moment ago
        laps = copy.numpy()
        worker.watch.divide_rounds(*(laps - self._laps_seen[m]))
        self._laps_seen[m], self._laps_read[m] = laps, now

    def _inputs(self, worker: WorkerState, program: Program, part: Any) -> Any:
        """(the function for local steps, what it and a whole round are called with)."""
        pipelines, m = self._stream.pipelines, worker.index
        if pipelines is None:
            with self._here():
                return program.work_on, program.step.packing.pack(part)
        iterator = pipelines.iterator(m, self.store.incarnations[m], part)
        with self._here():
            return program.work_from, [iterator, steps_tensor(part.count)]

    def _has_all(self, worker: WorkerState) -> bool:
        if super()._has_all(worker):
            return True
        if not worker.unsent or self._stream.pipelines is None:
            return False
        # Others may be bound to wait for its message before they do what is left to them.
        return not self._stream.pipelines.limit(worker.index, self._others())

    def _limit(self, worker: WorkerState) -> int:
        if any(c.worker == worker.index for c in (*self._cut_off, *self._completing.values())):
            return 0  # a message with a higher number would make its shards refuse that one
        if self._lateness.stays_behind(worker.index):
            return 0
        if self._stream is None or self._stream.pipelines is None:
            return super()._limit(worker)
        return self._stream.pipelines.limit(worker.index, self._others())

    def _others(self) -> list[int]:
        """Workers with whose pipelines anybody goes on: that are lost, or not waited for now."""
        return [*self._lost, *sorted(self._not_awaited())]

    def _taken(self, worker: WorkerState, steps: int) -> None:
        super()._taken(worker, steps)
        if steps and self._stream.pipelines is not None:
            segment = self._stream.pipelines.draw(worker.index, steps, self._others())
            self._unapplied.held[worker.index].append(segment)

    def _draw(self, worker: WorkerState, steps: int) -> bool:
        """Draws what a worker has taken, lost workers' batches first; False if it is lost by then.

        Until it holds them they count as not drawn: they are others' if the worker is lost.
        """
        drawn: list[tf.Tensor] = []
        with self._changed:
            if worker.unsent < steps:
                return False
            again = [self._returned.popleft() for _ in range(min(steps, len(self._returned)))]
        try:
            with self._here():
                if len(again) < steps:
                    drawn = tf.raw_ops.QueueDequeueManyV2(
                        handle=self._stream.queue,
                        n=steps - len(again),
                        component_types=[tf.variant],
                    )
                # TensorFlow joins variants by stacking only.
                apart = again and [*again, *(tf.unstack(drawn[0]) if drawn else [])]
                part = tf.stack(apart) if apart else drawn[0]
        except tf.errors.OpError:
            self._executors[worker.index].clear_error()
            with self._changed, self._here():
                self._returned.extend([*again, *(tf.unstack(drawn[0]) if drawn else [])])
            raise
        with self._changed:
            if worker.unsent < steps:
                self._give_back([part])
                return False
            self._unapplied.held[worker.index].append(part)
        return True

    def _push(self, worker: WorkerState, program: Program, following: int) -> None:
        self._send(worker, program)

    def _send(self, worker: WorkerState, program: Program) -> bool:
        """Sends what a worker has accrued; False if another's message counts in its place."""
        worker.watch.enter("push")
        with self._here():
            valid = tf.constant(True)
        with self._changed:
            self._lateness.sends(worker.index)
        program.push[worker.index](valid)
        worker.watch.enter("wait")
        with self._changed:
            self._lateness.has_computed(worker.index)
        return self._acknowledge(worker)

    def _acknowledge(self, worker: WorkerState) -> bool:
        """After a message came to the shards: takes note that it counts, the kept one, if any.

        False if the worker was overtaken: another's was counted in its place, and this one, which
        was refused, is the last that it sends under that number.
        """
        with self._changed:
            if worker.index in self._lateness.overtaken:
                self._catch_up(worker)
                self._wake()
                return False
            self._untold.discard(worker.index)
            kept = self._unapplied.acknowledge(worker.index)
            worker.unsent = 0 if kept is None else worker.unsent - kept.steps
            worker.clock += 1
            self._lateness.has_sent(worker.index, time.monotonic())
            self._stepped_on()
            return True

    def _fetch(self, worker: WorkerState, program: Program) -> None:
        worker.watch.enter("fetch")
        program.fetch[worker.index]()
        worker.watch.enter("wait")
        worker.fetch_next = False

    # -- lost tasks -------------------------------------------------------------------------

    def _batches(self, part: Any) -> int:
        return part.shape[0] if self._stream.pipelines is None else part.count

    def _give_back(self, held: list[Any]) -> int:
        """Puts batches that were taken at the disposal of other workers; gives their number."""
        if not held:
            return 0
        if self._stream.pipelines is not None:
            self._stream.pipelines.give_back(held)
            return sum(segment.count for segment in held)
        with self._here():
            batches = [b for part in held for b in tf.unstack(part)]
        self._returned.extend(batches)
        return len(batches)

    def _renewed(self, worker: WorkerState) -> None:
        self._laps_seen[worker.index] = np.zeros([2])
        worker.watch.forget_rounds()

    def _discard(self, failed: int | None) -> None:
        """After an error: what is whole is sent, as far as tasks are there to send and take it."""
        kept = self._unapplied.clear()
        self._returned.clear()
        self._cut_off.clear()
        self._completing.clear()
        self._outputs = [None] * self.num_workers
        self._brought = None
        overtaken = self._lateness.clear()
        try:
            for m in overtaken:  # what they have accrued was sent by others: it is refused
                self.program.push[m](tf.constant(True))
            for worker, message in zip(self.workers, kept, strict=True):
                if message is not None:
                    self.program.deliver(*message.message)
                    worker.unsent -= message.steps
            super()._discard(failed)
        except tf.errors.OpError as error:
            say(f"what workers had not sent is lost: {error.message}")
            self._stream = None
            self._reset()

    # -- what the chief shows ---------------------------------------------------------------

    def _bring_outputs(self, worker: WorkerState) -> None:
        """Copies a worker's latest outputs here; in its thread, which may wait long."""
        latest, self._outputs[worker.index] = self._outputs[worker.index], None
        if latest is None:
            return
        self._shown = began = time.monotonic()
        program, outputs = latest
        try:
            # Not by `tf.identity`, a function to TensorFlow, with a half on the worker: it was seen
            # to wait without end where workers were killed (TF 2.21).
            arrays = [output.numpy() for output in outputs]
        except tf.errors.OpError:  # the worker is gone, as its next call will tell
            self._executors[worker.index].clear_error()
            return
        if self._shown != began:
            return  # another has begun later
        with self._here():
            self._brought = program, program.unbundle([tf.constant(array) for array in arrays])

    def _show(self) -> None:
        """Shows what workers brought, in the chief's variables."""
        latest, self._brought = self._brought, None
        if latest is None:
            return
        program, values = latest
        for variable, value in zip(program.logs, values, strict=True):
            variable.assign(value)
