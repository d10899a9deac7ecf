"""What becomes of mini-batches, traced by hand on the scheduler that trains."""

import pytest

from tests.membership.parts import Queue, Rule
from tf_dsgd.engine import in_a_row
from tf_dsgd.engine.scheduler import Scheduler
from tf_dsgd.engine.work import What
from tf_dsgd.membership import lease as leases
from tf_dsgd.membership import peer as peers
from tf_dsgd.membership import task as tasks
from tf_dsgd.membership.lease import Lease, LeaseState
from tf_dsgd.membership.task import Task, TaskState


def scheduler(number=3, **options):
    """So many workers; mini-batches are "a", "b", "c" ..."""
    rule = options.pop("rule", Rule(1, 4))
    made = Scheduler(rule, [Task(m) for m in range(number)], **options)
    made.source = Queue()
    made.source.ids.extend("abcdefgh")
    made.available = 8
    return made


def counted(made, worker, messages):
    """The worker takes and sends so many messages of one mini-batch."""
    task = made.tasks[worker]
    for _ in range(messages):
        lease = made.taken(task, 1)
        assert made.counted(task, lease, 0.0)


@pytest.mark.parametrize(
    ("kept", "last", "again", "orphan"),
    [
        (False, [2, 2], ["c"], None),
        (False, [3, 3], [], None),
        (False, [2, 3], [], ["c"]),
        (True, [2, 2], ["c", "d"], None),
        (True, [3, 3], ["d"], None),
        (True, [3, 2], ["d"], ["c"]),
    ],
)
def test_the_numbers_that_shards_have_tell_what_becomes_of_a_lost_workers_mini_batches(
    kept, last, again, orphan
):
    """Worker 1 has sent two messages; "c" is of the third, and "d", if kept, is behind it."""
    made = scheduler()
    task = made.tasks[1]
    counted(made, 1, 2)
    third = made.taken(task, 1)
    if kept:
        made.collected(task, "message")
        made.taken(task, 1)
    before = made.available
    assert made.lose(task, 7.0) == 1
    loss = made.fenced(task, last)
    assert list(made.source.returned) == again
    assert made.available == before + len(again) == 6 - bool(kept) - 1 + len(again)
    assert (loss.orphan is not None) == (orphan is not None)
    if orphan is not None:
        assert loss.orphan is third and third.parts == [orphan]
        assert third.name == (1, 1, 3)  # as its shards take it now
    assert task.number == max(last)  # where its next incarnation goes on
    assert not task.leases and task.clock == max(last)
    assert (task.state, task.since) == (TaskState.LOST, 7.0)


def test_who_completes_a_lost_workers_lease():
    """Any worker; from the moment it joins again only it itself, before it goes on."""
    made = scheduler()
    first, lost, third = made.tasks
    made.taken(lost, 1)
    made.lose(lost, 0.0)
    orphan = made.fenced(lost, [0, 1]).orphan
    assert made.limit(lost) == 0 and made.limit(first) > 0
    doing = made.next(first, 0.0)
    assert (doing.what, doing.lease) == (What.COMPLETE, orphan)
    assert made.for_others(third, 0.0) is None  # one at a time
    assert not made.admits(lost)
    made.lose(first, 0.0)  # whoever completes it may be lost, too
    made.fenced(first, [0, 0])
    assert orphan.runner is None and made.admits(lost)
    assert made.for_others(third, 0.0) is None  # it is the owner's again
    made.joins(lost)
    doing = made.next(lost, 0.0)
    assert (doing.what, doing.lease) == (What.COMPLETE, orphan)
    made.ran(lost, orphan)
    assert orphan.state is LeaseState.COUNTED and made.orphans == []
    assert made.limit(lost) > 0
    assert made.messages_sent() == [0, 1, 0]  # the orphan; nothing under the runner's own number


def straggling():
    """Worker 0 computes "a" from 0 on; worker 1 has sent what took it 2, and waits."""
    made = scheduler(2, rule=Rule(1, 1, bound=0), backup_after=3.0)
    made.backs_up = True
    slow, quick = made.tasks
    lease = made.next(slow, 0.0).lease
    made.begins(slow, 0.0)
    own = made.next(quick, 0.0).lease
    made.begins(quick, 0.0)
    made.ends(quick)
    assert made.counted(quick, own, 2.0)
    doing = made.next(quick, 2.0)
    assert doing.what is What.WAIT and doing.until == 2.0 + 3.0  # its rule has it wait for worker 0
    return made, slow, quick, lease


