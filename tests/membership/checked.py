"""What must be true of a world, whatever happens, and when it is at rest."""

from collections import Counter

from tf_dsgd.membership.task import TaskState


class Checked:
    """Checks of a world's scheduler, tasks and shards."""

    def check(self):
        for shard in self.shards:
            doubled = [i for i, count in shard.counts.items() if count > 1]
            assert not doubled, f"counted twice: {doubled}; {self.standing()}"
        for task in self.tasks:
            self.seen[task.state] += 1
            for lease in [*task.leases, task.owes]:
                if lease is not None:
                    self.seen[lease.state] += 1
        for lease in self.scheduler.orphans:
            self.seen[lease.state] += 1
        if self.rule.bound is not None:
            self.check_bound()

    def check_bound(self):
        """Ho et al.: nobody begins a round when it is more than the bound ahead of the slowest."""
        working = [t for t in self.tasks if t.state is TaskState.IN_ROUND and t.open is not None]
        for task in working:
            slowest = self.scheduler.slowest(task.clock, but=task)
            assert task.clock - slowest <= self.rule.bound + 1, self.standing()

    def check_at_rest(self):
        expected = Counter(range(self.since, self.granted))
        for shard, before in zip(self.shards, self.counted_before, strict=True):
            counted = shard.counts - before
            lost = expected - counted
            assert not lost, f"lost: {sorted(lost)}; {self.standing()}"
            assert counted == expected
            assert shard.messages == self.shards[0].messages, "another message on another shard"
        assert not any(task.leases for task in self.tasks)
        assert not self.scheduler.orphans
        assert self.scheduler.handed_out == self.granted + self.handed_out_before
        sent = self.scheduler.messages_sent()
        for shard, surplus in zip(self.shards, self.surplus, strict=True):
            more = [applied - mine for applied, mine in zip(shard.applied, sent, strict=True)]
            assert more == surplus, self.standing()

    def standing(self):
        tasks = "; ".join(
            f"{t!r} leases {t.leases} owes {t.owes} running {t.running} number {t.number} "
            f"clock {t.clock}"
            for t in self.tasks
        )
        return (
            f"{tasks}; available {self.scheduler.available}, orphans {self.scheduler.orphans}, "
            f"threads {sorted(self.threads)}, sleeping {self.sleeping}, rule {self.rule}"
        )
