"""A dataset as `fit` sees it: every `next` hands a mini-batch to the workers.

Keras takes one *token* per step and gives it to `strategy.run`, which does no work itself. The
batches go another way: from the tf.data iterator into a queue, as many as tokens were given, and
from there to the workers' functions, or to a step that runs here (evaluation). Workers may take a
batch once the step for its token has run (or, when the step is known to be Keras's training step,
as the token is given), so a mere look at the data, such as Keras's symbolic build takes, trains
nothing.
"""

from __future__ import annotations

import collections
import dataclasses
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from tf_dsgd import _tf
from tf_dsgd.strategies.caller import model_that_calls
from tf_dsgd.strategies.kept import Kept
from tf_dsgd.strategies.pipelines import Source
from tf_dsgd.strategies.position import Position
from tf_dsgd.strategies.stream import NUMBERS, USED_TWICE, InputTime, Queues, Stream, tensors


class TokenSpec(tf.TypeSpec):
    """Type of a token: that of its batches."""

    def __init__(self, element_spec: Any):
        self.element_spec = element_spec
        self._hash: int | None = None

    def __hash__(self) -> int:
        # Asked for at every step, and the same each time.
        if self._hash is None:
            self._hash = super().__hash__()
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or super().__eq__(other)

    @property
    def value_type(self) -> type:
        return Token

    def _serialize(self) -> tuple[Any, ...]:
        return (self.element_spec,)

    @property
    def _component_specs(self) -> Any:
        return (tf.TensorSpec([], tf.resource), tf.TensorSpec([], tf.resource))

    def _to_components(self, value: Token) -> Any:
        # TensorFlow asks for the components of what a function is called with: the token is used.
        value.make_ready()
        return (value.queue, value.ran)

    def _from_components(self, components: Any) -> Token:
        return Token(components[0], components[1], self)


@dataclasses.dataclass
class _Uses:
    """What tokens are for in a graph, and in those of branches, loops and functions within it."""

    own: set[str] = dataclasses.field(default_factory=set)
    inner: set[str] = dataclasses.field(default_factory=set)


_tokens_are_for: weakref.WeakKeyDictionary[Any, _Uses] = weakref.WeakKeyDictionary()


def _graphs_around(graph: Any) -> Iterator[Any]:
    """The graphs within which a function's graph is made."""
    while (graph := getattr(graph, "outer_graph", None)) is not None:
        if hasattr(graph, "outer_graph"):  # not the one that eager code never uses
            yield graph


class Token(_tf.CompositeTensor, tf.distribute.DistributedValues):
    """Stands for one mini-batch, wherever it will be used. Pass it whole to `strategy.run`."""

    def __init__(
        self,
        queue: tf.Tensor,
        ran: tf.Tensor,
        spec: TokenSpec,
        iterator: TokenIterator | None = None,
    ):
        self.queue = queue
        self.ran = ran  # where a training step takes down that it ran
        self._spec = spec
        self._iterator = iterator  # None where a function is traced
        self.used = False
        self._graph: Any = None
        """Of the function in which it was used last."""

    @property
    def _type_spec(self) -> TokenSpec:
        return self._spec

    @property
    def element_spec(self) -> Any:
        """Type of the batches."""
        return self._spec.element_spec

    def make_ready(self) -> None:
        """Called before the token is used: makes sure that the batch is in the queue."""
        if self._iterator is not None:
            self._iterator.use(self)

    def batch(self) -> Any:
        """Takes the batch, for a step that runs here."""
        self.make_ready()
        if tf.executing_eagerly():
            return with_none(take_batch(self.queue, self.element_spec))
        # A function given several tokens (predict, steps_per_execution > 1) takes their batches in
        # order; TensorFlow would order them only if it knew that the queues are one.
        graph = tf.compat.v1.get_default_graph()
        self.check_alone_in(graph, "looks")
        last = graph.get_collection_ref("tf_dsgd_last_batch")
        with tf.control_dependencies(last):
            batch = take_batch(self.queue, self.element_spec)
        last[:] = [t.op for t in tensors(batch)]
        return with_none(batch)

    def check_alone_in(self, graph: Any, doing: str) -> None:
        """Refuses what one function cannot do with its tokens: `doing` is "trains" or "looks".

        Raises:
            RuntimeError: if it was used in this graph before.
            ValueError: if there is a step that trains and one that does not, and both may run:
                not so in two branches of a condition.
        """
        if self._graph is graph:
            raise RuntimeError(USED_TWICE)
        self._graph = graph
        around = list(_graphs_around(graph))
        here = _tokens_are_for.setdefault(graph, _Uses())
        known = [here.own, here.inner]
        known += [_tokens_are_for[g].own for g in around if g in _tokens_are_for]
        if any(each - {doing} for each in known):
            raise ValueError(
                "A tf.function was given batches of distributed datasets, one for a step that "
                "applies gradients and one for a step that does not. Write two functions."
            )
        here.own.add(doing)
        for outer in around:
            _tokens_are_for.setdefault(outer, _Uses()).inner.add(doing)

    def __iter__(self) -> Iterator[Any]:
        raise TypeError(
            "A batch of a distributed dataset stays whole until a worker uses it. Pass it to "
            "strategy.run(step, args=(batch,)) and take it apart inside `step`."
        )


