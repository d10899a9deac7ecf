"""The contract: an algorithm is three rules.

    local rule     what a worker does with the gradient of one mini-batch
    exchange rule  when it sends and fetches, and what it waits for
    server rule    what a shard does with a message, given its staleness; what it keeps at a fetch

Rules are TensorFlow operations on a `Worker` or a `Shard`, which give them weights and memory. They
know nothing of Keras, devices or threads: every engine traces the same rules into its functions.

A gradient is a `tf.Tensor` or, for embeddings, a `tf.IndexedSlices`. All lists are in one order.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar, Protocol

import tensorflow as tf

from tf_dsgd.arithmetic import Gradient


class Worker(Protocol):
    """What a rule sees of one worker while that worker's function is traced."""

    @property
    def weights(self) -> Sequence[tf.Variable]:
        """This worker's own copy of the weights."""

    @property
    def slots(self) -> Sequence[tf.Variable]:
        """What the compiled optimizer keeps on this worker; empty if it runs on the shard."""

    def cell(
        self,
        name: str,
        index: int,
        *,
        shape: Any = None,
        dtype: Any = None,
        copy_weight: bool = False,
    ) -> tf.Variable:
        """Memory of this worker for weight `index`, by default of that weight's shape and type.

        At first zeros (no rows where `shape` begins with None), or the weight if `copy_weight`.
        """

    def is_sparse(self, index: int) -> bool:
        """Whether weight `index` gets its gradients as `tf.IndexedSlices`."""

    def rate(self, index: int) -> tf.Tensor:
        """The compiled optimizer's learning rate for weight `index`, at this mini-batch step."""

    def local_gradients(self, gradients: Sequence[Gradient]) -> list[Gradient]:
        """Gradients fit for a local step: clipped as compiled; zero where float16 overflowed."""


class Shard(Protocol):
    """What a rule sees of a shard, inside its lock."""

    @property
    def weights(self) -> Sequence[tf.Variable]:
        """The weights of the model, which only shards change."""

    @property
    def num_workers(self) -> int:
        """Number of workers in the cluster."""

    @property
    def version(self) -> tf.Tensor:
        """Updates made so far, an int64 scalar."""

    def cell(
        self,
        name: str,
        index: int,
        *,
        shape: Any = None,
        dtype: Any = None,
        per_worker: bool = False,
    ) -> tf.Variable:
        """Memory of this shard for weight `index`, by default of its shape and type.

        At first zeros (no rows where `shape` begins with None). With `per_worker` it is
        `[workers, ...]`.
        """

    def counter(self, name: str, dtype: Any = tf.int64) -> tf.Variable:
        """A scalar of this shard, at first 0."""

    def is_sparse(self, index: int) -> bool:
        """Whether weight `index` gets its gradients as `tf.IndexedSlices`."""

    def optimize(
        self, gradients: Sequence[Gradient], scale: Any = 1.0, message: Message | None = None
    ) -> None:
        """One update by the compiled optimizer; `scale` multiplies its *step* (its rate).

        `message` is what brought the gradients, for optimizers that correct them for its delay;
        None where they are of several messages.
        """

    def remember(self, worker: tf.Tensor) -> None:
        """In `ServerRule.fetched`: lets the compiled optimizer remember what `worker` sees now."""

    def count_updates(self, number: Any = 1) -> None:
        """Counts updates in `optimizer.iterations` that `optimize` did not make."""


@dataclasses.dataclass(frozen=True)
class Message:
    """What a worker sent, as a shard sees it. All but `tensors` are int64 scalars."""

    worker: tf.Tensor
    version: tf.Tensor
    """Version of the fetch before the message's *first* gradient."""
    steps: tf.Tensor
    staleness: tf.Tensor
    """Updates applied to the shard since that fetch."""
    tensors: Sequence[Gradient]


class LocalRule(abc.ABC):
    """What a worker does with the gradient of one mini-batch."""

    sends: str = "gradient"
    """`"gradient"`: the step's gradients are given to `step`. `"update"`: the compiled optimizer
    runs on the worker, with slots of its own, and `step` is called after it with no gradients."""

    @abc.abstractmethod
    def step(self, worker: Worker, gradients: Sequence[Gradient]) -> None:
        """Uses the gradients of one mini-batch."""

    @abc.abstractmethod
    def message(self, worker: Worker) -> list[Gradient]:
        """Gives what is to be sent, and starts a new collection.

        One tensor per weight goes to that weight's shard; what follows, to the first shard.
        """

    @abc.abstractmethod
    def fetched(
        self, worker: Worker, values: Sequence[Gradient], extras: Sequence[tf.Tensor]
    ) -> None:
        """Takes fetched weights; an `IndexedSlices` holds only the rows that changed.

        `extras` is what the server rule's `fetched` gave, one shard's after the other.
        """

    def unsent_rows(self, worker: Worker, index: int) -> tf.Tensor | None:
        """Rows of sparse weight `index` that this worker changed and has not sent yet."""
        return None


@dataclasses.dataclass(frozen=True)
class ExchangeRule:
    """When a worker sends and fetches. Steps are counted from 0 at every drain."""

    push_every: int = 1
    fetch_every: int = 1

    wire_dtype: str | None = None
    """Type in which floating-point weights and messages travel; None for their own."""

    waits_for_version: ClassVar[bool] = False
    """Whether `may_fetch` can refuse. Engines look at versions only then."""

    def steps_to_event(self, step: int) -> int:
        """Mini-batches from `step` to the next push or fetch."""
        return min(
            self.push_every - step % self.push_every, self.fetch_every - step % self.fetch_every
        )

    def push_due(self, step: int) -> bool:
        """Whether a worker that has done `step` mini-batches sends now."""
        return step % self.push_every == 0

    def fetch_due(self, step: int) -> bool:
        """Whether a worker about to do mini-batch number `step` fetches first."""
        return step % self.fetch_every == 0

    def may_join(self, worker: int, steps: int) -> bool:
        """Whether `worker` takes part when `steps` mini-batches have been handed out."""
        return True

    def may_start(self, clock: int, slowest: int) -> bool:
        """Whether a worker that has sent `clock` messages may start its next round.

        What is allowed stays so when the slowest comes nearer.
        """
        return True

    def may_fetch(self, pushed_at: int, version: int) -> bool:
        """Whether a fetch is answered now; `pushed_at` is the version that the last push met."""
        return True


class ServerRule(abc.ABC):
    """What a shard does with a message. Every method runs under the shard's lock."""

    @property
    def messages_per_update(self) -> int:
        """Messages that make a new version, as a rule; fewer may at a drain."""
        return 1

    @abc.abstractmethod
    def receive(self, shard: Shard, message: Message) -> tf.Tensor | bool:
        """Takes in one accepted message; tells whether the weights changed (a new version)."""

    def fetched(self, shard: Shard, worker: tf.Tensor) -> Sequence[tf.Tensor]:
        """Called when `worker` fetches; may remember what it saw, and give it more than weights."""
        return ()

    def flush(self, shard: Shard) -> tf.Tensor | bool | None:
        """At a drain: uses what is collected so far; None where a rule collects nothing."""
        return None


@dataclasses.dataclass(frozen=True)
class Algorithm:
    """Three rules that belong together."""

    local: LocalRule
    exchange: ExchangeRule
    server: ServerRule
