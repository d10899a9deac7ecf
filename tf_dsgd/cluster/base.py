"""What a strategy asks of where its workers and shards are."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Any, ClassVar

from tf_dsgd import floods, gpu, resuming
from tf_dsgd._tf_errors import FAILED, FLOOD_GREETINGS, FLOOD_HEADS, FLOOD_RAISED, FLOOD_TAILS
from tf_dsgd.algorithm import ExchangeRule
from tf_dsgd.checks import positive_seconds
from tf_dsgd.console import end_scripts_in_a_line, say
from tf_dsgd.engine.base import Engine


class Cluster(abc.ABC):
    """Makes the engine on which a strategy runs."""

    @abc.abstractmethod
    def configure(self) -> None:
        """Sets what must be set before TensorFlow opens its devices."""

    locked_in_graph: ClassVar[bool] = False
    """Whether functions of several processes act on a shard."""
    reads_rows_by_round: ClassVar[bool] = False
    """Whether a worker reads rows of split tables once a round, as each reading is a call."""
    workers_can_leave: bool = False
    """Whether a worker, and what it owns, can be lost, or a straggler, while others go on."""
    runs_pipelines: ClassVar[bool] = False
    """Whether workers can run input pipelines of their own."""
    batches_a_call: ClassVar[int] = 1
    """Mini-batches that a worker takes at a time where a rule lets it take any number.

    Enough that what a call costs counts little, and few, as others wait for who has the last ones.
    """
    most_bytes_of_a_variable: ClassVar[int | None] = None
    """How large a variable may be that workers fetch whole; None for any size."""
    devices_per_worker: int = 1
    """Over how many devices a worker's replica can be laid."""
    gives_devices: ClassVar[str] = "devices_per_worker"
    """The argument that says so."""

    @abc.abstractmethod
    def shard_devices(self) -> list[str]:
        """Where each shard's variables are."""

    def host_device(self) -> str:
        """A device of this process."""
        return self.shard_devices()[0]

    @abc.abstractmethod
    def make_engine(self, exchange: ExchangeRule) -> Engine:
        """The engine for an exchange rule."""

    def arrange(self, *, needs_ps: bool, between_workers: bool) -> None:
        """What a strategy needs of tasks, where there are some, before they are connected to.

        Ps tasks; or that workers send to one another, and none holds weights.
        """

    def announce(self, shards: Sequence[tuple[int, int]], laid_out: bool) -> None:
        """Says how many variables, and bytes, each shard holds, where that is of interest.

        And whether a part of each worker is idle, as its replica is not `laid_out` over it.
        """
        if self.devices_per_worker > 1 and not laid_out:
            say(
                f"{self.gives_devices}={self.devices_per_worker} is for model_parallel: without it "
                "each worker uses the first of these alone. Give the strategy "
                'model_parallel=tf_dsgd.ModelParallel("auto"), or leave '
                f"{self.gives_devices} out."
            )


def configure_process() -> None:
    """What holds for the whole process, wherever its workers are."""
    gpu.configure_by_default()
    end_scripts_in_a_line(resuming.ENDS_TRAINING, FAILED)
    floods.sift(FLOOD_HEADS, FLOOD_TAILS, FLOOD_RAISED, FLOOD_GREETINGS)


def late_after(value: Any) -> float | None:
    """The argument `late_after_seconds`, checked."""
    return None if value is None else positive_seconds("late_after_seconds", value)
