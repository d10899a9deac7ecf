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
from typing import Any, Protocol

import tensorflow as tf

from tf_dsgd.arithmetic import Gradient


class Worker(Protocol):
    """What a rule sees of one worker while that worker's function is traced."""

    @property
    def weights(self) -> Sequence[tf.Variable]:
        """This worker's own copy of the weights, and of the state that travels with them."""

    def reset_optimizer(self) -> None:
        """Gives what the compiled optimizer keeps on this worker its first values again."""

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
        """The weights on this shard, which only shards change, and what travels with them."""

    def is_trained(self, index: int) -> bool:
        """Whether `weights[index]` is a trainable weight, not state that travels with them."""

    @property
    def has_optimizer(self) -> bool:
        """Whether `optimize` can be called.

        It cannot where the compiled optimizer runs on the workers, unless the strategy has another
        one for the shards.
        """

    @property
    def num_workers(self) -> int:
        """Number of workers in the cluster."""

    @property
    def version(self) -> tf.Tensor:
        """Updates made so far, an int64 scalar."""

    @property
    def steps(self) -> tf.Tensor:
        """Mini-batches in all messages received so far, this one aside; an int64 scalar."""

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

    def counter(self, name: str, dtype: Any = tf.int64, *, per_worker: bool = False) -> tf.Variable:
        """A scalar of this shard, at first 0; with `per_worker` it is `[workers]`."""

    def is_sparse(self, index: int) -> bool:
        """Whether weight `index` gets its gradients as `tf.IndexedSlices`."""

    def optimize(
        self, gradients: Sequence[Gradient], scale: Any = 1.0, message: Message | None = None
    ) -> None:
        """One update by the compiled optimizer; `scale` multiplies its *step* (its rate).

        Where that runs on the workers, by the optimizer that the strategy has for the shards.
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
    runs on the worker, with slots of its own, and `step` is called after it with no gradients.
    `"state"`: the same; and `sends_statistics` and `sends_slots` add to `weights` what layers and
    the optimizer keep, as far as it is of floats."""

    sends_statistics: bool = False
    sends_slots: bool = False

    keeps_weights: bool = False
    """Whether workers keep weights of their own over drains; those then end with a fetch."""

    repeatable: bool = False
    """Whether a message depends on nothing but what was fetched and the mini-batches. Where workers
    wait for one whose message is late, another can then compute it, too."""

    @abc.abstractmethod
    def step(self, worker: Worker, gradients: Sequence[Gradient]) -> None:
        """Uses the gradients of one mini-batch."""

    @abc.abstractmethod
    def message(self, worker: Worker) -> list[Gradient]:
        """Gives what is to be sent, one tensor per weight, and starts a new collection."""

    @abc.abstractmethod
    def fetched(self, worker: Worker, values: Sequence[Gradient]) -> None:
        """Takes what a fetch brought: weights, unless the server rule answers otherwise.

        An `IndexedSlices` holds only the rows that changed.
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

    def since(self, steps: int) -> ExchangeRule:
        """The rule from a drain on at which each worker has done `steps` mini-batches."""
        return self

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


class ServerRule(abc.ABC):
    """What a shard does with a message. Every method runs under the shard's lock."""

    @property
    def messages_per_update(self) -> int:
        """Messages that make a new version, as a rule; fewer may at a drain."""
        return 1

    @abc.abstractmethod
    def receive(self, shard: Shard, message: Message) -> tf.Tensor | bool:
        """Takes in one accepted message; tells whether the weights changed (a new version)."""

    def fetched(self, shard: Shard, worker: tf.Tensor) -> tf.Tensor | bool:
        """Called when `worker` fetches, before the weights are read.

        May remember what it sees, or use what is collected; tells whether the weights changed.
        """
        return False

    def answer(self, shard: Shard, worker: tf.Tensor, index: int) -> tf.Tensor | None:
        """What a fetch gives in place of `weights[index]`; None for the weight itself."""
        return None

    def flush(self, shard: Shard) -> tf.Tensor | bool | None:
        """At a drain: uses what is collected so far; None where a rule collects nothing."""
        return None


@dataclasses.dataclass(frozen=True)
class Algorithm:
    """Three rules that belong together."""

    local: LocalRule
    exchange: ExchangeRule
    server: ServerRule

    def steps_per_iteration(self, num_workers: int) -> int:
        """Mini-batches, over all workers, in one of the compiled optimizer's iterations."""
        if self.local.sends == "gradient":
            return self.exchange.push_every * self.server.messages_per_update
        return num_workers if self.local.sends == "state" else 1
