"""What every engine knows whose workers may be lost or late, in processes or on a virtual clock."""

from __future__ import annotations

from collections.abc import Sequence

from tf_dsgd.engine.base import Engine, WorkerState
from tf_dsgd.engine.late import Again, LateWork
from tf_dsgd.engine.unapplied import Unapplied


class LosesWorkers(Engine):
    """Mixed in before the engine that runs the workers; its `__init__` sets what is named here."""

    _lost: dict[int, float]
    """Workers that are not there, and since when."""
    _unapplied: Unapplied
    _lateness: LateWork

    def numbers(self) -> list[int]:
        return list(self._unapplied.applied)  # a worker's own count is lost with it

    def restored(self, numbers: Sequence[int], handed_out: int) -> None:
        super().restored(numbers, handed_out)
        self._unapplied.applied = [int(n) for n in numbers]

    def _joined(self, worker: WorkerState) -> bool:
        return worker.index not in self._lost and super()._joined(worker)

    def _place(self, worker: WorkerState) -> int:
        return worker.index - sum(m < worker.index for m in self._lost)

    def _discard(self, failed: int | None) -> None:
        super()._discard(failed)
        numbered = zip(self._unapplied.applied, self.store.sequences(), strict=True)
        self._unapplied.applied = [max(pair) for pair in numbered]  # 0: it is not there

    # -- messages that are late -------------------------------------------------------------

    def _late_message(self, late: int) -> Again:
        """What a worker has under way, to be computed by another, too."""
        sequence = self._unapplied.applied[late] + 1
        return Again(
            late, self.store.incarnations[late], sequence, list(self._unapplied.held[late])
        )

    def _overtake(self, again: Again) -> None:
        """Another worker has sent a late one's message: nobody waits for it any more."""
        late = self.workers[again.worker]
        if self.store.incarnations[late.index] != again.incarnation:
            return  # it was lost meanwhile
        if self._unapplied.applied[late.index] >= again.sequence:  # it came first, and was held up
            late.clock = max(late.clock, self._slowest(but=late))
            return
        self._unapplied.acknowledge(late.index)
        late.unsent = 0
        late.clock += 1
        self._lateness.overtakes(late.index)

    def _catch_up(self, worker: WorkerState) -> None:
        """A worker that was overtaken has sent its message, which was refused."""
        self._lateness.forget(worker.index)
        worker.clock = max(worker.clock, self._slowest(but=worker))
        worker.fetch_next = True
