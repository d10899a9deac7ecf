"""Who of a cluster's tasks is there, answers, or has ended: asked now, and by the verdict.

What is asked of several tasks is asked of all at the same time: of one whose host is gone nothing
comes back, and the others do not wait for that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from tf_dsgd.membership import deadlines
from tf_dsgd.membership.group import Group
from tf_dsgd.membership.liveness import Liveness
from tf_dsgd.membership.peer import Peer
from tf_dsgd.transport import cluster_spec, probing


class Asked:
    """The tasks of a cluster, and what they say when they are asked.

    Args:
        cluster: the tasks.
        liveness: the verdict on who answers.
    """

    def __init__(self, cluster: cluster_spec.Tasks, liveness: Liveness):
        self.tasks = cluster
        self.liveness = liveness
        """The verdict on who answers."""
        self.groups = [
            Group([Peer(index, cluster.workers[index]) for index in indices])
            for indices in cluster.groups
        ]
        """What TensorFlow knows of each worker."""

    def worker_name(self, m: int) -> str:
        """Worker number m in words."""
        return " and ".join(self.tasks.name("worker", p.index) for p in self.groups[m].peers)

    def worker_listens(self, m: int) -> bool:
        """Whether all of worker number m can be reached."""
        return all(map(self._listens, self.groups[m].addresses))

    def answering(self, workers: Iterable[int]) -> set[int]:
        """Those of the workers all of whose processes answer a glance; asked at the same time."""
        return self._where_all(probing.not_answering, workers, deadlines.GLANCE_SECONDS)

    def reached(self, workers: Iterable[int]) -> set[int]:
        """Those of the workers all of whose processes can be reached; asked at the same time."""
        return self._where_all(probing.not_reachable, workers, deadlines.PROBE_SECONDS)

    def _where_all(
        self,
        missing: Callable[[Iterable[str], float], set[str]],
        workers: Iterable[int],
        seconds: float,
    ) -> set[int]:
        asked = {m: set(self.groups[m].addresses) for m in workers}
        addresses = set().union(*asked.values())
        silent = addresses & self.liveness.silent
        silent |= missing(addresses - silent, seconds)
        return {m for m, own in asked.items() if own.isdisjoint(silent)}

    def worker_has_ended(self, m: int) -> bool:
        """Whether a process of worker number m has ended, or counts as silent.

        One that is out of reach for less than it may be silent has not.
        """
        return bool(self._ended(self.groups[m].addresses, deadlines.PROBE_SECONDS))

    def _ended(self, addresses: Iterable[str], seconds: float) -> set[str]:
        silent = set(self.liveness.silent.intersection(addresses))
        return silent | probing.refusing({*addresses} - silent, seconds)

    def worker_is_silent(self, m: int) -> bool:
        """Whether the verdict on a process of worker number m is that it does not answer."""
        return any(map(self.liveness.is_silent, self.groups[m].addresses))

    @property
    def peers(self) -> list[Peer]:
        """The processes of all workers."""
        return [peer for group in self.groups for peer in group.peers]

    def _listens(self, address: str) -> bool:
        if self.liveness.is_silent(address):
            return False
        return probing.reachable(address, deadlines.PROBE_SECONDS)

    def addresses(self) -> list[str]:
        """Of all workers and ps tasks."""
        return [*self.tasks.workers.values(), *self.tasks.ps.values()]

    def name_at(self, address: str) -> str:
        """The worker or ps at an address, in words."""
        return self.tasks.name_at(address)

    def has_shard(self, address: str) -> bool:
        """Whether the task there holds a part of the model."""
        return any(self.tasks.jobs[job][index] == address for job, index in self.tasks.of_shards)

    def silent_shards(self) -> list[str]:
        """The tasks with shards, in words, that cannot be reached."""
        shards = set(self._shards())
        silent = self.liveness.silent & shards
        silent |= probing.not_reachable(shards - silent, deadlines.PROBE_SECONDS)
        return [name for address, name in self._shards().items() if address in silent]

    def ended_shards(self, seconds: float = deadlines.GLANCE_SECONDS) -> list[str]:
        """The tasks with shards, in words, that have ended, or count as silent.

        One that is out of reach for less than it may be silent is neither.
        """
        ended = self._ended(self._shards(), seconds)
        return [name for address, name in self._shards().items() if address in ended]

    def _shards(self) -> dict[str, str]:
        """Of the tasks with shards the addresses, and what they are called."""
        return {self.tasks.jobs[j][i]: self.tasks.name(j, i) for j, i in self.tasks.of_shards}

    def unanswering_shards(self, seconds: float) -> list[str]:
        """The tasks with shards, in words, that do not answer within that time."""
        shards = self._shards()
        return [shards[address] for address in probing.not_answering(shards, seconds)]
