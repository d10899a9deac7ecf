"""Batches on their way from the input to the workers."""

from __future__ import annotations

import collections
import dataclasses
import functools
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tf_dsgd import _tf
from tf_dsgd._tf_errors import in_short
from tf_dsgd.strategies.kept import Kept, Part, Record
from tf_dsgd.strategies.pipelines import Progress

# Batches taken from the input at a time while the input keeps up.
_MOST_AT_ONCE = 16
# An input slower than this is asked for one batch at a time, so that Ctrl-C is answered at once.
_SLOW_SECONDS = 0.02

NUMBERS = 4096
"""Training steps of a strategy that are told apart where it is taken down which ran."""

USED_TWICE = (
    "A batch of a distributed dataset was used twice. It is one step's alone: put what is to be "
    "done with it into one function, with one strategy.run."
)


@dataclasses.dataclass
class InputTime:
    """For how long the main thread has waited for the batches of a dataset."""

    seconds: float = 0.0


class Queues:
    """Where the batches of one pass are at a time, and what is noted of them.

    TensorFlow keeps something of each queue that was ever made, so the next pass takes those that
    nobody needs any more.
    """

    def __init__(self) -> None:
        self.batches = _queue()
        self.ran = _tf.make_variable(np.zeros(NUMBERS, np.int64), device="CPU:0", name="ran")
        """How often each training step ran on one of these batches, by its number."""

    @functools.cached_property
    def handed_out(self) -> Any:
        """In a loop of one's own: where workers take batches from. The others are its tokens'."""
        return _queue()

    @functools.cached_property
    def notes(self) -> Any:
        """Of each batch read, also where the one after it fails: its examples, and its bytes."""
        return tf.queue.FIFOQueue(1 << 30, [tf.int64, tf.int64], shapes=[[], []])

    def are_empty(self) -> bool:
        """Whether all that was read was used; not so after Ctrl-C while a batch was read."""
        made = [vars(self)[name] for name in ("notes", "handed_out") if name in vars(self)]
        return not any(int(queue.size()) for queue in (self.batches, *made))


