"""Who does what next: which worker takes which mini-batches, and whose lease it runs.

How that is carried out is a backend's: threads, tasks of a cluster, a virtual clock. Nothing here
knows TensorFlow. Whoever has threads holds one lock around every call; seconds are passed in.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence
from typing import Any

from tf_dsgd.engine import in_a_row, short_rounds, stragglers
from tf_dsgd.engine.turns import sends_next, takes_next
from tf_dsgd.engine.work import ANY_NUMBER, Exchange, Loss, Next, Source, What, portion
from tf_dsgd.membership.lease import Lease, LeaseState
from tf_dsgd.membership.task import Task, TaskState


class Scheduler:
    """Hands mini-batches to workers, and their open leases to others.

    Args:
        exchange: the algorithm's exchange rule.
        tasks: the workers.
        longest_call: most mini-batches that a worker takes at a time. Few enough that workers share
            a short epoch, and that not many are handed out when training is interrupted.
        backup_after: seconds that a worker waits for others before it computes a straggler's lease,
            too; None for without end.
    """

    def __init__(
        self,
        exchange: Exchange,
        tasks: Sequence[Task],
        *,
        longest_call: int = ANY_NUMBER,
        backup_after: float | None = None,
    ):
        self.exchange = exchange
        self.tasks = list(tasks)
        self.longest_call = longest_call
        self.backup_after = backup_after
        self.arrivals = in_a_row.Arrivals()
        self.rounds_a_call = 1
        """Most rounds of one mini-batch each that a worker can be told of at once."""
        self.backs_up = False
        """Whether messages of the step that runs now can be computed by another worker."""
        self.source: Source | None = None
        """None where it is nobody's business who gets which, as no worker can be lost."""
        self.batch_bytes = 0
        self.available = 0
        """Mini-batches that were handed to the engine, and that no worker has taken."""
        self.handed_out = 0
        """Mini-batches that workers have taken since training began; warm start counts them."""
        self.draining = False
        """Whether nothing more comes before all workers are at rest."""
        self.wants_short_round = False
        """Whether somebody waits for a first mini-batch: a round begins with what there is."""
        self.last_short_round: Task | None = None
        """Who began last while somebody waited."""
        self.stopped = False
        """Whether nobody begins anything: after an error, or as the process ends."""
        self.orphans: list[Lease] = []
        self.unused = [0] * len(self.tasks)
        """Numbers under which a worker sent nothing, since its message went in another's name."""
        self.worked = False
        """Whether anything was taken since shards last used what they collected."""
        self._away = [task.index for task in self.tasks if not task.is_present]
        """Workers that are not there, in order."""
        self._may_join_later = True
        """Whether a worker may still be there without taking part."""

    # -- who may begin ----------------------------------------------------------------------

    @property
    def present(self) -> list[Task]:
        """Tasks that take part; others are lost, and have not joined again."""
        return [task for task in self.tasks if task.is_present]

    def joined(self, task: Task) -> bool:
        """Whether a worker takes part: it is there, and its rule lets it."""
        return task.is_present and self.exchange.may_join(self._place(task), self.handed_out)

    def _place(self, task: Task) -> int:
        """Its number among those that are there: who begins alone must be one of them."""
        return task.index - bisect.bisect_left(self._away, task.index)

    def limit(self, task: Task) -> int:
        """Most mini-batches that this worker in particular can take now."""
        if task.is_shared or any(lease.owner == task.index for lease in self.orphans):
            return 0  # a message with a higher number would make shards refuse the orphan's
        return ANY_NUMBER if self.source is None else self._drawable(task)

    def _drawable(self, task: Task) -> int:
        if self.source is None or not self.source.is_shared:
            return ANY_NUMBER
        return self.source.limit(task.index, self.others())

    def others(self) -> list[int]:
        """With whose pipelines anybody goes on: of workers that are away, or not waited for."""
        away = [task.index for task in self.tasks if not self.joined(task)]
        return away + [t.index for t in self.tasks if self.joined(t) and not self.is_awaited(t)]

    def is_awaited(self, task: Task) -> bool:
        """Whether others wait for what a worker still does, which counts and not only shows."""
        return task.owes is None and not task.read_is_slow

    def may_begin(self, task: Task, *, sending: bool = False) -> bool:
        """Whether a worker may begin a round; with `sending`, once its message was sent."""
        if not self.joined(task):
            return False
        if self.exchange.in_turn and not takes_next(task, self.working(task)):
            return False
        if not self.exchange.bounds_staleness:
            return True
        # Whom to wait for takes a look at every worker.
        may_start, clock = self.exchange.may_start, task.clock + sending
        return may_start(clock, 0) or may_start(clock, self.slowest(clock, but=task))

    def may_send(self, task: Task) -> bool:
        """Whether nobody whose turn it is comes before this worker's message."""
        return not self.exchange.in_turn or sends_next(task, self.working(task))

    def working(self, but: Task | None) -> Iterator[Task]:
        """The others that have, or may get, work."""
        more = bool(self.available) or not self.draining
        for task in self.present:
            able = task.leases or (more and self.joined(task) and self.is_awaited(task))
            if task is not but and able and (task.leases or self.limit(task) > 0):
                yield task

    def slowest(self, *clocks: int, but: Task | None = None) -> int:
        """The least of `clocks` and those of workers that have, or may get, work."""
        return min([*clocks, *(t.clock for t in self.working(but))], default=0)

    def round_steps(self, task: Task) -> int:
        """How many mini-batches a worker takes now; 0 if it should wait for more."""
        if not self.available:  # a rule is not asked for what comes after the end
            return 0
        steps = min(self.exchange.steps_to_event(task.step), self.longest_call, self.limit(task))
        if self.draining:  # so that all are there that will be
            steps = self.exchange.share(steps, self.available, len(self.tasks))
        if self.available >= steps:
            return steps
        at_once = self.draining or (self.wants_short_round and short_rounds.makes(self, task))
        return self.available if steps and (at_once or self.available >= self.portion(steps)) else 0

    def portion(self, steps: int) -> int:
        """Mini-batches to begin with where a whole round of them would take too much memory."""
        return portion(steps, self.batch_bytes, len(self.tasks))

    def has_all(self, task: Task) -> bool:
        """Whether nothing is left that could be added to what a worker has not sent."""
        if self.draining and not self.available:
            return True
        # Others may be bound to wait for its message before they do what is left to them.
        return bool(task.leases and self.source is not None and not self._drawable(task))

    # -- what a worker does -----------------------------------------------------------------

    def next(self, task: Task, now: float) -> Next:
        """What a worker does, between two calls; whatever that needs is taken note of here."""
        if self.stopped or not task.is_present:
            return Next(What.END)
        if task.state is TaskState.SILENT:
            return Next(What.WAIT)  # until it counts as lost
        other = self.for_others(task, now)
        if other is not None:
            return other
        self.arrivals.look(now)
        if steps := self.take(task):
            return Next(What.ROUND, steps, task.open)
        takes_part = self.joined(task)
        if not takes_part and not task.leases:
            return Next(What.END)
        if task.leases and (task.is_shared or self.has_all(task) or not takes_part):
            return Next(What.SEND)
        self.waits(task, now)
        due = self.backup_due(task) if self._waits_for_others(task) else None
        if due is None and self.has_all(task):
            return Next(What.END)
        return Next(What.WAIT, until=in_a_row.until(self) if due is None else due[0])

    def waits(self, task: Task, now: float) -> None:
        """A worker cannot go on before others have sent, or more mini-batches have come."""
        if task.waits_since is None:
            task.waits_since = now

    def for_others(self, task: Task, now: float | None) -> Next | None:
        """What a worker does besides its own mini-batches; `now` is None where no backup is due."""
        if task.leases:
            return None
        if task.owes is not None:
            return Next(What.SEND_REFUSED, lease=task.owes)
        orphan = self._orphan_for(task)
        if orphan is not None:
            self._run(task, orphan)
            return Next(What.COMPLETE, lease=orphan)
        due = self.backup_due(task) if self._waits_for_others(task) else None
        if now is not None and due is not None and due[0] <= now:
            self._run(task, due[1])
            return Next(What.BACK_UP, lease=due[1])
        return None

    def _run(self, task: Task, lease: Lease) -> None:
        if lease.state in (LeaseState.OPEN, LeaseState.SENT):
            lease.become(LeaseState.SHARED)
        lease.runner, task.running = task.index, lease

    def take(self, task: Task, *, sending: bool = False) -> int:
        """Takes a round's mini-batches if there are enough and the rules let the worker begin.

        With `sending` the round begins when the message that is due was sent.
        """
        none = self.stopped or task.state is TaskState.SILENT
        if none or not self.may_begin(task, sending=sending):
            return 0
        messages = in_a_row.messages(self, task)
        steps = self.round_steps(task) if messages == 1 else messages
        if steps:
            self.last_short_round = task if self.wants_short_round else self.last_short_round
            self.taken(task, steps, messages)
        return steps

    def taken(self, task: Task, steps: int, messages: int = 1) -> Lease:
        """A worker has taken mini-batches, of a message or one each; gives their lease."""
        waiting = [t for t in self.present if not self.joined(t)] if self._may_join_later else []
        slowest = self.slowest() if waiting else 0
        others = self.others() if self.source is not None and self.source.is_shared else []
        self.available -= steps
        self.handed_out += steps
        self.worked = True
        task.step += steps
        task.waits_since = None
        if task.open is None:
            task.open = Lease(task.index, task.incarnation, task.number + len(task.leases) + 1)
            task.open.messages = messages
        task.open.steps += steps
        if self.source is not None:
            task.open.parts.append(self.source.draw(task.index, steps, others))
        for other in filter(self.joined, waiting):
            other.clock = max(other.clock, slowest)  # nobody waits until it has caught up
        self._may_join_later = self._may_join_later and not all(map(self.joined, self.tasks))
        return task.open

    def begins(self, task: Task, now: float) -> None:
        """A call to a worker begins, for which others may have to wait."""
        if not task.is_present:
            return  # it was lost in this moment, as whoever calls it will find out
        if task.state is TaskState.IDLE:
            task.become(TaskState.IN_ROUND)
        task.waits_since = None
        for lease in task.leases:
            if lease.begun is None:
                lease.begun = now

    def ends(self, task: Task) -> None:
        """A worker is between two calls."""
        if task.state is TaskState.IN_ROUND:
            task.become(TaskState.IDLE)

    def collected(self, task: Task, message: Any = None) -> Lease:
        """A worker's message is made, and its next mini-batches belong to another one."""
        lease = task.open
        if lease is None or task.sent is not None:
            raise RuntimeError(f"{task!r} has nothing to collect, or something under way.")
        if lease.state is LeaseState.OPEN:
            lease.become(LeaseState.SENT)
        lease.message = message
        task.sent, task.open = lease, None
        return lease

    def counted(self, task: Task, lease: Lease, now: float) -> bool:
        """A worker's message came to its shards; False if that is not what counts.

        Another's message may have counted in its place, and this one, which was refused, is the
        last that it sends under that number. Or the worker was lost meanwhile: its shards tell.
        """
        if lease.state is LeaseState.SUPERSEDED:
            self.caught_up(task)
            return False
        if lease not in task.leases or lease.incarnation != task.incarnation:
            return False
        lease.become(LeaseState.COUNTED)
        lease.message = None
        if task.sent is lease:
            task.sent = None
        else:
            task.open = None
        task.number = lease.last
        task.clock += lease.messages
        task.lacked_function = False
        if lease.begun is not None:
            task.took = (now - lease.begun) / lease.messages
        return True

    # -- leases that others run -------------------------------------------------------------

    def _orphan_for(self, task: Task) -> Lease | None:
        """A lost worker's lease that this one completes."""
        if not self.orphans or not self.may_begin(task):
            return None  # or: with a fetch before its time the worker would end a round
        for lease in self.orphans:
            owner = self.tasks[lease.owner]
            # One that is back completes its own, before it numbers messages anew.
            away = owner.state is not TaskState.JOINING and not self.joined(owner)
            if lease.runner is None and (owner is task or away):
                return lease
        return None

    def _waits_for_others(self, task: Task) -> bool:
        """Whether only others' messages let a worker go on, and it may compute theirs."""
        if task.leases or not self.backs_up or not self.joined(task):
            return False
        nothing_comes = self.draining and not self.available
        return nothing_comes or not (self.may_begin(task) and self.limit(task))

    def backup_due(self, task: Task) -> tuple[float, Lease] | None:
        """When a worker that waits runs a straggler's lease, and which; None if never."""
        return stragglers.backup_due(self.tasks, task, self.backup_after)

    def messages_of(self, lease: Lease) -> list[tuple[tuple[int, int, int], list[Any]]]:
        """Of each message of a lease its name, and what its mini-batches were drawn as."""
        lease.take_apart(self.source)
        return lease.each()

    def ran(self, task: Task, lease: Lease, messages: int = 1) -> None:
        """A worker has sent another's messages, in that one's name."""
        if task.running is not lease:
            return  # it was lost meanwhile
        owner = self.tasks[lease.owner]
        current = lease.incarnation == owner.incarnation
        if lease.state is LeaseState.ORPHANED and lease.runner == task.index:
            self.orphans.remove(lease)
            lease.become(LeaseState.COUNTED)
        elif lease.state is LeaseState.ORPHANED:
            pass  # orphaned as a backup task sent it in a lost one's name, which shards refuse
        elif lease.state is LeaseState.SHARED and current:
            lease.become(LeaseState.SUPERSEDED)
            owner.open = owner.sent = None
            owner.owes = lease
            owner.number = lease.last
            owner.clock += lease.messages
        elif current:  # the owner's came first, and was held up
            owner.clock = max(owner.clock, self.slowest(but=owner))
        self._let_go(task)
        task.waits_since = None
        task.fetch_next = True
        task.number += messages  # its own next numbers: nothing was sent under them
        self.unused[task.index] += messages

    def caught_up(self, task: Task) -> None:
        """A worker has sent its message, which was refused, as another's had counted."""
        if task.owes is not None:
            task.owes.become(LeaseState.COUNTED)
            task.owes = None
        task.clock = max(task.clock, self.slowest(but=task))
        task.fetch_next = True
        task.waits_since = None

    def _let_go(self, task: Task) -> None:
        lease, task.running = task.running, None
        if lease is not None and lease.runner == task.index:
            lease.runner = None

    # -- workers that come and go -----------------------------------------------------------

    def silent(self, task: Task) -> None:
        """A worker has not answered for long."""
        if task.state in (TaskState.IDLE, TaskState.IN_ROUND):
            task.become(TaskState.SILENT)

    def lose(self, task: Task, now: float) -> int:
        """A worker is lost; gives the incarnation from which on its shards take messages.

        Before they are told: whoever has computed its lease meanwhile takes it for sent only if
        this is the incarnation in whose name it was sent.
        """
        task.become(TaskState.LOST)
        bisect.insort(self._away, task.index)
        task.since = now
        task.incarnation += 1
        return task.incarnation

    def fenced(self, task: Task, last: Sequence[int]) -> Loss:
        """A lost worker's shards take nothing more from it; the last message that each has.

        A worker has at most one message under way, and begins the next when all shards have it, so
        that these numbers tell what became of each of its mini-batches.
        """
        leases, orphan = task.leases, None
        task.sent = task.open = None
        highest = max(last, default=task.number)
        if highest > task.number and leases:
            first = leases.pop(0)
            sent = highest - first.number + 1
            task.clock += sent  # as many rounds have it in them
            first.take_apart(self.source)
            if sent < first.messages:
                leases.insert(0, first.cut(sent))
            if min(last) < highest:
                orphan = first.cut(sent - 1) if sent > 1 else first
                orphan.become(LeaseState.ORPHANED)
                orphan.runner = None
                self.orphans.append(orphan)
            if orphan is not first:
                first.become(LeaseState.COUNTED)
        self.unused[task.index] -= max(0, task.number - highest)
        task.number = highest
        if task.owes is not None:
            task.owes.become(LeaseState.COUNTED)
            task.owes = None
        for lease in self.orphans:
            if lease.owner == task.index:
                lease.incarnation = task.incarnation
        self._let_go(task)
        task.forget_round()
        for lease in leases:
            lease.become(LeaseState.RETURNED)
        parts = [part for lease in leases for part in lease.parts]
        count = sum(lease.steps for lease in leases)
        if self.source is not None and parts:
            self.source.give_back(parts)
        self.available += count
        self.handed_out -= count
        self._may_join_later = True
        return Loss(count, orphan)

    def admits(self, task: Task) -> bool:
        """Whether nobody completes a lease of that worker; from then on only it may."""
        mine = [lease for lease in self.orphans if lease.owner == task.index]
        if any(lease.runner is not None for lease in mine):
            return False
        task.become(TaskState.JOINING)
        return True

    def joins(self, task: Task) -> None:
        """A worker is there again, with variables of its own."""
        task.become(TaskState.IDLE)
        self._away.remove(task.index)
        task.several_from = task.number + in_a_row.PAYS_AFTER
        task.fetch_next = True
        task.clock = max(task.clock, self.slowest(but=task))

    def gone_again(self, task: Task) -> None:
        """A worker was lost while it joined."""
        if task.state is TaskState.JOINING:
            task.become(TaskState.LOST)

    # -- at rest ----------------------------------------------------------------------------

    @property
    def unfinished(self) -> bool:
        """Whether anything is left that a drain waits for: no straggler whose message counts."""
        return bool(self.available or self.orphans) or any(
            task.leases
            or task.running is not None
            or (task.owes is not None and task.state is TaskState.IDLE)
            for task in self.tasks
        )

    def rest(self) -> None:
        """At a drain, when every message was taken in."""
        for task in self.tasks:
            task.rest()
        self.exchange = self.exchange.since(self.handed_out // len(self.tasks))

    def clear(self, numbers: Sequence[int]) -> None:
        """After an error nothing goes to others; messages were numbered up to `numbers`."""
        for task, number in zip(self.tasks, numbers, strict=True):
            for lease in [*task.leases, *([task.owes] if task.owes is not None else [])]:
                owed = lease.state is LeaseState.SUPERSEDED
                lease.become(LeaseState.COUNTED if owed else LeaseState.RETURNED)
            task.open = task.sent = task.owes = task.running = None
            task.waits_since = None
            task.number = max(task.number, number)  # 0: it is not there
            self.ends(task)
        for lease in self.orphans:
            lease.become(LeaseState.RETURNED)
        self.orphans.clear()
        self.available = 0
        self.rest()

    def restored(self, numbers: Sequence[int], numbered: Sequence[int], handed_out: int) -> None:
        """After a checkpoint: messages are numbered from `numbers` on; so many were sent."""
        for task, number, sent in zip(self.tasks, numbers, numbered, strict=True):
            task.number = int(number)
            self.unused[task.index] = int(number) - int(sent)
            if task.owes is not None:
                task.owes.number = task.number
        self.handed_out = handed_out
        self._may_join_later = True  # as before the end of a warm start
        self.rest()

    def messages_sent(self) -> list[int]:
        """Messages that each worker has sent under numbers of its own."""
        return [t.number - self.unused[t.index] + (t.sent is not None) for t in self.tasks]
