"""How a history's training ends before its time, and goes on: by errors, and from checkpoints."""

import copy

from tests.membership.parts import Gone, Process
from tf_dsgd.membership.task import Task


class Endings:
    """What `ThreadsEngine.raise_error`, `Engine._discard` and `Engine.restored` do.

    After an error some mini-batches have counted on some shards and others on none; nothing says
    which. What is checked of those that come after is counted from there.
    """

    def end(self, breaks):
        """An epoch is over, or an error ends it; then training may go on from a checkpoint."""
        self.break_off() if breaks else self.drain()
        if self.random.random() < 0.1:
            self.restore()
        elif not breaks and self.random.random() < 0.2:
            self.save()

    def count_from_here(self):
        """What has counted by now is taken as it is."""
        self.since = self.granted
        self.counted_before = [shard.counts.copy() for shard in self.shards]
        for shard in self.shards:
            shard.messages.clear()
        sent = self.scheduler.messages_sent()
        self.surplus = [
            [applied - mine for applied, mine in zip(shard.applied, sent, strict=True)]
            for shard in self.shards
        ]
        self.handed_out_before = self.scheduler.handed_out - self.granted

    # -- an error ---------------------------------------------------------------------------

    def break_off(self):
        """Somebody's error ends training in the middle of an epoch, whatever is under way."""
        self.broken_off += 1
        self.scheduler.stopped = True
        self.until_threads_end()
        for task in self.tasks:
            try:
                for _ in self.send_what_is_whole(task):
                    self.check()
            except Gone:  # read next are numbers, by which it is found to be lost
                for _ in self.lose(task) if task.is_present else ():
                    self.check()
        numbers = [p.sequence if p.alive else 0 for p in self.processes]
        self.scheduler.clear(numbers)
        for process in self.processes:
            process.accrued.clear()
        self.scheduler.stopped = self.scheduler.draining = self.scheduler.wants_short_round = False
        self.granted += self.left  # pipelines have drawn of all that an epoch was to have
        self.left, self.queue = 0, type(self.queue)()
        self.scheduler.source = self.queue
        assert not self.scheduler.unfinished, self.standing()
        assert not any(task.leases or task.running for task in self.tasks), self.standing()
        self.count_from_here()

    def until_threads_end(self):
        for _ in range(self.longest_drain):
            if not self.threads and self.losing is None:
                return
            self.wake()
            if self.losing is not None:
                self.advance_losing()
            if not self.thread_goes_on():
                self.now += 1.0
                self.look_at_stopped()
            self.check()
        raise AssertionError(f"threads go on: {self.standing()}")

    def send_what_is_whole(self, task):
        process = self.processes[task.index]
        if task.owes is not None:
            yield from self.deliver(task, *process.collect())
        if task.sent is not None and task.sent.message is not None:
            yield from self.deliver(task, *task.sent.message)
        if task.open is not None:
            yield from self.deliver(task, *process.collect())

    # -- checkpoints ------------------------------------------------------------------------

    def save(self):
        """At rest, what a checkpoint has."""
        self.saved = {
            "shards": copy.deepcopy(self.shards),
            "numbers": [task.number for task in self.tasks],
            "handed_out": self.scheduler.handed_out,
            "granted": self.granted,
        }

    def restore(self):
        """Goes on from it: in this cluster, or, once a shard or the chief was lost, in another."""
        self.restored += 1
        self.scheduler.draining = True
        self.until_threads_end()  # also of a straggler
        self.scheduler.draining = False
        saved = copy.deepcopy(self.saved)
        anew = self.random.random() < 0.5
        if anew:
            old = self.scheduler
            self.tasks = [Task(task.index) for task in self.tasks]
            self.scheduler = type(old)(
                self.rule,
                self.tasks,
                longest_call=old.longest_call,
                backup_after=old.backup_after,
            )
            self.scheduler.backs_up = old.backs_up
            self.scheduler.rounds_a_call = old.rounds_a_call
            self.scheduler.source = self.queue
            self.processes = [Process(task.index, 0, 0) for task in self.tasks]
            self.ghosts, self.stopped_since = [], {}
        self.shards = saved["shards"]
        for shard in self.shards:
            shard.incarnations = [task.incarnation for task in self.tasks]
        for task, process, number in zip(self.tasks, self.processes, saved["numbers"], strict=True):
            process.sequence = number - (task.owes is not None)  # of one that joins, too
        numbered = list(self.shards[0].applied)
        self.scheduler.restored(saved["numbers"], numbered, saved["handed_out"])
        self.granted = saved["granted"]
        assert self.scheduler.handed_out == saved["handed_out"]
        # On other shards less may have counted, if an error ended training before it was written.
        assert self.scheduler.messages_sent() == self.shards[0].applied, self.standing()
        self.count_from_here()