def test_a_backup_task_sends_a_stragglers_lease_in_its_name():
    made, slow, quick, lease = straggling()
    assert made.next(quick, 4.9).what is What.WAIT
    doing = made.next(quick, 5.0)
    assert (doing.what, doing.lease) == (What.BACK_UP, lease)
    assert lease.state is LeaseState.SHARED and made.limit(slow) == 0
    made.ran(quick, lease)
    assert (slow.owes, slow.number, slow.clock, slow.leases) == (lease, 1, 1, [])
    assert not made.is_awaited(slow)  # a drain does not wait for it
    assert made.next(quick, 6.0).what is What.ROUND
    assert not made.counted(slow, lease, 50.0)  # what it sends is refused
    assert lease.state is LeaseState.COUNTED and slow.owes is None and slow.fetch_next


def test_of_a_straggler_and_its_backup_the_first_counts():
    made, slow, quick, lease = straggling()
    made.next(quick, 5.0)
    assert made.counted(slow, lease, 5.5)
    made.ran(quick, lease)  # refused as a repetition
    assert slow.owes is None and slow.number == 1
    assert made.messages_sent() == [1, 1]


def test_a_straggler_that_is_lost_while_it_is_backed_up():
    """Its shards refuse what the backup task sends in the name of who was replaced."""
    made, slow, quick, lease = straggling()
    made.next(quick, 5.0)
    made.lose(slow, 6.0)
    made.ran(quick, lease)
    made.fenced(slow, [0])
    assert lease.state is LeaseState.RETURNED and list(made.source.returned) == ["a"]
    assert slow.owes is None and slow.number == 0


def test_an_answer_that_comes_after_the_worker_was_lost_counts_nothing():
    made = scheduler()
    task = made.tasks[0]
    lease = made.taken(task, 1)
    made.lose(task, 0.0)
    assert not made.counted(task, lease, 1.0)  # shards are being asked
    made.fenced(task, [1])
    assert not made.counted(task, lease, 1.0)
    assert (task.number, task.clock) == (1, 1)


def test_after_an_error_nothing_goes_to_others():
    made = scheduler()
    made.taken(made.tasks[1], 1)
    made.collected(made.tasks[1], "message")
    made.taken(made.tasks[1], 1)
    made.clear([0, 4, 0])
    assert made.available == 0 and not made.unfinished
    assert made.tasks[1].number == 4


def test_a_worker_that_waits_for_pipelines_of_those_that_take_no_part_yet():
    """With a warm start the first worker does all there is, if that is less."""
    made = scheduler(2, rule=Rule(1, 1, warm_start=100))
    made.others()
    assert made.others() == [1]


@pytest.mark.parametrize(
    ("of", "allowed"),
    [(LeaseState, leases.ALLOWED), (TaskState, tasks.ALLOWED), (peers.PeerState, peers.ALLOWED)],
)
def test_what_does_not_follow_raises(of, allowed):
    assert set(allowed) == set(of)
    for state in of:
        for other in of:
            made = peers.Peer(0, "h:1") if of is peers.PeerState else None
            made = made or (Task(0) if of is TaskState else Lease(0, 0, 1))
            made._state = state
            if other in allowed[state]:
                made.become(other)
                assert made.state is other
            else:
                with pytest.raises(RuntimeError, match="does not follow"):
                    made.become(other)


def test_an_orphan_is_not_counted_by_an_answer_of_the_owner_that_was_lost():
    """A refusal is no error: the call comes back as if nothing had happened."""
    made = scheduler()
    task = made.tasks[1]
    lease = made.taken(task, 1)
    made.lose(task, 0.0)
    made.fenced(task, [0, 1])
    assert not made.counted(task, lease, 1.0)
    assert lease.state is LeaseState.ORPHANED and made.orphans == [lease]