def take_batch(queue: tf.Tensor, element_spec: Any) -> Any:
    """The next batch of a stream's queue."""
    component = tf.raw_ops.QueueDequeueV2(handle=queue, component_types=[tf.variant])[0]
    if not tf.executing_eagerly():
        component.set_shape([])
    optional = tf.nest.pack_sequence_as(
        tf.OptionalSpec(element_spec), [component], expand_composites=True
    )
    return optional.get_value()


def with_none(batch: Any) -> Any:
    """A batch as a step takes it: Keras makes an empty optional of None in a generator's batch."""
    return tf.nest.map_structure(
        lambda x: None if isinstance(x, tf.experimental.Optional) else x, batch
    )


def is_keras_enqueuer(dataset: tf.data.Dataset) -> bool:
    """Whether this is what Keras makes of a `PyDataset` with workers, told by its options.

    Seen in Keras 3.15.1: stopped before its end, as after a symbolic build, the enqueuer keeps the
    batches it had, gives them again at its next start, and ends too early.
    """
    options = dataset.options()
    return options.autotune.enabled is False and options.threading.private_threadpool_size == 1


class TokenIterator:
    """Iterator over tokens; one per pass over the data."""

    def __init__(self, dataset: TokenDataset):
        self.dataset = dataset
        self.stream = dataset.stream()
        self._spec = TokenSpec(dataset.element_spec)
        self.mutex = threading.RLock()
        """Held by whoever takes a token, or hands out the batch of one."""
        self.program: Any = None
        """The training program of `fit` that these batches go to, once known."""
        self._given: collections.deque[weakref.ref[Token]] = collections.deque()
        """Tokens that nobody has used, in order."""
        self.pending = 0
        """Tokens that were used, perhaps by a step that is not yet seen to have run."""
        self._ran_before: np.ndarray | None = None
        """What was known of steps that ran on tokens of this iterator."""
        self.opened = False
        self.only_looks = False
        """Whether it is known that no step trains on it."""
        self.done = 0
        """Batches handed out, and those that were done before."""
        self.passing = 0
        """Tokens still to be given that hand out nothing: their steps were done before."""
        self.ahead = 0
        """Tokens still to be given whose batches were handed out together with an earlier one's."""

    def skip(self, position: Position) -> None:
        """Goes on behind batches that were done before the checkpoint.

        If the epoch has none of them, the token at hand is given the first of those left.

        Raises:
            ValueError: if there are fewer.
        """
        pipelines, self.done = self.stream.pipelines, position.batches
        if bool(position.pipelines) != (pipelines is not None):
            raise ValueError(
                "The checkpoint was written in the middle of data that "
                f"{'workers' if position.pipelines else 'the chief'} read, which here "
                f"{'the chief' if position.pipelines else 'workers'} would read. Go on with the "
                "same data on a cluster of the same kind, or from a checkpoint at the end of an "
                "epoch."
            )
        if pipelines is None:
            fits = self.stream.skip(position.batches)
        else:
            fits = pipelines.go_to(position.pipelines, position.left_behind)
        if not fits or not (position.steps or self.stream.take()):
            raise ValueError(
                f"The checkpoint was written after {position.batches} mini-batches of data that "
                "have fewer now. Give fit the same data as before, in mini-batches of the same "
                "size."
            )

    @property
    def tokens_out(self) -> int:
        """Tokens that were given, and of which it is not yet known what they are for."""
        return 0 if self.program is not None else len(self._given) + self.pending

    def use(self, token: Token) -> None:
        """Called before a token is used, perhaps by a step: its batch is the next in the queue.

        Those of tokens given before it, which nobody has any more, are skipped.

        Raises:
            RuntimeError: if its batch was used before, or one given before it is still to be used.
            tf.errors.OutOfRangeError: if there are no data.
        """
        if not self.stream.make_ready():
            raise tf.errors.OutOfRangeError(None, None, "The dataset is empty.")
        if self.program is not None or self.only_looks:
            return
        with self.mutex:
            if self._ran_before is None:
                self._ran_before = self.stream.steps_that_ran()
            self.dataset.strategy.batches.uses(self)
            if not token.used:
                self._skip_those_before(token)
                token.used = True
                self.pending += 1
            elif not (self.pending and self.stream.tokens_batches()):
                raise RuntimeError(USED_TWICE)

    def ran(self) -> np.ndarray:
        """How often training steps ran on tokens of this, since this was asked, by their number."""
        if self._ran_before is None:
            return np.zeros(NUMBERS, np.int64)
        before, self._ran_before = self._ran_before, self.stream.steps_that_ran()
        return self._ran_before - before

    def forget_unused(self) -> None:
        """Drops batches of tokens that nobody has used, nor has any more."""
        while self._given and not self.pending and self._given[0]() is None:
            self._given.popleft()
            if self.stream.make_ready():
                self.stream.drop(1)

    def drop_unused(self) -> None:
        """Those of tokens whose function has not used them."""
        self.pending = 0
        if self.program is None:
            self.stream.drop(self.stream.tokens_batches() - len(self._given))

    def _skip_those_before(self, token: Token) -> None:
        while self._given:
            other = self._given.popleft()()
            if other is token:
                return
            if other is not None or self.pending:
                break
            self.stream.drop(1)
        raise RuntimeError(
            "Batches of a distributed dataset are used in the order in which they were taken. Pass "
            "each to strategy.run before the next is taken: for batch in dataset: "
            "strategy.run(step, args=(batch,))."
        )

    def train(self, program: Any) -> None:
        """Called when the first token was used in `fit`: workers may make the batches then."""
        self.program = program
        self._given.clear()
        self.pending = 0
        if self.dataset.source is not None:
            self.stream.pipelines = self.dataset.source.start()
            self.stream.pipelines.take()

    def __iter__(self) -> Iterator[Token]:
        # Keras calls `iter` on an iterator before every step.
        return _Steps(self)

    def await_logs(self) -> None:
        """Waits until a worker has reported of this pass, if these are mini-batches of `fit`."""
        self.dataset.strategy.batches.await_logs(self)

    def get_next_as_optional(self) -> Any:
        """What AutoGraph makes of a loop over a distributed dataset inside a `tf.function`."""
        raise RuntimeError(
            "A distributed dataset cannot be iterated over inside a tf.function: batches are "
            "handed out from Python. Loop outside, and call the tf.function with each batch."
        )

    def __next__(self) -> Token:
        # A loop of one's own over nothing ends before its first turn.
        return self.take(at_once=self.opened or model_that_calls(_tf.LOOKS_AT_DATA) is None)

    def take(self, at_once: bool = False) -> Token:
        """The next token.

        Raises:
            StopIteration: at the end of the data. Of no data, unless `at_once`, the first token's
                use raises OutOfRangeError.
        """
        if not tf.executing_eagerly():
            self.get_next_as_optional()
        with self.mutex:
            if not self.dataset.strategy.batches.next_token(self, at_once):
                raise StopIteration
            token = Token(self.stream.queue_of_tokens, self.stream.ran.handle, self._spec, self)
            if self.program is None and not self.only_looks:
                self._given.append(weakref.ref(token))
        return token


