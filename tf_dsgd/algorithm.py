"""The contract: an algorithm is three rules, and a codec between the first two.

    local rule     what a worker does with the gradient of one mini-batch
    codec          how what the local rule gives, and what a fetch brings, travels
    exchange rule  when a worker sends and fetches, and what it waits for
    server rule    what a shard does with a message, given its staleness; what it keeps at a fetch

Rules are TensorFlow operations on a `Worker` or a `Shard`, which give them weights and memory: see
`places.py`. They know nothing of Keras, devices or threads: every engine traces the same rules into
its functions.

A gradient is a `tf.Tensor` or, for embeddings, a `tf.IndexedSlices`. All lists are in one order.

An algorithm without shards has a `PeerRule` in place of the server rule.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Sequence

import tensorflow as tf

from tf_dsgd.arithmetic import Gradient
from tf_dsgd.places import Message, Place, Shard, Worker

__all__ = [
    "Algorithm",
    "Codec",
    "ExchangeRule",
    "LocalRule",
    "Message",
    "PeerRule",
    "Place",
    "ServerRule",
    "Shard",
    "Worker",
]


class LocalRule(abc.ABC):
    """What a worker does with the gradient of one mini-batch."""

    sends: str = "gradient"
    """`"gradient"`: the step's gradients are given to `step`. `"update"`: the compiled optimizer
    runs on the worker, with slots of its own, and `step` is called after it with no gradients.
    `"state"`: the same, but with those of the first weights, where workers have no copies of them;
    and `sends_statistics` and `sends_slots` add to `weights` what layers and the optimizer keep, as
    far as it is of floats."""

    sends_statistics: bool = False
    sends_slots: bool = False

    keeps_weights: bool = False
    """Whether workers keep weights of their own over drains; those then end with a fetch."""

    shares_weights: bool = False
    """Whether workers read the shards' own weights, in the same memory, and have no copies."""

    repeatable: bool = False
    """Whether a message depends on nothing but what was fetched and the mini-batches. A backup task
    can then compute a straggler's message where others wait for that message."""

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


class Codec:
    """How tensors travel; this one leaves them as they are.

    A tensor may become several, of lengths that are known only when it runs.
    """

    repeatable: bool = True
    """As `LocalRule.repeatable`: False where `encode` keeps something on the worker, as a residual.
    A worker that is lost takes it along."""

    held_back: str | None = None
    """The worker's cell of what was to be sent and was not yet; None where nothing is held back."""

    @property
    def keeps(self) -> tuple[str, ...]:
        """All cells in which `encode` keeps something; they stay over drains, and are saved."""
        return () if self.held_back is None else (self.held_back,)

    def encode(self, worker: Worker, index: int, tensor: Gradient) -> list[Gradient]:
        """What is sent in place of a message's tensor; called once for each message."""
        return [tensor]

    def decode(self, place: Place, index: int, sent: Sequence[Gradient]) -> Gradient:
        """The tensor that the server rule gets on a shard, or a peer rule on a worker."""
        return sent[0]

    def encode_fetched(self, shard: Shard, index: int, value: Gradient) -> list[Gradient]:
        """What travels in place of a weight, or of the server rule's answer."""
        return [value]

    def decode_fetched(self, worker: Worker, index: int, sent: Sequence[Gradient]) -> Gradient:
        """The value that the local rule gets."""
        return sent[0]


