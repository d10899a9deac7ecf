"""What an engine asks of a user's step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import tensorflow as tf

from tf_dsgd.algorithm import Message
from tf_dsgd.arithmetic import Gradient


class Step(Protocol):
    """A user's step as an engine needs it: traced for a worker, with its weights and state."""

    function: Any
    """Concrete function: a batch to (outputs, gradients).

    Where workers run the optimizer the gradients are of tables that are split, which come first.
    """
    compiled: bool
    """Whether XLA compiles it."""
    outputs: list[tf.TensorSpec]
    metrics: list[Any]
    """Variables of metrics of which `fit` shows the sum over workers; then there are no outputs."""
    resets: Any
    """A `Resets` that counts those of them; None where workers are in this process."""
    weights: list[Any]
    """Variables with `.primary`, `.shard`, `.on_workers()`, `.copied` (whether workers have
    copies) and, of tables, `.edition`, in the order of the gradients."""
    sparse: list[bool]
    applications: list[Any]
    """What `optimize` applies; empty where no optimizer runs on shards."""

    element_spec: Any
    """Type of a batch."""
    packing: Any
    """How batches are sent to another process; see `strategies.packing.Packing`."""

    def take_batch(self, queue: tf.Tensor) -> Any:
        """The next batch of a queue."""

    def before_round(
        self, steps: tf.Tensor | None, batch: Callable[[tf.Tensor], Any]
    ) -> Callable[[tf.Tensor], Any]:
        """Traces what a worker does before so many steps; gives the same batches by number.

        None: it is one, and always.
        """

    def rate(self, index: int) -> tf.Tensor:
        """The optimizer's rate for weight `index`, traced for the side that is open."""

    def local_gradients(self, gradients: Sequence[Gradient]) -> list[Gradient]:
        """Gradients fit for a local step."""

    def optimize(
        self,
        shard: int,
        gradients: Sequence[Gradient],
        scale: Any,
        message: Message | None,
        side_by_side: bool,
    ) -> None:
        """The compiled optimizer's update of a shard's weights, traced there.

        Raises a ValueError for one that may not be made `side_by_side` with others, if it is.
        """

    def update_tables(self, shard: int, gradients: Sequence[Gradient]) -> None:
        """The compiled optimizer's update of a shard's tables, where workers run it otherwise."""

    def remember(self, shard: int, worker: tf.Tensor, rows: Mapping[int, tf.Tensor]) -> None:
        """The compiled optimizer remembers what `worker` fetches: of some weights only `rows`."""

    def reset_optimizer(self) -> None:
        """Gives what the worker's optimizer keeps there its first values."""

    def count_updates(self, shard: int, number: Any) -> None:
        """Counts updates that `optimize` did not make."""

    def count_steps(self, shard: int, number: Any) -> None:
        """Counts mini-batches whose message a shard has applied: schedules go on."""

    def on_worker(self, fn: Callable[[], Any]) -> Any:
        """Runs `fn` while variables resolve to a worker's copies."""

    def on_part(self, part: int, fn: Callable[[], Any]) -> Any:
        """Runs `fn`, which is traced on that part of a worker."""

    def on_shard(self, shard: int, fn: Callable[[], Any]) -> Any:
        """Runs `fn` while variables resolve to what that shard has of them."""

    def rewrites(self, variable: Any) -> bool:
        """Whether the traced update writes more of `variable` than the rows it was sent."""

    def fetched_state(self) -> list[Any]:
        """Other variables that a fetch copies."""

    def leaves(self, variable: Any) -> bool:
        """Whether training leaves such a variable as it is, and it has an `.edition`."""

    def merged_state(self) -> list[Any]:
        """Moving statistics and counts that workers change.

        `.momentum` is a moving statistic's, else None; `.averaged` tells which others are means.
        """