class _Steps:
    """Tokens of one `iter(iterator)`: Keras wants `OutOfRangeError` when there is none at all.

    A loop of one's own does not.

    Keras makes `steps_per_execution` calls of its step with as many tokens. Once the iterator is
    known to be `fit`'s, those calls would do nothing but show logs, so one token stands for all of
    them.
    """

    def __init__(self, iterator: TokenIterator):
        self._iterator = iterator
        self._begun = False
        self._at_once: int | None = None

    def __iter__(self) -> Iterator[Token]:
        return self

    def __next__(self) -> Token:
        if self._begun and self._at_once:
            raise StopIteration
        try:
            token = self._iterator.take(at_once=self._iterator.opened or _is_loop_of_ones_own())
        except StopIteration:
            if self._begun or _is_loop_of_ones_own():
                raise
            raise tf.errors.OutOfRangeError(None, None, "End of the data.") from None
        if not self._begun and self._iterator.program is not None:  # the first token shows whose
            self._at_once = self._iterator.program.steps_per_execution
        self._begun = True
        self._iterator.await_logs()  # of an epoch's first batch; the others have more to do, then
        for _ in range((self._at_once or 1) - 1):
            if next(self._iterator, None) is None:
                break
        return token


def _is_loop_of_ones_own() -> bool:
    """Whether no method of Keras's goes through the data."""
    return model_that_calls("fit", "evaluate") is None