class Stream:
    """The batches of one pass on their way to the workers, in order.

    Args:
        dataset: what they are read from.
        pull: what `make_pull` made for it.
        input_time: where the time that this takes is added up.
        queues: empty ones, which are this pass's alone.
        kept: where they stay for the next pass, or are from the last one; None if each is read.
    """

    def __init__(
        self,
        dataset: tf.data.Dataset,
        pull: Any,
        input_time: InputTime,
        queues: Queues,
        kept: Kept | None = None,
    ):
        self._dataset = dataset
        self._pull = pull
        self._input_time = input_time
        self._iterator: Any = None
        self._resource: tf.Tensor | None = None
        self._at_once = 1
        self._stock = 0
        self._ended = False
        self._owed = False
        self._examples: collections.deque[int] = collections.deque()
        self.examples = 0
        """Examples in the batch taken last; 0 where workers make their batches."""
        self.batch_bytes = 0
        self.pipelines: Progress | None = None
        """Where workers make their batches themselves; then this only counts."""
        self._queues = queues
        self._queue = queues.batches
        self.is_of_tokens = False
        """Whether batches stay in the tokens' queue until their step has run."""
        self._read: Any = None
        """Where batches that are kept come first."""
        self._record: Record | None = None
        self._again: Iterator[Part] | None = None
        """Those that were kept; None where they are read."""
        if kept is not None and kept.parts is not None:
            self._again = iter(kept.parts)
        elif kept is not None:
            self.keep(kept)
        self._error: tf.errors.OpError | None = None
        """Why there are no batches after those in stock."""

    @property
    def ran(self) -> tf.Variable:
        """Where training steps take down that they ran."""
        return self._queues.ran

    @property
    def queue(self) -> tf.Tensor:
        """Where workers take batches from."""
        queue = self._queues.handed_out if self.is_of_tokens else self._queue
        return queue.queue_ref

    @property
    def queue_of_tokens(self) -> tf.Tensor:
        """Where steps that run here take batches from."""
        return self._queue.queue_ref

    def hand_out(self) -> None:
        """A token's step has run: its batch is the workers'.

        Raises:
            RuntimeError: if it is not there, since another step was given that token, too.
        """
        if not self.is_of_tokens:
            return
        if not self.tokens_batches():
            raise RuntimeError(USED_TWICE)
        self._queues.handed_out.enqueue(self._queue.dequeue())

    def take(self, at_once: bool = False) -> bool:
        """Makes one more batch ready for the workers; False at the end of the data.

        The first is made ready when it is used, unless `at_once`. Keras takes a token just to look
        at its type, and a generator, or a `PyDataset` with threads of its own, does not begin
        twice.
        """
        if self.pipelines is not None:
            return self.pipelines.take()
        if self._iterator is None and not (self._owed or at_once):
            self._owed = True
            return True
        return self.make_ready() and self._take()

    def make_ready(self) -> bool:
        """Makes the first batch ready if that was put off; False if there is none."""
        if not self._owed or self.pipelines is not None:
            return True
        self._owed = False
        return self._take()

    def _take(self) -> bool:
        if self.at_end():
            return False
        self._stock -= 1
        self.examples = self._examples.popleft()
        return True

    def skip(self, count: int) -> bool:
        """Drops the batch taken last and those after it, `count` in all; False if it has fewer."""
        for dropped in range(count):
            if dropped and not self._take():
                return False
            self._queue.dequeue()
        return True

    def drop_handed_out(self) -> None:
        """After an error, when workers have stopped: nobody is to have what they have not taken.

        Where they take what was read, nothing more is taken: that was `fit`, which has ended.
        """
        if self.is_of_tokens:
            left = self._queues.handed_out
            left.dequeue_many(left.size())

    def steps_that_ran(self) -> np.ndarray:
        """How often each training step ran on a batch of this or an earlier pass, by its number."""
        return tf.raw_ops.ReadVariableOp(resource=self.ran.handle, dtype=tf.int64).numpy()

    def tokens_batches(self) -> int:
        """How many batches tokens were given for, and nobody has taken, nor handed out."""
        return int(self._queue.size()) - self._stock

    def drop(self, count: int) -> None:
        """Takes out the first of those, which no step has used."""
        for _ in range(count):
            self._queue.dequeue()

    def at_end(self) -> bool:
        """Whether no batch is left, looking one ahead."""
        if self.pipelines is not None:
            return self.pipelines.at_end()
        if not self._stock and not self._ended:
            self._refill()
        return not self._stock

    def keep(self, kept: Kept) -> None:
        """The batches of the pass stay there when it has ended.

        Called before the first one, or when the first one was taken and no worker has it yet.
        """
        if self._again is not None or self._record is not None:
            return
        self._record, self._read = Record(kept), _queue()
        here = int(self._queue.size())
        if here:
            if here != 1 + len(self._examples):
                raise RuntimeError(f"Of the batches that were read {here} are left.")
            batches = self._queue.dequeue_many(here)
            self._queue.enqueue_many(batches)
            sizes = (self.batch_bytes,) * here
            self._record.add(Part(batches, (self.examples, *self._examples), sizes))

    def _refill(self) -> None:
        start = time.perf_counter()
        if self._again is None:
            self._refill_from_input()
        else:
            part = next(self._again, None)
            self._ended = part is None
            if part is not None:
                self._put(part)
        took = time.perf_counter() - start
        self._input_time.seconds += took
        self._at_once = 1 if took > _SLOW_SECONDS else min(2 * self._at_once, _MOST_AT_ONCE)

    def _refill_from_input(self) -> None:
        if self._iterator is None:
            self._iterator = iter(self._dataset)
            self._resource = tf.nest.flatten(self._iterator, expand_composites=True)[0]
        error, self._error = self._error, None
        queue = self._queue if self._record is None else self._read
        notes = self._queues.notes
        try:
            if error is None:
                self._ended = not self._pull(
                    self._resource,
                    queue.queue_ref,
                    notes.queue_ref,
                    tf.constant(self._at_once),
                )
        except tf.errors.OpError as failed:
            error = failed
        moved = notes.size()
        examples, sizes = (each.numpy().tolist() for each in notes.dequeue_many(moved))
        if self._record is None:
            self._count(examples, sizes)
        else:
            part = Part(self._read.dequeue_many(moved), tuple(examples), tuple(sizes))
            self._put(part)
            self._record.add(part)
            if self._ended:
                self._record.end()
        if error is not None:
            if not self._stock:
                raise in_short(error)
            self._error = error  # once the batches before it are used

    def _put(self, part: Part) -> None:
        self._queue.enqueue_many(part.batches)
        self._count(part.examples, part.sizes)

    def _count(self, examples: Sequence[int], sizes: Sequence[int]) -> None:
        """Takes down what is in the queue now."""
        self._stock += len(examples)
        self._examples.extend(examples)
        self.batch_bytes = max(self.batch_bytes, *sizes, 0)


