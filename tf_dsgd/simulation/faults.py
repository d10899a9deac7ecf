"""Faults for a simulated cluster: workers that die or stop, ps tasks that die."""

from __future__ import annotations

import dataclasses
from typing import Any

from tf_dsgd.checks import called, entries, integer, one_of, real

__all__ = ["Fault", "fail_at", "fail_ps_at", "stop_at"]

PHASES = ("fetch", "compute", "push", "lock")


@called()
@dataclasses.dataclass(frozen=True)
class Fault:
    """What befalls one task; made by `fail_at`, `stop_at` and `fail_ps_at`.

    Example:

    >>> fault = tf_dsgd.faults.fail_at(worker=1, step=50, back_after=2.5)
    >>> fault.job, fault.index, fault.phase, fault.seconds
    ('worker', 1, 'compute', 2.5)
    """

    job: str
    """`"worker"` or `"ps"`."""
    index: int
    step: int
    phase: str | None
    stops: bool = False
    """Whether the task stops and goes on, and does not die."""
    seconds: float | None = None
    """After how many virtual seconds a worker is back, or goes on; None: never."""

    def __post_init__(self) -> None:
        one_of("job", self.job, ("worker", "ps"))
        object.__setattr__(self, "index", integer(self.job, self.index, 0))
        object.__setattr__(self, "step", integer("step", self.step, 0))
        if self.job == "worker":
            one_of("phase", self.phase, PHASES)
        if self.seconds is None and not self.stops:
            return
        seconds = real(self.seconds)
        if not 0 < seconds < float("inf"):
            name, end = ("seconds", "") if self.stops else ("back_after", ", or None for never")
            raise ValueError(
                f"{name} must be a positive number of virtual seconds{end}. "
                f"Received: {self.seconds!r}."
            )
        object.__setattr__(self, "seconds", seconds)


@called(examples={"worker": "1", "step": "50"})
def fail_at(
    worker: int, step: int, phase: str = "compute", *, back_after: float | None = None
) -> Fault:
    """A worker dies; what it held in memory is lost.

    Args:
        worker: its number, from 0.
        step: the mini-batch, of those that this worker takes, from 0, in whose round it happens.
        phase: where in the round: `"fetch"`, before it; `"compute"`; `"push"`, half-way through:
            the first half of the shards have the message (of one shard, none has: it comes when its
            sender is known to be lost); `"lock"`, while the shards use its message. Of a
            round that does not send, the last two mean the round that sends these gradients.
        back_after: after so many virtual seconds it joins again, with nothing in its memory;
            never if None.

    Returns:
        A fault for `tf_dsgd.SimulatedCluster(faults=[...])`.

    Raises:
        ValueError: for a wrong number or phase, naming it.

    Example:

    >>> cluster = tf_dsgd.SimulatedCluster(3, faults=[tf_dsgd.faults.fail_at(worker=1, step=50)])
    """
    return Fault("worker", worker, step, phase, seconds=back_after)


@called(examples={"worker": "1", "step": "50", "seconds": "3.0"})
def stop_at(worker: int, step: int, phase: str = "compute", *, seconds: float) -> Fault:
    """A worker stops, as by SIGSTOP, and goes on.

    If that takes longer than the cluster's `worker_timeout_seconds` it counts as lost meanwhile:
    its mini-batches go to others, and what it sends when it goes on is refused.

    Args:
        worker: its number, from 0.
        step: as in `fail_at`.
        phase: as in `fail_at`; with `"push"` the other shards get the message when it goes on.
        seconds: virtual seconds until it goes on.

    Returns:
        A fault for `tf_dsgd.SimulatedCluster(faults=[...])`.

    Raises:
        ValueError: for a wrong number or phase, naming it.

    Example:

    >>> stop = tf_dsgd.faults.stop_at(worker=0, step=20, seconds=3.0)
    >>> cluster = tf_dsgd.SimulatedCluster(2, compute_seconds=1.0, faults=[stop])
    """
    return Fault("worker", worker, step, phase, stops=True, seconds=seconds)


@called(examples={"ps": "0", "step": "50"})
def fail_ps_at(ps: int, step: int) -> Fault:
    """A ps task dies, and training with it: an error names it and the last checkpoint.

    Args:
        ps: number of the shard, from 0.
        step: it happens when so many mini-batches, over all workers, have been handed out.

    Returns:
        A fault for `tf_dsgd.SimulatedCluster(faults=[...])`.

    Raises:
        ValueError: for a wrong number, naming it.

    Example:

    >>> cluster = tf_dsgd.SimulatedCluster(2, faults=[tf_dsgd.faults.fail_ps_at(ps=0, step=100)])
    """
    return Fault("ps", ps, step, None)


def checked(faults: Any, num_workers: int, num_shards: int) -> tuple[Fault, ...]:
    """The faults of a caller.

    Raises:
        ValueError: naming the one that is none, or is of a task that is not there.
    """
    if faults is None:
        return ()
    found = tuple(entries("faults", faults, "a list of tf_dsgd.faults"))
    for place, fault in enumerate(found):
        if not isinstance(fault, Fault):
            raise ValueError(
                f"faults[{place}] must be made by tf_dsgd.faults.fail_at, stop_at or fail_ps_at. "
                f"Received: {fault!r}."
            )
        there = num_workers if fault.job == "worker" else num_shards
        if fault.index >= there:
            raise ValueError(
                f"faults[{place}] is of {fault.job} {fault.index}, and there are {there}, from 0."
            )
    return found