@dataclasses.dataclass(frozen=True)
class ExchangeRule:
    """When a worker sends and fetches. Steps are counted from 0 at every drain."""

    push_every: int = 1
    fetch_every: int = 1
    in_turn = False
    """Whether workers take and send in turn, as `engine/turns.py` says; not on a `TFCluster`."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "may_start" in vars(cls) and cls.bounds_staleness is ExchangeRule.bounds_staleness:
            raise TypeError(
                f"{cls.__name__} defines may_start and does not say whether it bounds staleness. "
                "Define bounds_staleness, too."
            )

    @property
    def bounds_staleness(self) -> bool:
        """Whether it depends on the slowest worker who may start; else `may_start` is not asked."""
        return False

    def since(self, steps: int) -> ExchangeRule:
        """The rule from a drain on at which each worker has done `steps` mini-batches."""
        return self

    def steps_to_event(self, step: int) -> int:
        """Mini-batches from `step` to the next push or fetch."""
        return min(
            self.push_every - step % self.push_every, self.fetch_every - step % self.fetch_every
        )

    def share(self, steps: int, left: int, workers: int) -> int:
        """How many of `steps` a worker takes at a time, where so many are left to so many."""
        return steps

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
    """What a shard does with a message. Its methods run under the lock, but for `lock_free`."""

    lock_free: str | None = None
    """Why `receive` may run without the lock, while other messages are applied and weights read, in
    a sentence; None where it may not. That a message is taken once and counted stays locked."""

    averages_statistics: bool = False
    """Whether BatchNorm's moving statistics of several messages are averaged, at the rule's
    `shard.average_statistics()`; by default each message's are applied as it comes."""

    @property
    def messages_per_update(self) -> int:
        """Messages that make a new version, as a rule; fewer may at a drain."""
        return 1

    @abc.abstractmethod
    def receive(self, shard: Shard, message: Message) -> tf.Tensor | bool:
        """Takes in one accepted message; tells whether the weights changed (a new version)."""

    def fetched(self, shard: Shard, worker: tf.Tensor) -> tf.Tensor | bool:
        """Before `worker` reads the weights; tells whether it changed them.

        May remember what the worker sees, or use what is collected.
        """
        return False

    def answer(self, shard: Shard, worker: tf.Tensor, index: int) -> tf.Tensor | None:
        """What a fetch gives in place of `weights[index]`; None for the weight itself."""
        return None

    def flush(self, shard: Shard) -> tf.Tensor | bool | None:
        """At a drain: uses what is collected so far; None where a rule collects nothing."""
        return None


class PeerRule(abc.ABC):
    """In place of a server rule, where no shard has weights: workers send to one another.

    Each has all weights. Every worker takes in every message, its own, too, and all in one order;
    so those that have taken in the same ones have the same weights, to the bit, if
    `LocalRule.message` leaves the weights as they were before the message's mini-batches.

    A fetch is what a worker does before a mini-batch: it takes in what came, and travels nowhere.
    Then `LocalRule.fetched` gets the worker's own weights. A drain ends with a fetch.
    """

    def peers(self, worker: int, num_workers: int) -> Sequence[int]:
        """To whom `worker` sends: by default to all, itself included. Engines run no other."""
        return range(num_workers)

    @abc.abstractmethod
    def receive(self, worker: Worker, message: Message) -> None:
        """Takes in a message, between two of the worker's own mini-batches.

        A message's version is how many its sender had taken in before the first gradient; its
        staleness how many more come before it.
        """


@dataclasses.dataclass(frozen=True)
class Algorithm:
    """Rules that belong together, and how their tensors travel."""

    local: LocalRule
    exchange: ExchangeRule
    server: ServerRule | PeerRule
    codec: Codec = dataclasses.field(default_factory=Codec)

    @property
    def on_shards(self) -> ServerRule:
        """The server rule, of an algorithm that has one."""
        if isinstance(self.server, PeerRule):
            raise TypeError(f"No shard has weights, so there is no rule: {self.server!r}.")
        return self.server

    @property
    def between_peers(self) -> PeerRule | None:
        """The rule in place of a server rule; None where there are shards."""
        return self.server if isinstance(self.server, PeerRule) else None

    def steps_per_iteration(self, num_workers: int) -> int:
        """Mini-batches, over all workers, in one of the compiled optimizer's iterations."""
        if self.local.sends == "gradient" and self.between_peers is None:
            return self.exchange.push_every * self.on_shards.messages_per_update
        return num_workers if self.local.sends == "state" else 1
