"""Input pipelines that run on the workers, so that no batch passes through the chief.

The chief only counts: it tells a worker to take so many batches of a pipeline from a certain one
on. A batch is known by (pipeline, ordinal), so what a lost worker had not finished can be given to
another, which makes the same pipeline and skips to the place. That needs a pipeline to give the
same batches whoever runs it: all of its random operations begin with one seed, which is an
epoch's, and its parallel parts keep their order. It is traced once, and each epoch passes its seed;
but where an operation has its seed in its definition, as `tf.random.uniform` in a map's function,
it is traced at every epoch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

# More than this in arrays is no recipe for data any more, but data.
_MOST_CONSTANT_BYTES = 16 << 20


@dataclasses.dataclass(frozen=True)
class Segment:
    """`count` batches of a pipeline from number `start` on."""

    pipeline: int
    start: int
    count: int


class _Seed:
    """The seed of a graph that is traced, as `tf.random.get_seed` takes one: a tensor.

    Args:
        tensor: an argument of the function that is traced.
        number: what it is in the call for which that is traced.
    """

    def __init__(self, tensor: tf.Tensor, number: int):
        self._tensor = tensor
        self._number = number
        self.in_definitions = False
        """Whether an operation was given the number, which it then has in every call."""

    def __tf_tensor__(self, dtype: Any = None, name: str | None = None) -> tf.Tensor:
        del name
        return self._tensor if dtype is None else tf.cast(self._tensor, dtype)

    def __mod__(self, _: int) -> _Seed:
        return self  # it is small enough

    def __index__(self) -> int:
        self.in_definitions = True
        return self._number

    __int__ = __index__

    def __repr__(self) -> str:
        return str(self._number)  # as TensorFlow names it in a warning


class Source:
    """A user's `dataset_fn`, one pipeline per worker.

    Args:
        dataset_fn: from a `tf.distribute.InputContext` to the `tf.data.Dataset` of mini-batches
            of pipeline `input_pipeline_id` of `num_input_pipelines`.
        num_pipelines: number of workers.
    """

    def __init__(self, dataset_fn: Callable[[Any], tf.data.Dataset], num_pipelines: int):
        if not callable(dataset_fn):
            raise TypeError(
                "dataset_fn must be a function from a tf.distribute.InputContext to a "
                f"tf.data.Dataset of mini-batches. Received: {dataset_fn!r}."
            )
        self._dataset_fn = dataset_fn
        datasets = [self._make(p, num_pipelines) for p in range(num_pipelines)]
        self._num_pipelines = num_pipelines
        self.dataset = datasets[0]
        """All batches, for whoever reads them in this process."""
        for dataset in datasets[1:]:
            self.dataset = self.dataset.concatenate(dataset)
        self.sizes = [int(dataset.cardinality()) for dataset in datasets]
        self.seed = int(np.random.randint(1 << 30))
        """What the seeds of all epochs begin with."""
        self.epochs = 0
        """Epochs that were started."""
        self._makers: dict[int, Any] = {}
        """Of each pipeline the function that makes its iterator, if it serves all epochs."""

    def _make(self, pipeline: int, number: int) -> tf.data.Dataset:
        context = tf.distribute.InputContext(number, pipeline, 1)
        dataset = self._dataset_fn(context)
        if not isinstance(dataset, tf.data.Dataset):
            raise TypeError(
                "dataset_fn must return a tf.data.Dataset of mini-batches. Received: "
                f"{type(dataset).__name__}."
            )
        return dataset

    @property
    def can_run_on_workers(self) -> bool:
        """Whether it is known how many batches each pipeline has."""
        return all(size != tf.data.UNKNOWN_CARDINALITY for size in self.sizes)

    def start(self) -> Progress:
        """Starts an epoch."""
        self.epochs += 1
        seed = self.seed + self.epochs
        makers = [self._maker(p, seed) for p in range(self._num_pipelines)]
        return Progress(makers, list(self.sizes), seed)

    def _maker(self, pipeline: int, seed: int) -> Any:
        """(batches to skip, the epoch's seed) -> an iterator."""
        if pipeline in self._makers:
            return self._makers[pipeline]
        concrete, serves_all = self._traced(pipeline, seed)
        if serves_all:
            self._makers[pipeline] = concrete
        return concrete

    def _traced(self, pipeline: int, number: int) -> tuple[Any, bool]:
        """(skip, seed) -> an iterator; and whether the seed may be another than `number`."""
        seeds: list[_Seed] = []

        def make(skip: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
            seeds.append(_Seed(seed, number))
            tf.random.set_seed(seeds[0])  # of this function's graph
            dataset = self._make(pipeline, self._num_pipelines)
            options = tf.data.Options()
            options.deterministic = True
            # The thread that tunes an iterator may miss that it is freed, and look again after up
            # to a minute; until then TF 2.21 keeps the worker from answering anybody.
            options.autotune.enabled = False
            dataset = dataset.with_options(options).skip(skip).prefetch(tf.data.AUTOTUNE)
            return tf.nest.flatten(iter(dataset), expand_composites=True)[0]

        concrete = tf.function(make, autograph=False).get_concrete_function(
            tf.TensorSpec([], tf.int64), tf.TensorSpec([], tf.int64)
        )
        held = sum(_constant_bytes(op) for op in concrete.graph.get_operations())
        if held > _MOST_CONSTANT_BYTES:
            raise ValueError(
                f"The dataset that dataset_fn makes holds {held / 1e6:.0f} MB of arrays, which "
                "would be sent to every task at every epoch. Read them from files inside "
                "dataset_fn, or give fit the dataset itself: then batches come from the chief."
            )
        return concrete, not seeds[0].in_definitions


def _constant_bytes(operation: tf.Operation) -> int:
    return operation.node_def.ByteSize() if operation.type == "Const" else 0


class Progress:
    """Which batches of an epoch were taken, by whom, and the workers' iterators.

    All methods but those on iterators are called under the engine's lock or from the main thread.
    """

    def __init__(self, makers: list[Any], sizes: list[int], seed: int = 0):
        self._makers = makers
        self._seed = seed
        infinite = any(size == tf.data.INFINITE_CARDINALITY for size in sizes)
        self._sizes = [1 << 62 if s == tf.data.INFINITE_CARDINALITY else s for s in sizes]
        self._next = [0] * len(sizes)
        self._returned: list[Segment] = []
        self._left = self._total = 1 << 62 if infinite else sum(self._sizes)
        self._iterators: dict[int, tuple[int, int, int, tf.Tensor]] = {}

    is_shared = True

    # -- tokens -----------------------------------------------------------------------------

    def take(self) -> bool:
        """Counts one more batch to be handed out; False if there is none."""
        if not self._left:
            return False
        self._left -= 1
        return True

    def at_end(self) -> bool:
        """Whether every batch was handed out."""
        return not self._left

    # -- the position ------------------------------------------------------------------------

    def position(self) -> tuple[int, ...]:
        """Batches that were taken of each pipeline; at rest all but `left_behind` are done."""
        return tuple(self._next)

    def left_behind(self) -> tuple[Segment, ...]:
        """Batches that a lost worker had taken, and nobody has again yet."""
        return tuple(self._returned)

    def first(self, batches: int) -> tuple[int, ...]:
        """The position after so many batches if one pipeline is done after the other."""
        return tuple(
            min(max(batches - sum(self._sizes[:p]), 0), size) for p, size in enumerate(self._sizes)
        )

    def go_to(self, position: tuple[int, ...], left_behind: Sequence[Segment] = ()) -> bool:
        """Goes on there, and with what was left behind; False where there are no such batches."""
        if len(position) != len(self._sizes):
            return False
        if any(n > size for n, size in zip(position, self._sizes, strict=True)):
            return False
        ends = [0] * len(position)
        for segment in sorted(left_behind, key=dataclasses.astuple):
            if not 0 <= segment.pipeline < len(position) or segment.count < 1:
                return False
            if segment.start < ends[segment.pipeline]:
                return False
            ends[segment.pipeline] = segment.start + segment.count
        if any(end > taken for end, taken in zip(ends, position, strict=True)):
            return False
        self._next = list(position)
        self._returned = list(left_behind)
        self._left = self._total - sum(position) + sum(s.count for s in left_behind)
        return True

    # -- batches ----------------------------------------------------------------------------

    def _upcoming(self, worker: int, lost: Collection[int]) -> Segment | None:
        """What the worker would take next: its own, what came back, what lost workers left."""
        for p in [worker, -1, *lost]:
            if p < 0:
                if self._returned:
                    return self._returned[0]
            elif self._next[p] < self._sizes[p]:
                return Segment(p, self._next[p], self._sizes[p] - self._next[p])
        return None

    def limit(self, worker: int, lost: Collection[int]) -> int:
        """How many batches the worker can take at once."""
        upcoming = self._upcoming(worker, lost)
        return 0 if upcoming is None else upcoming.count

    def draw(self, worker: int, count: int, lost: Collection[int]) -> Segment:
        """Takes `count` batches, at most `limit`."""
        upcoming = self._upcoming(worker, lost)
        if upcoming is None or count > upcoming.count:
            raise RuntimeError(f"Worker {worker} cannot take {count} batches of {upcoming}.")
        if self._returned and upcoming is self._returned[0]:
            rest = Segment(upcoming.pipeline, upcoming.start + count, upcoming.count - count)
            self._returned[:1] = [rest] if rest.count else []
        else:
            self._next[upcoming.pipeline] += count
        return Segment(upcoming.pipeline, upcoming.start, count)

    def apart(self, segment: Segment) -> list[Segment]:
        """A segment's batches, a segment each."""
        starts = range(segment.start, segment.start + segment.count)
        return [Segment(segment.pipeline, start, 1) for start in starts]

    def give_back(self, segments: list[Segment]) -> None:
        """Returns batches that a lost worker had taken and not finished."""
        self._returned.extend(segments)

    # -- iterators --------------------------------------------------------------------------

    def end(self) -> None:
        """Frees workers' iterators, each of which may take a second, in whatever thread this is."""
        self._iterators.clear()

    def iterator(self, worker: int, incarnation: int, segment: Segment) -> tf.Tensor:
        """The worker's iterator at a segment's first batch; call it on the worker's device."""
        held = self._iterators.get(worker)
        if held is None or held[:3] != (incarnation, segment.pipeline, segment.start):
            with tf.device(None):  # not made on a worker, which may be stopped
                start = tf.constant(segment.start, tf.int64)
                seed = tf.constant(self._seed, tf.int64)
            handle = self._makers[segment.pipeline](start, seed)
        else:
            handle = held[3]
        end = segment.start + segment.count
        self._iterators[worker] = (incarnation, segment.pipeline, end, handle)
        return handle
