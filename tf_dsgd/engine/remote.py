"""Rounds on tasks of a TensorFlow cluster, shards on its ps tasks or on the workers.

The chief has a thread for each worker, which calls one function a round. TensorFlow partitions that
function between the worker, where the local steps run, and the ps tasks, where the weights are read
and the message is applied under each shard's lock; tensors go from one to the other directly.

Batches come from the chief's input, which keeps each until the message with its gradients was
applied; those of a worker that is lost go to others.

Where a worker sends more often than it fetches, a message need not have arrived before the next
mini-batch begins: it is kept on the worker, and travels while the next round computes.
"""

from __future__ import annotations

import contextlib
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from tf_dsgd import _tf_remote
from tf_dsgd.console import before_training
from tf_dsgd.engine import in_a_row
from tf_dsgd.engine.base import steps_tensor
from tf_dsgd.engine.carrier import PostCarrier
from tf_dsgd.engine.members import Members
from tf_dsgd.engine.outputs import Outputs
from tf_dsgd.engine.program import Program
from tf_dsgd.engine.snapshot import Snapshot
from tf_dsgd.engine.sources import Queue
from tf_dsgd.engine.threads import Rounds
from tf_dsgd.engine.timing import ROUND
from tf_dsgd.engine.work import Source
from tf_dsgd.membership.lease import Lease
from tf_dsgd.membership.task import Task
from tf_dsgd.transport.connection import Connection

LONGEST_CALL = 32
# All inputs of a call are in one message, and gRPC and protobuf take less than 2**31 bytes; the
# rest is for what stands beside the mini-batches.
MOST_CALL_BYTES = 2_000_000_000


