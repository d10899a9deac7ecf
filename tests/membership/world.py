"""A cluster without processes: shards, workers and a chief, driven by random histories.

The scheduler, tasks and leases are those that train. Around them everything is small: a shard is a
few numbers and the mini-batches that it has counted; a worker is what it has accrued, and its
numbers; a thread of the chief is a generator that stops wherever another may run. The histories do
what happens to clusters: workers are killed, stopped and started again, messages come to some
shards only, or late, workers are lost by their own thread or by the main one, and join while others
complete their leases; an error ends training, and it goes on from a checkpoint.
"""

import random
from collections import Counter, deque

from tests.membership.checked import Checked
from tests.membership.endings import Endings
from tests.membership.parts import Gone, Pipelines, Process, Queue, Rule, Shard
from tf_dsgd.engine.scheduler import Scheduler
from tf_dsgd.engine.work import What
from tf_dsgd.membership.task import Task, TaskState

TIMEOUT = 6.0


class World(Checked, Endings):
    """One cluster, and a history.

    Args:
        seed: of the history; or what makes its choices.
        scheduler: the class to test; a wrong one in tests of this harness.
        shares: whether there are always backup tasks, several workers and several shards, which
            is what the rarest of mistakes needs."""

    def __init__(self, seed, scheduler=Scheduler, *, shares=False):
        self.random = choose = random.Random(seed) if isinstance(seed, int) else seed
        self.now = 0.0
        least = 2 if shares else 1
        number = choose.randint(least, 4)
        rounds = [(1, 1), (2, 2), (3, 3), (3, 1)] + [(1, 3), (2, 3)] * (not shares)
        push, fetch = choose.choice(rounds)
        bound = choose.choice([None, 0, 1, 2])
        in_a_row = choose.choice([1, 1, 1, 1, 2, 3])
        if in_a_row > 1:
            push, fetch, bound = 1, 1, None
        warm_start, together = choose.choice([0, 0, 0, 4]), choose.random() < 0.3
        self.rule = Rule(push, fetch, bound, warm_start, end_together=together)
        self.overlaps = push < fetch
        backup = 1.0 if shares else choose.choice([None, 1.0])
        self.tasks = [Task(m) for m in range(number)]
        self.scheduler = scheduler(
            self.rule,
            self.tasks,
            longest_call=choose.choice([1, 3]) if in_a_row == 1 else 3,
            backup_after=backup,
        )
        self.scheduler.backs_up = backup is not None and not self.overlaps
        self.scheduler.rounds_a_call = in_a_row
        self.shards = [Shard(number) for _ in range(choose.randint(least, 3))]
        self.processes = [Process(m, 0, 0) for m in range(number)]
        self.speeds = [choose.choice([1.0, 1.0, 0.05]) for _ in self.tasks]
        self.by_pipelines = choose.random() < 0.3 and not shares
        self.queue = self.scheduler.source = Queue()
        self.granted = 0
        self.threads = {}
        self.sleeping = {}
        self.ghosts = []
        self.losing = None
        self.stopped_since = {}
        self.longest_drain = 20_000
        self.sending = set()
        self.transitions = 0
        self.in_a_row = 0
        """How often a call had several rounds."""
        self.begun = 0
        """How often a worker began after it had waited, or come."""
        self.broken_off = self.restored = 0
        """How often an error ended training, and it went on from a checkpoint."""
        self.count_from_here()
        self.save()
        self.seen = Counter()
        """How often each state of leases and tasks was entered, by name."""

    # -- what happens -----------------------------------------------------------------------

    def run(self, transitions):
        """A history of about so many transitions, then rest; checks all on the way.

        Where calls may have several rounds they are ten times as long, since calls do not have
        several at first.
        """
        several = self.scheduler.rounds_a_call > 1
        for epoch in range(self.random.randint(1, 3)):
            until = transitions * (epoch + 1) // 3
            if several:
                until = self.transitions + 3 * transitions
            self.begin_epoch(self.random.randint(1, 60 if several else 12))
            if self.random.random() < 0.5:
                self.await_begun()
            breaks = self.random.random() < 0.1
            while self.transitions < until:
                self.step()
            self.end(breaks)

    def begin_epoch(self, batches):
        first = self.granted
        if self.by_pipelines:
            sizes = [0] * len(self.tasks)
            for _ in range(batches):
                sizes[self.random.randrange(len(sizes))] += 1
            source = Pipelines(sizes)
            source.own = [deque(i + first for i in ids) for ids in source.own]
            self.scheduler.source = source
        self.left = batches

    def grant(self):
        if self.left:
            self.left -= 1
            self.queue.ids.append(self.granted)
            self.granted += 1
            self.scheduler.available += 1
            self.scheduler.arrivals.came(self.now)
            self.start_threads()

    def step(self):
        """One thing happens."""
        self.transitions += 1
        what = self.random.random()
        if what < 0.12:
            for _ in range(4 * self.scheduler.rounds_a_call - 3):  # at once, as `fit` is quick
                self.grant()
        elif what < 0.17:
            self.now += self.random.choice([0.5, 1.0, 2.0, 2.0, 8.0])
        elif what < 0.22:
            self.strike()
        elif what < 0.27:
            self.comes_back()
        elif what < 0.30:
            self.main_finds_lost()
        elif what < 0.33:
            self.ghost()
        else:
            self.thread_goes_on()
        self.look_at_stopped()
        self.check()

    def strike(self):
        if self.random.random() < 0.15:  # all at once
            for process in self.processes:
                process.alive = process.alive and self.random.random() < 0.2
            return
        # What goes wrong goes wrong while a message is on its way, or another's is computed.
        running = [t for t in self.tasks if t.running is not None]
        both = {t.index for t in running} | {t.running.owner for t in running}
        delicate = sorted(self.sending | both)
        choices = [self.processes[m] for m in delicate]
        if not choices or self.random.random() < 0.4:
            choices = self.processes
        process = self.random.choice(choices)
        if not process.alive:
            return
        if self.random.random() < 0.5:
            process.alive = False
        else:
            process.stopped = not process.stopped
            self.stopped_since.setdefault(process, self.now)
            if not process.stopped:
                self.stopped_since.pop(process)

    def look_at_stopped(self):
        """Who is stopped for long counts as silent: calls to it are ended."""
        for process, since in list(self.stopped_since.items()):
            if self.now - since > TIMEOUT and process.alive:
                process.cut = True
                if self.random.random() < 0.5 and process is self.processes[process.worker]:
                    task = self.tasks[process.worker]
                    if task.is_present and task.incarnation == process.incarnation:
                        self.scheduler.silent(task)

    def comes_back(self):
        """A lost worker's process is started again, or goes on, and joins in two steps."""
        task = self.random.choice(self.tasks)
        if task.state is TaskState.JOINING:
            process = self.processes[task.index]
            if not process.alive or self.random.random() < 0.2:
                self.scheduler.gone_again(task)
            else:
                self.scheduler.joins(task)
                task.several_from *= self.random.random() < 0.5  # as if it had been there for long
                self.start_threads()
            self.wake()
        elif task.state is TaskState.REFUSED:
            task.become(TaskState.LOST)
        elif task.state is TaskState.LOST and task.index not in self.threads and not self.losing:
            if self.random.random() < 0.1:
                task.become(TaskState.REFUSED)
            elif self.scheduler.admits(task):
                self.processes[task.index] = Process(task.index, task.incarnation, task.number)

    def main_finds_lost(self):
        """The main thread finds a worker lost by a call of its own, or by its silence."""
        task = self.random.choice(self.tasks)
        process = self.processes[task.index]
        if task.is_present and self.losing is None and (not process.alive or process.cut):
            self.losing = self.lose(task)
        if self.losing is not None:
            self.advance_losing()

    def advance_losing(self):
        try:
            next(self.losing)
        except StopIteration:
            self.losing = None

    def ghost(self):
        """A message of one that was lost, or goes on, comes late."""
        if self.ghosts:
            name, ids, shards = self.ghosts[0]
            self.shards[shards.pop()].receive(name, ids)
            if not shards:
                self.ghosts.pop(0)

    def start_threads(self):
        if not self.scheduler.unfinished:
            return
        for task in self.tasks:
            if task.index not in self.threads and self.scheduler.joined(task):
                self.threads[task.index] = self.thread(task)

    def wake(self):
        self.sleeping.clear()

    def thread_goes_on(self):
        awake = [m for m in self.threads if m not in self.sleeping and not self.blocked(m)]
        if awake:
            speeds = [self.speeds[m] for m in awake]
            self.advance(self.random.choices(awake, speeds)[0])
            return True
        due = [m for m, until in self.sleeping.items() if until is not None and until <= self.now]
        for m in due:
            del self.sleeping[m]
        return bool(due)

    def blocked(self, m):
        """Whether its call waits for a stopped process."""
        process = self.processes[m]
        return (
            process.alive and process.stopped and not process.cut and self.threads[m].gi_yieldfrom
        )

    def advance(self, m):
        try:
            until = next(self.threads[m])
        except StopIteration:
            del self.threads[m]
            self.wake()
            return
        if until is not None:
            self.sleeping[m] = None if until == "woken" else until

    # -- a thread of the chief --------------------------------------------------------------

    def thread(self, task):
        """What `engine.threads` does, with `engine.remote`."""
        try:
            while True:
                doing = self.scheduler.next(task, self.now)
                if doing.what is What.END:
                    return
                if doing.what is What.WAIT:
                    yield "woken" if doing.until is None else doing.until
                    continue
                if doing.what is What.ROUND:
                    steps = doing.steps
                    self.begun += 1
                    self.stepped_on()
                    while steps:
                        steps = yield from self.round(task, steps)
                elif doing.what in (What.COMPLETE, What.BACK_UP):
                    yield from self.run_lease(task, doing.lease)
                else:
                    lease = task.open if task.owes is None else task.owes
                    yield from self.push(task, lease)
                self.scheduler.ends(task)
                yield
        except Gone:
            yield from self.when_free(task)

    def when_free(self, task):
        while self.losing is not None:  # held while a worker is fenced
            yield
        if task.is_present:
            self.losing = losing = self.lose(task)
            while self.losing is losing:
                self.advance_losing()
                yield

    def round(self, task, steps):
        scheduler = self.scheduler
        lease = task.open
        yield
        if lease is None or lease.has_ended():
            return 0
        if lease.messages > 1:
            return (yield from self.rounds_in_a_row(task, lease))
        part = lease.parts[-1]
        scheduler.begins(task, self.now)
        push = scheduler.exchange.push_due(task.step) or scheduler.has_all(task)
        kept = task.sent
        yield from self.compute(task, part)
        counts = True
        if kept is not None:
            yield from self.deliver(task, *kept.message)
            scheduler.counted(task, kept, self.now)
            self.stepped_on()
        keeps = (
            self.overlaps
            and not scheduler.exchange.fetch_due(task.step)
            and scheduler.available > 0
            and (not self.rule.bounds_staleness or self.rule.may_start(task.clock + 1, 0))
        )
        if push and keeps:
            message = self.process(task).collect()
            yield
            if task.open is lease:
                scheduler.collected(task, message)
        elif push:
            counts = yield from self.push(task, lease)
        if task.is_present:
            task.fetch_next = not counts or scheduler.exchange.fetch_due(task.step)
        yield
        scheduler.ends(task)
        if not push and task.is_shared:
            counts = yield from self.push(task, lease)
        if not counts:
            return 0
        yield
        following = scheduler.take(task)
        if following:
            self.stepped_on()
        elif task.sent is not None:
            kept = task.sent
            yield from self.deliver(task, *kept.message)
            scheduler.counted(task, kept, self.now)
            self.stepped_on()
        return following

    def rounds_in_a_row(self, task, lease):
        """Several in one call: the chief learns of them when all are over."""
        self.in_a_row += 1
        self.scheduler.begins(task, self.now)
        # What the worker was told of: if it is lost meanwhile, its lease may be less than that.
        for one in list(lease.parts[0]):
            yield from self.compute(task, [one])
            yield from self.deliver(task, *self.process(task).collect())
        counts = self.scheduler.counted(task, lease, self.now)
        self.stepped_on() if counts else self.wake()
        if task.is_present:
            task.fetch_next = True
        yield
        self.scheduler.ends(task)
        if not counts:
            return 0
        yield
        following = self.scheduler.take(task)
        if following:
            self.stepped_on()
        return following

    def process(self, task):
        process = self.processes[task.index]
        if not process.alive or process.cut:
            raise Gone
        return process

    def compute(self, task, part):
        yield
        self.process(task).accrued.extend(part)
        yield
        self.process(task)

    def push(self, task, lease):
        yield
        self.scheduler.begins(task, self.now)
        name, ids = self.process(task).collect()
        yield from self.deliver(task, name, ids)
        self.scheduler.ends(task)
        counts = self.scheduler.counted(task, lease, self.now)
        self.stepped_on() if counts else self.wake()
        return counts

    def deliver(self, task, name, ids):
        """A message comes to the shards one after another; its sender may die between."""
        shards = list(range(len(self.shards)))
        self.random.shuffle(shards)
        process = self.processes[task.index]
        self.sending.add(task.index)
        try:
            while shards:
                yield
                self.process(task)
                self.shards[shards.pop()].receive(name, ids)
            yield
            self.process(task)
        except Gone:
            # What is on its way, or is sent by one that goes on, comes late.
            if shards and (process.alive or self.random.random() < 0.5):
                self.ghosts.append((name, ids, shards))
            raise
        finally:
            self.sending.discard(task.index)

    def run_lease(self, task, lease):
        process = self.process(task)
        self.scheduler.begins(task, self.now)
        assert not process.accrued, "gradients of its own would be sent in another's name"
        messages = self.scheduler.messages_of(lease)
        for name, parts in messages:
            for part in parts:
                yield from self.compute(task, part)
            _, ids = self.process(task).collect()
            yield from self.deliver(task, name, ids)
        self.scheduler.ran(task, lease, len(messages))
        self.wake()

    def stepped_on(self):
        if self.rule.bounds_staleness or self.scheduler.draining:
            self.wake()

    def lose(self, task):
        """The chief fences a worker, one shard after another."""
        incarnation = self.scheduler.lose(task, self.now)
        last = []
        for shard in self.shards:
            yield
            last.append(shard.fence(task.index, incarnation))
        self.scheduler.fenced(task, last)
        self.wake()

    # -- the main thread waits --------------------------------------------------------------

    def await_begun(self):
        """For an epoch's first mini-batch: somebody begins, whatever happens, if somebody can."""
        self.grant()
        self.scheduler.wants_short_round = True
        self.wake()
        before = self.begun
        for passed in range(self.longest_drain):
            if self.begun > before or not (self.scheduler.unfinished or self.losing is not None):
                break
            self.in_a_wait(passed < 20)
        else:
            raise AssertionError(f"nobody begins: {self.standing()}")
        self.scheduler.wants_short_round = False

    def in_a_wait(self, things_happen):
        if things_happen:
            self.step()
            return
        self.transitions += 1
        self.main_looks()
        self.check()

    def drain(self):
        """Everything that was handed out is done, whatever happened, if somebody can do it."""
        while self.left:
            self.grant()
        self.scheduler.draining = True
        calm = self.random.random() < 0.5  # nothing more happens
        for passed in range(self.longest_drain):
            awaited = any(self.scheduler.is_awaited(self.tasks[m]) for m in self.threads)
            if not awaited and not self.scheduler.unfinished and self.losing is None:
                break
            self.in_a_wait(not calm and passed < 60)
        else:
            raise AssertionError(f"never at rest: {self.standing()}")
        self.scheduler.draining = False
        self.check_at_rest()
        self.scheduler.rest()

    def main_looks(self):
        """Fair: whoever can go on does; the main thread looks every second."""
        if self.losing is not None:
            self.advance_losing()
        elif self.thread_goes_on():
            return
        self.now += 1.0
        at_work = self.threads.keys() - self.sleeping.keys()
        self.start_threads()
        self.wake()
        for process in self.processes:  # everybody goes on, or is started again
            task = self.tasks[process.worker]
            if process.stopped and self.random.random() < 0.2:
                process.stopped = False
                self.stopped_since.pop(process, None)
            if task.is_present and (not process.alive or process.cut):
                if self.losing is None and task.index not in at_work:
                    self.losing = self.lose(task)
            elif not task.is_present:
                self.comes_back()
        self.look_at_stopped()
        self.ghost()