def _queue() -> Any:
    return tf.queue.FIFOQueue(1 << 30, [tf.variant], shapes=[[]])


def make_pull(dataset: tf.data.Dataset) -> _tf.BoundFunction:
    """A function that moves up to `limit` batches of a dataset's iterator into a queue.

    Tells whether there may be more. Of each batch it leaves a note in another queue.

    Called with tensors alone: TensorFlow would hash the type of a whole iterator at every call.
    """

    def pull(iterator: Any, queue: tf.Tensor, notes: tf.Tensor, limit: tf.Tensor) -> tf.Tensor:
        def body(moved: tf.Tensor, _: tf.Tensor) -> Any:
            batch = iterator.get_next_as_optional()
            has_value = batch.has_value()
            component = tf.nest.flatten(batch, expand_composites=True)[0]

            def put() -> tf.Tensor:
                tf.raw_ops.QueueEnqueueV2(handle=queue, components=[component])
                value = batch.get_value()
                note = [examples_in(value), _bytes(value)]
                tf.raw_ops.QueueEnqueueV2(handle=notes, components=note)
                return tf.constant(True)

            return moved + 1, tf.cond(has_value, put, lambda: tf.constant(False))

        return tf.while_loop(
            lambda moved, more: tf.logical_and(more, moved < limit),
            body,
            (tf.constant(0), tf.constant(True)),
            parallel_iterations=1,
        )[1]

    concrete = tf.function(pull, autograph=False).get_concrete_function(
        tf.data.IteratorSpec(dataset.element_spec),
        tf.TensorSpec([], tf.resource),
        tf.TensorSpec([], tf.resource),
        tf.TensorSpec([], tf.int32),
    )
    return _tf.BoundFunction(concrete, concrete.captured_inputs)


def _bytes(batch: Any) -> tf.Tensor:
    sizes = [
        tf.reduce_sum(tf.cast(tf.strings.length(t), tf.int64))
        if t.dtype == tf.string
        else tf.size(t, tf.int64) * t.dtype.size
        for t in tensors(batch)
        if t.dtype not in (tf.variant, tf.resource)
    ]
    return tf.add_n(sizes) if sizes else tf.zeros([], tf.int64)


def tensors(batch: Any) -> list[tf.Tensor]:
    """All of a batch, in which None may take a component's place."""
    return [t for t in tf.nest.flatten(batch, expand_composites=True) if t is not None]


def examples_in(batch: Any) -> tf.Tensor:
    """The first dimension of the first component that has one."""
    for value in tf.nest.flatten(batch):
        if isinstance(value, tf.RaggedTensor):
            return tf.cast(value.nrows(), tf.int64)
        if isinstance(value, tf.SparseTensor):
            return value.dense_shape[0]
        if isinstance(value, tf.Tensor) and value.dtype not in (tf.variant, tf.resource):
            return tf.reduce_prod(tf.shape(value, tf.int64)[:1])  # 1 for a scalar
    return tf.zeros([], tf.int64)