class TokenDataset(_tf.DistributedDataset):
    """What `strategy.experimental_distribute_dataset` returns; `fit` takes it as it is.

    Args:
        strategy: the strategy.
        dataset: all batches.
        pull: what `make_pull` made for them.
        source: the same batches as pipelines that workers may run, if there are any.
    """

    def __init__(
        self, strategy: Any, dataset: tf.data.Dataset, pull: Any, source: Source | None = None
    ):
        self.source = source
        self._strategy = weakref.ref(strategy)
        self.dataset = dataset.prefetch(tf.data.AUTOTUNE)
        self.pull = pull
        self.input_time = InputTime()
        self.kept: Kept | None = None
        """Where mini-batches stay for the next pass, if they do."""
        self._mutex = threading.Lock()
        """Guards the queues."""
        self._queues: list[tuple[weakref.ref[Stream], Queues]] = []
        """Those of passes, each with the pass that adds to them, which may be over."""

    @property
    def strategy(self) -> Any:
        """The strategy that distributes these batches."""
        return self._strategy()

    @property
    def element_spec(self) -> Any:
        """Type of the batches."""
        return self.dataset.element_spec

    @property
    def cardinality(self) -> int:
        """Number of batches, as `tf.data` counts."""
        return int(self.dataset.cardinality())

    def stream(self) -> Stream:
        """The batches of a pass."""
        with self._mutex:
            queues = self._free_queues() or Queues()
            made = Stream(self.dataset, self.pull, self.input_time, queues, self.kept)
            self._queues.append((weakref.ref(made), queues))
            return made

    def _free_queues(self) -> Queues | None:
        """Those of a pass that is over, if nothing was left in them; they are nobody's then."""
        if not tf.executing_eagerly():  # where batches are not handed out
            return None
        here, free = [], []
        for stream, queues in self._queues:
            if stream() is not None:  # asked once: it may be over in the next moment
                here.append((stream, queues))
            elif queues.are_empty():
                free.append((stream, queues))
        found = free.pop()[1] if free else None
        self._queues = [*here, *free]
        return found

    def __iter__(self) -> TokenIterator:
        return TokenIterator(self)


def sample(spec: Any) -> Any:
    """What a symbolic build needs of one component of a batch: shape and type."""
    if isinstance(spec, (tf.OptionalSpec, tf.NoneTensorSpec)):
        return None
    return tf.TensorSpec(spec.shape, spec.dtype)