def test_who_has_no_work_and_is_read_slowly_holds_nobody_up_under_a_bound():
    """Stopped as the chief reads what it shows: there is no lease of it that another could run."""
    made = scheduler(rule=Rule(bound=0))
    first, second, third = made.tasks
    counted(made, 0, 1)
    counted(made, 2, 1)
    assert not made.may_begin(first) and not made.may_begin(third)
    second.read_is_slow = True
    assert made.may_begin(first) and made.may_begin(third)
    made.taken(second, 1)  # with mini-batches of its own it is waited for, or these are run
    assert not made.may_begin(first)


def several(number=2, rounds=3, rule=None, **options):
    """Workers that have sent one message each, and may make so many rounds in a call."""
    made = scheduler(number, rule=rule or Rule(1, 1), **options)
    made.source.ids.extend("ijkl")
    made.available = 12
    made.rounds_a_call = rounds
    for worker in range(number):
        counted(made, worker, 1)
    return made


@pytest.mark.parametrize(
    ("last", "again", "orphan", "number"),
    [
        ([1, 1], ["c", "d", "e"], None, 1),
        ([2, 2], ["d", "e"], None, 2),
        ([3, 3], ["e"], None, 3),
        ([4, 4], [], None, 4),
        ([2, 1], ["d", "e"], ["c"], 2),
        ([2, 3], ["e"], ["d"], 3),
        ([4, 3], [], ["e"], 4),
    ],
)
def test_of_a_call_of_several_rounds_each_message_counts_by_itself(last, again, orphan, number):
    """Worker 0 has sent one message, and is lost in a call with "c", "d" and "e"."""
    made = several()
    task = made.tasks[0]
    assert made.take(task) == 3
    lease = task.open
    assert (lease.messages, lease.number, lease.last, lease.steps) == (3, 2, 4, 3)
    made.begins(task, 0.0)
    made.lose(task, 1.0)
    loss = made.fenced(task, last)
    assert list(made.source.returned) == again and loss.count == len(again)
    assert made.available == 12 - 2 - 3 + len(again)
    assert (task.number, task.clock, task.leases) == (number, number, [])
    if orphan is None:
        assert loss.orphan is None and made.orphans == []
        return
    assert [part for parts in loss.orphan.parts for part in parts] == orphan
    assert (loss.orphan.number, loss.orphan.messages) == (number, 1)
    assert made.next(made.tasks[1], 2.0).lease is loss.orphan
    made.ran(made.tasks[1], loss.orphan)
    assert loss.orphan.state is LeaseState.COUNTED and not made.orphans


def test_all_messages_of_a_call_count_when_it_is_over():
    made = several()
    task = made.tasks[0]
    made.take(task)
    lease = task.open
    made.begins(task, 10.0)
    assert made.counted(task, lease, 10.3)
    assert (task.number, task.clock, task.took) == (4, 4, pytest.approx(0.1))
    assert made.messages_sent() == [4, 1]


def test_a_backup_task_sends_all_messages_of_a_stragglers_call():
    made = several(backup_after=3.0)
    made.backs_up = True
    slow, quick = made.tasks
    made.take(slow)
    lease = slow.open
    made.begins(slow, 0.0)
    made.draining, made.available = True, 0
    assert made.next(quick, 1.0).what is What.WAIT
    doing = made.next(quick, 5.0)
    assert (doing.what, doing.lease) == (What.BACK_UP, lease)
    messages = made.messages_of(lease)
    assert messages == [((0, 0, 2), [["c"]]), ((0, 0, 3), [["d"]]), ((0, 0, 4), [["e"]])]
    made.ran(quick, lease, len(messages))
    assert (slow.owes, slow.number, slow.clock) == (lease, 4, 4)
    assert quick.number == 4 and made.messages_sent() == [4, 1]
    assert not made.counted(slow, lease, 50.0)
    assert slow.owes is None and slow.number == 4