@before_training()
def longest_call(batch_bytes: int) -> int:
    """Most mini-batches of that size that one call can bring to a worker.

    Raises:
        ValueError: if that is none.
    """
    if batch_bytes > MOST_CALL_BYTES:
        raise ValueError(
            f"A mini-batch of {batch_bytes / 1e9:,.3g} GB cannot be sent to a worker process: "
            f"TensorFlow sends at most {MOST_CALL_BYTES / 1e9:,.3g} GB at a time. Received: "
            f"{batch_bytes:,} bytes in one mini-batch. Take a smaller batch_size; or let workers "
            "make their mini-batches, by strategy.distribute_datasets_from_function; or train on "
            "threads, tf_dsgd.LocalCluster, where nothing is sent."
        )
    return min(LONGEST_CALL, MOST_CALL_BYTES // max(batch_bytes, 1))


class RemoteRounds(Rounds):
    """Rounds of workers in other processes, which may come and go.

    Args:
        connection: to the tasks.
        timeout_seconds: how long a task may say nothing.
        overlaps: whether there are messages that no fetch waits for.
    """

    def __init__(self, connection: Connection, timeout_seconds: float, overlaps: bool):
        self._connection = connection
        self.members = Members(connection, timeout_seconds, self._renewed)
        self.overlaps = overlaps
        self._executors = [_tf_remote.SynchronousExecutor() for _ in self.members.tasks]
        self.outputs = Outputs(self.members, self._executors)
        self._cut = False
        self._granted: weakref.WeakKeyDictionary[Program, int] = weakref.WeakKeyDictionary()
        """Mini-batches that were handed out of each."""
        self._bounded_for = 0
        """The bytes of a mini-batch for which calls are short enough."""

    @property
    def can_record(self) -> bool:
        return False

    def prepare(self, program: Program) -> None:
        if program.mail is not None:
            program.carried_by(PostCarrier(program.mail, self.members))
        _ = program.work_on, program.fetch, program.push, program.round_on, program.flush
        _ = program.tell
        if self.overlaps:
            _ = program.ahead_on, program.deliver
        if program.has_backup_tasks or len(self.engine.shards) > 1:  # or messages may be cut off
            _ = program.push_as
            if program.algorithm.local.repeatable:
                _ = program.fetch_as
        for shard in self.engine.shards:
            _ = shard.fence
            shard.prepare_to_mend()
        with self.members.here():
            program.step.packing.prepare()

    def source(self, stream: Any) -> Source | None:
        if stream.pipelines is not None:
            pipelines: Source = stream.pipelines
            return pipelines
        return Queue(stream.queue, self.members.here, stacked=True)

    # -- the main thread --------------------------------------------------------------------

    def granted(self, program: Program, stream: Any) -> None:
        self._granted[program] = granted = self._granted.get(program, 0) + 1
        if stream.pipelines is not None:
            _ = program.work_from, program.round_from  # traced here, in the main thread
            if self.overlaps:
                _ = program.ahead_from
        if stream.batch_bytes != self._bounded_for:
            self._bound_calls(stream.batch_bytes)
        scheduler = self.engine.scheduler
        several = program.rounds_a_call if granted > in_a_row.PAYS_AFTER else 1
        if several > 1 and in_a_row.suits(scheduler.exchange):
            _ = program.rounds_on if stream.pipelines is None else program.rounds_from
        scheduler.rounds_a_call = several  # at which workers begin to call those
        self.outputs.show()
        self.members.look_now_and_then()

    def _bound_calls(self, batch_bytes: int) -> None:
        """Before a mini-batch can be taken: calls with such ones must not be too long."""
        with self.engine.changed:
            try:
                self.engine.scheduler.longest_call = longest_call(batch_bytes)
                self._bounded_for = batch_bytes
            except ValueError as error:
                self.engine.fail(None, error)

    def show(self) -> None:
        self.outputs.show()

    def look(self) -> None:
        self.members.look()

    def unblock(self, seconds: float) -> None:
        self.members.unblock(seconds)

    def explained(self) -> contextlib.AbstractContextManager[None]:
        return self.members.explained()

    def tracing(self) -> contextlib.AbstractContextManager[None]:
        return self.members.tracing()

    def counted(self) -> Snapshot:
        with self.members.here():
            return self.engine.counted()

    def call(self, task: Task, action: Callable[[], Any]) -> None:
        try:
            self._connection.call(task.index, action)
        except tf.errors.OpError as error:
            if not self.members.was_lost_by(task.index, error):
                raise

    def discarded(self) -> None:
        self.outputs.clear()

    def close(self) -> None:
        self.members.close()

    def cut(self) -> None:
        self._cut = True
        self.members.cut()

    # -- a worker's thread ------------------------------------------------------------------

    @contextlib.contextmanager
    def scope(self, task: Task) -> Iterator[None]:
        device = self.members.store.worker_devices[task.index]
        with self._executors[task.index].scope(), tf.device(device):
            yield
            self.outputs.read(task, at_once=True)

    def failed(self, task: Task, error: BaseException) -> BaseException | None:
        self._executors[task.index].clear_error()
        if self._cut:  # by us: nobody was lost
            return None
        if not isinstance(error, tf.errors.OpError):
            return error
        self.engine.mend()
        try:
            with self.members.explained():
                return None if self.members.was_lost_by(task.index, error) else error
        except (tf.errors.OpError, RuntimeError) as another:  # a shard is gone, too
            return another

    def round(self, task: Task, program: Program, steps: int) -> int:
        engine, m = self.engine, task.index
        scheduler, watch = engine.scheduler, engine.watches[m]
        with engine.changed:
            lease = task.open
            if lease is None:
                return 0  # lost in this moment
            part = lease.parts[-1]
            scheduler.begins(task, time.monotonic())
            # What is left is sent with the round, not by a call of its own.
            push = scheduler.exchange.push_due(task.step) or scheduler.has_all(task)
        work, inputs = self.inputs(task, program, part)
        counts = True
        if push and task.fetch_next:
            watch.enter(ROUND)
            self._whole(program, lease.messages)[m](*inputs)
            watch.enter("wait")
            counts = self._acknowledge(task, lease)
        else:
            if task.fetch_next:
                self._fetch(task, program)
            watch.enter("compute")
            self._compute(task, program, work, inputs)
            watch.enter("wait")
            if push and self._keeps(task):
                self._keep(task, lease, program.collect[m]())
            elif push:
                counts = self.send_accrued(task, program, lease)
        self.outputs.latest(task, program)
        with engine.changed:
            if task.is_present:
                task.fetch_next = not counts or scheduler.exchange.fetch_due(task.step)
        self.outputs.read(task)
        with engine.changed:
            scheduler.ends(task)
            # Nobody computes its lease, too, from here on; if somebody does, nothing is added.
            must_send = not push and task.is_shared
        if must_send:
            counts = self.send_accrued(task, program, lease)
        if not counts:
            return 0  # others may be with another program by now
        with engine.changed:
            following = 0
            if engine.program is program:
                following = scheduler.take(task)
                engine.took(task, following)
        if not following:
            self._send_kept(task, program)
        return following

    def _whole(self, program: Program, messages: int) -> Sequence[Any]:
        """What makes a whole round, or as many as there are messages."""
        if self.engine.stream.pipelines is None:
            return program.round_on if messages == 1 else program.rounds_on
        return program.round_from if messages == 1 else program.rounds_from

    def _keeps(self, task: Task) -> bool:
        """Whether the message that is due may travel during the next round."""
        scheduler = self.engine.scheduler
        exchange = scheduler.exchange
        return (
            self.overlaps
            and not exchange.fetch_due(task.step)
            and (not exchange.bounds_staleness or exchange.may_start(task.clock + 1, 0))
            and scheduler.available > 0
        )

    def _keep(self, task: Task, lease: Lease, message: Any) -> None:
        with self.engine.changed:
            if task.open is lease:  # else it was lost in this moment
                self.engine.scheduler.collected(task, message)

    def _compute(
        self, task: Task, program: Program, work: Sequence[Any], inputs: Sequence[Any]
    ) -> None:
        """Local steps, during which a kept message travels."""
        m, kept = task.index, task.sent
        if kept is None:
            work[m](*inputs)
            return
        ahead = program.ahead_on if self.engine.stream.pipelines is None else program.ahead_from
        message = tf.nest.flatten(kept.message, expand_composites=True)
        ahead[m](*inputs, *message)
        self._acknowledge(task, kept)

    def _send_kept(self, task: Task, program: Program) -> None:
        """Sends a kept message where no round follows at once."""
        kept = task.sent
        if kept is None:
            return
        watch = self.engine.watches[task.index]
        watch.enter("push")
        program.deliver(*kept.message)
        watch.enter("wait")
        self._acknowledge(task, kept)

    def inputs(self, task: Task, program: Program, part: Any) -> Any:
        """(the function for local steps, what it and a whole round are called with)."""
        pipelines = self.engine.stream.pipelines
        if pipelines is None:
            with self.members.here():
                return program.work_on, program.step.packing.pack(part)
        iterator = pipelines.iterator(task.index, task.incarnation, part)
        with self.members.here():
            return program.work_from, [iterator, steps_tensor(part.count)]

    def send(self, task: Task, program: Program) -> None:
        lease = task.owes or task.open
        if lease is not None:
            self.send_accrued(task, program, lease)

    def send_accrued(self, task: Task, program: Program, lease: Lease) -> bool:
        """Sends what a worker has accrued; False if another's message counts in its place."""
        engine = self.engine
        watch = engine.watches[task.index]
        watch.enter("push")
        with self.members.here():
            valid = tf.constant(True)
        with engine.changed:
            engine.scheduler.begins(task, time.monotonic())
        program.push[task.index](valid)
        watch.enter("wait")
        with engine.changed:
            engine.scheduler.ends(task)
        return self._acknowledge(task, lease)

    def _acknowledge(self, task: Task, lease: Lease) -> bool:
        """After a message came to the shards; False if it is not what counts."""
        with self.engine.changed:
            counts = self.engine.scheduler.counted(task, lease, time.monotonic())
            if counts:
                self.engine.stepped_on()
            else:
                self.engine.wake()
            return counts

    def _fetch(self, task: Task, program: Program) -> None:
        watch = self.engine.watches[task.index]
        watch.enter("fetch")
        program.fetch[task.index]()
        watch.enter("wait")
        with self.engine.changed:
            task.fetch_next = not task.is_present

    def run(self, task: Task, program: Program, lease: Lease) -> None:
        m = task.index
        with self.engine.changed:
            self.engine.scheduler.begins(task, time.monotonic())
            messages = self.engine.scheduler.messages_of(lease)
        with self.members.here():
            names = [tf.constant(name, tf.int64) for name, _ in messages]
            owner = tf.constant(lease.owner, tf.int64)
        for name, (_, parts) in zip(names, messages, strict=True):
            if program.algorithm.local.repeatable:
                program.fetch_as[m](owner)  # what the server rule remembers is of the message's
            else:
                program.fetch[m]()
            for part in parts:
                work, inputs = self.inputs(task, program, part)
                work[m](*inputs)
            program.push_as[m](name)
        with self.engine.changed:
            self.engine.scheduler.ran(task, lease, len(messages))
            self.engine.wake()

    def _renewed(self, task: Task) -> None:
        self.outputs.renewed(task)
        self.engine.watches[task.index].forget_rounds()
