"""Membership and leases through random histories, without a process and without TensorFlow.

Whatever happens to workers, each mini-batch counts exactly once on each shard, messages stand for
the same mini-batches on all of them, no lease stays open when somebody can run it, and nobody waits
for what never comes (`world`). A seeded driver makes hundreds of thousands of transitions; a
thousand histories are hypothesis's own, which makes one that fails small.

Training also ends by errors, wherever it stands, and goes on from checkpoints, in the same cluster
or, as after the loss of a shard or of the chief, in another.

That the histories find bugs is shown by thirteen schedulers, each wrong in one place, all of them
found:

    CountsWhatWasRefused   takes the answer of a straggler whose message another sent for its own
    GivesBackTooMuch       gives a lost worker's mini-batches to others though a shard has them
    ForgetsOrphans         takes a message that some shards lack for counted
    TrustsAnyRunner        takes an orphan for completed by who had begun it as a backup task
    NumbersTooEarly        lets a worker go on before its orphaned lease was completed
    EndsTooEarly           lets a drain end while some shards lack a message
    BoundByIdle            has a worker wait, at a drain, for workers that have nothing to do
    CountsAllOfACall       takes all messages of a call for counted where the first ones are
    RunsOneOfACall         has a backup task compute the first message of a call for all of them
    WaitsForOne            leaves an epoch's short round to one worker, also where that one is lost
    KeepsOrphans           has orphans of a training that an error ended completed in the next
    NumbersOn              goes on numbering messages where it was, and not where the checkpoint was
    ForgetsTheWarmStart    takes a warm start for over that, by the checkpoint, is not

BoundByIdle was in the engine that this scheduler took the place of, ForgetsTheWarmStart in this
one.
"""

import collections
import time

import hypothesis
import pytest
from hypothesis import strategies as st

from tests.membership.world import World
from tf_dsgd.engine.scheduler import Scheduler
from tf_dsgd.membership.lease import LeaseState
from tf_dsgd.membership.task import TaskState

TRANSITIONS, SHORT = 800_000, 25
SECONDS = 170.0


def test_random_histories():
    """Of 25 transitions on average before the first drain, from seeds that name them."""
    made, in_a_row, broken_off, restored = 0, 0, 0, 0
    seen, began = collections.Counter(), time.monotonic()
    for seed in range(1 << 30):
        world = World(seed)
        try:
            world.run(SHORT)
        except Exception as error:
            error.add_note(f"World({seed}).run({SHORT})")
            raise
        made += world.transitions
        in_a_row += world.in_a_row
        broken_off += world.broken_off
        restored += world.restored
        seen.update(world.seen)
        if made >= TRANSITIONS:
            break
        assert time.monotonic() - began < SECONDS, f"{made} transitions in that time"
    passed = {LeaseState.COUNTED, LeaseState.RETURNED}  # those are held by nobody any more
    assert {*LeaseState, *TaskState} - seen.keys() == passed
    assert min(seen.values()) > 100, seen
    assert in_a_row > 1000
    assert min(broken_off, restored) > 100


@pytest.mark.slow
@hypothesis.settings(max_examples=1000, deadline=None, derandomize=True)
@hypothesis.given(st.randoms(use_true_random=False), st.integers(5, 60))
def test_histories_that_are_made_small(random, transitions):
    World(random).run(transitions)


def test_histories_with_backup_tasks_on_several_shards():
    """What the rarest of mistakes needs, and the scheduler has not made."""
    for seed in range(5000):
        World(seed, shares=True).run(SHORT)


class CountsWhatWasRefused(Scheduler):
    def counted(self, task, lease, now):
        refused = lease.state is LeaseState.SUPERSEDED
        counts = super().counted(task, lease, now)
        task.number += refused
        return counts or refused


class GivesBackTooMuch(Scheduler):
    def fenced(self, task, last):
        return super().fenced(task, [task.number for _ in last])


class ForgetsOrphans(Scheduler):
    def fenced(self, task, last):
        return super().fenced(task, [max(last) for _ in last])


class TrustsAnyRunner(Scheduler):
    def ran(self, task, lease, messages=1):
        if task.running is lease and lease.state is LeaseState.ORPHANED:
            lease.runner = task.index
        super().ran(task, lease, messages)


class NumbersTooEarly(Scheduler):
    def limit(self, task):
        orphans, self.orphans = self.orphans, []
        try:
            return super().limit(task)
        finally:
            self.orphans = orphans

    def for_others(self, task, now):
        return None if self.available else super().for_others(task, now)


class EndsTooEarly(Scheduler):
    @property
    def unfinished(self):
        orphans, self.orphans = self.orphans, []
        try:
            return super().unfinished
        finally:
            self.orphans = orphans


class BoundByIdle(Scheduler):
    def slowest(self, *clocks, but=None):
        draining, self.draining = self.draining, False
        try:
            return super().slowest(*clocks, but=but)
        finally:
            self.draining = draining


class CountsAllOfACall(Scheduler):
    def fenced(self, task, last):
        lease = task.open
        if lease is not None and lease.messages > 1 and max(last) > task.number:
            last = [lease.last for _ in last]
        return super().fenced(task, last)


class RunsOneOfACall(Scheduler):
    def messages_of(self, lease):
        return super().messages_of(lease)[:1]


class KeepsOrphans(Scheduler):
    def clear(self, numbers):
        orphans, self.orphans = self.orphans, []
        super().clear(numbers)
        self.orphans = orphans


class NumbersOn(Scheduler):
    def restored(self, numbers, numbered, handed_out):
        numbers = [max(task.number, n) for task, n in zip(self.tasks, numbers, strict=True)]
        super().restored(numbers, numbered, handed_out)


class ForgetsTheWarmStart(Scheduler):
    def restored(self, numbers, numbered, handed_out):
        may_join_later = self._may_join_later
        super().restored(numbers, numbered, handed_out)
        self._may_join_later = may_join_later


class WaitsForOne(Scheduler):
    def round_steps(self, task):
        waits = self.wants_short_round and self.last_short_round not in (None, task)
        return 0 if waits else super().round_steps(task)


@pytest.mark.parametrize(
    "wrong",
    [
        CountsWhatWasRefused,
        GivesBackTooMuch,
        ForgetsOrphans,
        TrustsAnyRunner,
        NumbersTooEarly,
        EndsTooEarly,
        BoundByIdle,
        CountsAllOfACall,
        RunsOneOfACall,
        WaitsForOne,
        KeepsOrphans,
        NumbersOn,
        ForgetsTheWarmStart,
    ],
)
def test_the_histories_find(wrong):
    rare = wrong in (TrustsAnyRunner, BoundByIdle)  # one in some thousands even so
    for seed in range(10_000 if rare else 5_000):
        world = World(seed, wrong, shares=rare)
        try:
            world.run(SHORT)
        except (AssertionError, RuntimeError):
            return
    pytest.fail(f"{wrong.__name__} was not found")