def test_rounds_are_in_one_call_only_where_nobody_waits_for_what_is_between():
    def takes(made, now=None):
        return made.take(made.tasks[0])

    assert takes(several()) == 3
    for rule in (Rule(1, 1, bound=1), Rule(1, 1, in_turn=True)):
        assert takes(several(rule=rule)) == 1
    for rule in (Rule(1, 2), Rule(2, 2), Rule(2, 1)):
        made = several(rule=rule)
        assert takes(made) < 3 and made.tasks[0].open.messages == 1
    made = several()
    made.wants_short_round = True
    assert takes(made) == 1
    made = several()
    made.tasks[0].took = 0.1  # three would take longer than an interrupt should wait
    assert takes(made) == 1
    for draining in (True, False):
        for available, taken in ((6, 3), (5, 1), (2, 1)):
            made = several()
            made.draining, made.available = draining, available
            assert takes(made) == taken  # or the other would have to wait
    made = several()
    made.tasks[0].took, made.tasks[1].took = 0.05, 0.02  # who would end long before
    assert takes(made) == 1
    assert takes(several(longest_call=2)) == 1  # three are too many bytes
    for workers, taken in ((2, 3), (1, 1)):
        made = several(workers)
        made.batch_bytes = 200 << 20  # of which two may wait for each worker
        assert takes(made) == taken
    made = several()
    made.rest()
    assert made.take(made.tasks[1]) == 1  # at first: it is not known how long a message takes


def test_a_worker_that_came_back_makes_single_rounds_until_it_is_known_to_stay():
    made = several()
    first, second = made.tasks
    made.lose(first, 1.0)
    made.fenced(first, [first.number, first.number])
    assert made.admits(first)
    made.joins(first)
    assert made.take(second) == 3
    for messages, taken in ((1, 1), (in_a_row.PAYS_AFTER, 3)):
        made.available, first.open, first.fetch_next = 12, None, True
        first.clock += messages
        first.number += messages
        assert made.take(first) == taken


def come(made, *times):
    """Mini-batches come at these times, to workers that have nothing to do."""
    woken = []
    for now in times:
        made.available += 1
        made.arrivals.came(now)
        woken.append(in_a_row.wakes(made))
    return woken


def test_a_worker_waits_for_as_many_mini_batches_as_a_call_has_where_they_come_fast():
    made = several()
    first, second = made.tasks
    made.available = 0
    assert come(made, 1.0, 1.001) == [True, False]
    doing = made.next(first, 1.002)
    assert (doing.what, doing.until) == (What.WAIT, pytest.approx(1.011))
    assert come(made, 1.003) == [True]
    assert made.take(first) == 3 and not in_a_row.is_left(made)
    second.took = 0.1  # which makes one round in a call
    assert come(made, 1.004, 1.005) == [True, True]
    assert made.take(second) == 1
    made.rest()
    assert come(made, 1.006) == [True]  # at first: it is not known how long a message takes
    made.exchange = Rule(2, 2)
    assert come(made, 1.007) == [True]


def test_mini_batches_that_come_slowly_are_taken_at_once():
    made = several()
    made.available = 0
    assert come(made, 1.0, 1.02, 1.04) == [True, True, True]
    for task in made.tasks:
        doing = made.next(task, 1.05)
        assert (doing.what, doing.steps) == (What.ROUND, 1)
        assert in_a_row.is_left(made) == (made.available > 0)  # another is woken for it


def test_a_worker_waits_a_moment_for_mini_batches_that_do_not_come():
    """As those of a loop that goes on when the last one was counted."""
    made = several()
    first, second = made.tasks
    made.available = 0
    come(made, 1.0, 1.001)
    doing = made.next(first, 1.002)
    assert doing.what is What.WAIT
    assert made.next(first, doing.until).steps == 1 and in_a_row.is_left(made)
    assert made.next(second, doing.until).steps == 1 and not in_a_row.is_left(made)


def test_a_short_round_is_the_same_workers_while_it_can():
    made = scheduler(rule=Rule(20, 20))
    first, second, third = made.tasks
    made.wants_short_round = True
    made.available = 1
    assert made.take(second) == 1  # any worker, at first
    made.counted(second, made.collected(second), 0.0)
    made.rest()
    made.available = 1
    assert not made.take(first) and not made.take(third)
    made.begins(second, 1.0)  # it is not there to begin
    assert made.take(third) == 1
    made.ends(second)
    made.counted(third, made.collected(third), 2.0)
    made.available = 1
    assert not made.take(first)
    made.lose(third, 3.0)
    made.fenced(third, [1, 1])
    assert made.take(first) == 1
