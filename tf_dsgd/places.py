"""What the rules of an algorithm are given: a worker, a shard, a message.

They are used while a function is traced, or by a test, by hand.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import tensorflow as tf

from tf_dsgd.arithmetic import Gradient


class Place(Protocol):
    """What a rule sees of a worker and of a shard alike, while a function of it is traced."""

    @property
    def weights(self) -> Sequence[tf.Variable]:
        """The weights there, a worker's own copy of them, and the state that travels with them."""

    def cell(self, name: str, index: int, *, shape: Any = None, dtype: Any = None) -> tf.Variable:
        """Memory there for weight `index`, by default of that weight's shape and type.

        At first zeros; no rows where `shape` begins with None.
        """

    def is_sparse(self, index: int) -> bool:
        """Whether weight `index` gets its gradients as `tf.IndexedSlices`."""

    def is_copied(self, index: int) -> bool:
        """Whether workers have copies of weight `index`: not of a table that is split by rows."""


class Worker(Place, Protocol):
    """What a rule sees of one worker."""

    def cell(
        self,
        name: str,
        index: int,
        *,
        shape: Any = None,
        dtype: Any = None,
        copy_weight: bool = False,
    ) -> tf.Variable:
        """As `Place.cell`; with `copy_weight` it is at first the weight."""

    def encoded(self, index: int, emitted: Any, square: tf.Tensor) -> None:
        """Says, of what `Codec.encode` is given for weight `index`, what is measured of messages.

        How many of its elements are in the message, and the square of its 2-norm.
        """

    def reset_optimizer(self) -> None:
        """Gives what the compiled optimizer keeps on this worker its first values again."""

    def rate(self, index: int) -> tf.Tensor:
        """The compiled optimizer's learning rate for weight `index`, at this mini-batch step."""

    def local_gradients(self, gradients: Sequence[Gradient]) -> list[Gradient]:
        """Gradients fit for a local step: clipped as compiled; zero where float16 overflowed."""


class Shard(Place, Protocol):
    """What a rule sees of a shard, inside its lock."""

    def rows(self, index: int) -> range:
        """Which rows of the whole weight `weights[index]` has: its row k is row `rows(index)[k]`.

        All, but of a table that is split by rows, where every n-th is on one of n shards. The
        indices in a message are those of `weights[index]`.
        """

    def is_trained(self, index: int) -> bool:
        """Whether `weights[index]` is a trainable weight, not state that travels with them."""

    @property
    def has_optimizer(self) -> bool:
        """Whether `optimize` can be called: not if it runs on workers and shards have no other."""

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
        """As `Place.cell`; with `per_worker` it is `[workers, ...]`."""

    def counter(self, name: str, dtype: Any = tf.int64, *, per_worker: bool = False) -> tf.Variable:
        """A scalar of this shard, at first 0; with `per_worker` it is `[workers]`."""

    def once(self, name: str, body: Callable[[], Any]) -> Any:
        """What `body` gives, traced once and called wherever a rule asks for it by that name.

        For what `receive` or `fetched` does, and `flush`, too, so that it is not traced for each.
        It takes nothing from the function around it.
        """

    def optimize(
        self, gradients: Sequence[Gradient], scale: Any = 1.0, message: Message | None = None
    ) -> None:
        """One update by the compiled optimizer; `scale` multiplies its *step* (its rate).

        `message` is what brought the gradients, for optimizers that correct them for its delay;
        None where they are of several messages.
        """

    def update_tables(self, gradients: Sequence[Gradient]) -> None:
        """The compiled optimizer's update of what workers have no copies of, where they run it.

        `gradients` are those of these weights, in order. It does not count in `iterations`.
        """

    def holding_rows(self, tensors: Sequence[Gradient], body: Callable[[], None]) -> None:
        """Traces `body` under the locks of the rows that the sparse ones of `tensors` name.

        For rules without the shard's lock. `tensors[i]` is of `weights[i]`.
        """

    def remember(self, worker: tf.Tensor) -> None:
        """In `ServerRule.fetched`: lets the compiled optimizer remember what `worker` sees now."""

    def average_statistics(self) -> None:
        """Averages the moving statistics received; see `ServerRule.averages_statistics`."""

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
