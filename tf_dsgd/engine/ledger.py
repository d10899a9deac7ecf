"""What a shard has counted, as the host reads it: ledgers, and staleness."""

from __future__ import annotations

import dataclasses

import numpy as np

# A worker's row in the shard's counters.
INCARNATION, SEQUENCE, APPLIED, STEPS, TAU_SUM, TAU_MAX, REPEATED, REPLACED, FAILED = range(9)
COLUMNS = 9
REASONS = ("repeated", "replaced", "failed")

# Staleness is counted exactly up to here; larger values share the last bin. Mean and maximum are
# exact always.
STALENESS_BINS = 1 << 14

# Each worker's own staleness is counted in fewer bins, of which these are the lower edges: exactly
# below 64, then four to a doubling. A thousand workers take 0.8 MB, and not 131.
WORKER_EDGES = np.array(
    [*range(64), *((4 + q) << (k - 2) for k in range(6, 14) for q in range(4))], np.int64
)


@dataclasses.dataclass(frozen=True)
class WorkerLedger:
    """Messages and steps of one worker, as its shard counted them."""

    steps: int
    """Mini-batches in the messages applied."""
    sent: int
    """Messages sent, repeats included."""
    applied: int
    """Messages applied, each exactly once."""
    repeated: int
    """Messages refused because they had been applied before."""
    replaced: int
    """Messages refused because their sender counted as lost: others do its mini-batches."""
    failed: int
    """Messages refused because a step of theirs raised an error, which ended training."""
    staleness_mean: float
    staleness_max: int

    @property
    def refused(self) -> int:
        """Messages not applied, for any of the three reasons."""
        return self.repeated + self.replaced + self.failed

    @property
    def in_flight(self) -> int:
        """Messages sent and not yet counted by the shard."""
        return self.sent - self.applied - self.refused


@dataclasses.dataclass(frozen=True)
class ShardLedger:
    """Where every message to one shard went: `sent == applied + refused + in_flight`.

    A message that arrives twice counts twice in `sent`, once in `applied` and once in `refused`.
    """

    workers: tuple[WorkerLedger, ...]

    @property
    def sent(self) -> int:
        """Messages sent by all workers, repeats included."""
        return sum(w.sent for w in self.workers)

    @property
    def applied(self) -> int:
        """Messages applied, each exactly once."""
        return sum(w.applied for w in self.workers)

    @property
    def refused(self) -> int:
        """Messages not applied; `reasons` says why."""
        return sum(w.refused for w in self.workers)

    @property
    def reasons(self) -> dict[str, int]:
        """Messages refused, by reason: `"repeated"`, `"replaced"`, `"failed"`."""
        return {name: sum(getattr(w, name) for w in self.workers) for name in REASONS}

    @property
    def in_flight(self) -> int:
        """Messages sent and not yet counted by the shard."""
        return self.sent - self.applied - self.refused


@dataclasses.dataclass(frozen=True)
class Ledger(ShardLedger):
    """The first shard's ledger, and that of every shard in `shards`.

    A push sends one message to every shard. They count the same, except while a push that a
    worker's death cut off between two shards is being completed.
    """

    shards: tuple[ShardLedger, ...]

    @property
    def cut_off(self) -> int:
        """Pushes that some shards applied and others not yet, because their worker died."""
        applied = [[w.applied for w in shard.workers] for shard in self.shards]
        return sum(max(column) - min(column) for column in zip(*applied, strict=True))


@dataclasses.dataclass(frozen=True)
class Staleness:
    """Staleness of all applied messages, in updates; NaN where nothing was applied yet."""

    count: int
    mean: float
    p50: float
    p99: float
    max: float

    def __str__(self) -> str:
        return (
            f"mean {self.mean:.2f}, p50 {self.p50:g}, p99 {self.p99:g}, max {self.max:g} "
            f"over {self.count} messages"
        )


@dataclasses.dataclass(frozen=True)
class Counters:
    """What a shard had counted at one moment, or between two."""

    version: int
    rows: np.ndarray
    """`[workers, 9]`, as the shard keeps them; the maximum is that since training began."""
    bins: np.ndarray
    """`[STALENESS_BINS]`: messages of each staleness."""
    worker_bins: np.ndarray
    """`[workers, len(WORKER_EDGES)]`: messages of each worker in each of its bins."""

    @property
    def applied(self) -> np.ndarray:
        """Messages applied, of each worker."""
        return self.rows[:, APPLIED]

    @property
    def refused(self) -> np.ndarray:
        """Messages refused, of each worker."""
        return self.rows[:, [REPEATED, REPLACED, FAILED]].sum(1)

    @property
    def numbered(self) -> np.ndarray:
        """Messages that had a number of their own, of each worker: applied, or failed."""
        return self.rows[:, APPLIED] + self.rows[:, FAILED]

    @property
    def steps(self) -> np.ndarray:
        """Mini-batches in messages applied, of each worker."""
        return self.rows[:, STEPS]

    @property
    def staleness_sums(self) -> np.ndarray:
        """The sum of the staleness of all messages applied, of each worker."""
        return self.rows[:, TAU_SUM]

    def since(self, before: Counters) -> Counters:
        """What was counted from `before` on."""
        rows = self.rows - before.rows
        rows[:, TAU_MAX] = self.rows[:, TAU_MAX]
        return Counters(
            self.version - before.version,
            rows,
            self.bins - before.bins,
            self.worker_bins - before.worker_bins,
        )

    def staleness(self) -> Staleness:
        """Summary over all workers."""
        count = int(self.bins.sum())
        if not count:
            return Staleness(0, *[float("nan")] * 4)
        below = np.cumsum(self.bins)
        largest = int(np.flatnonzero(self.bins)[-1])
        if largest == STALENESS_BINS - 1:
            largest = int(self.rows[:, TAU_MAX].max())

        def percentile(share: float) -> float:
            return float(np.searchsorted(below, share * count))

        return Staleness(
            count=count,
            mean=float(self.staleness_sums.sum()) / count,
            p50=percentile(0.5),
            p99=percentile(0.99),
            max=float(largest),
        )
