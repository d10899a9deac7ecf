"""Workers that send to one another, without processes: calls are turns, and chance orders them.

`Post` and `Mailboxes` are those that train. Around them everything is small: a process is a table
of messages and the list of those that are in its model; a call is two moments, before and after
what it does, at both of which others may go on, and workers be killed or stopped. A message that is
asked for and not there would be waited for without end: that fails at once.
"""

import contextlib
import functools
import random
import threading

from tf_dsgd.engine.post import Post
from tf_dsgd.membership.task import Task, TaskState


class Gone(Exception):
    """A call to a worker failed, as that one was lost."""


class AllLost(Exception):
    """Nobody has a model any more."""


class Wrong(Exception):
    """A step of the user's raised an error."""


class Table(dict):
    """A worker's table; `strays` are there though nobody knows, from calls that failed."""

    def __init__(self):
        super().__init__()
        self.strays = set()


class Process:
    """One worker's process, or what a stopped one is from when it goes on."""

    def __init__(self, table=None):
        self.table = Table() if table is None else table
        self.model, self.version, self.alive = None, None, True


class Lock:
    """As `threading.Lock`, of actors that take turns."""

    def __init__(self, world):
        self.world, self.held = world, False

    def __enter__(self):
        self.world.until(lambda: not self.held)
        self.held = True

    def __exit__(self, *_):
        self.held = False


class World:
    """A history.

    Args:
        seed: of all choices.
    """

    def __init__(self, seed, errors=False):
        self.random = random.Random(seed)
        number = self.random.randint(1, 4)
        self.errors = errors
        self.tasks = [Task(m) for m in range(number)]
        self.processes = [Process() for _ in self.tasks]
        self.post = Post(self, contextlib.nullcontext(), self.tasks, lambda: Lock(self))
        self.queue, self.counted, self.failed = [], [], None
        self.headers, self.withdrawn = set(), set()
        self.editions, self.outside, self.shown_version = 0, [], 0
        self.kills = 0
        self.seen = {"lost": 0, "joined": 0, "given": 0, "ghosts": 0, "late": 0}
        self.sent_after_errors = {True: 0, False: 0}
        """Messages, by whether they are valid, that were sent by no round."""
        self.discarded = []
        """What rounds that failed had computed."""
        self.actors, self.waits, self.turn = {}, {}, threading.Semaphore(0)
        self.here = threading.local()
        self.problem = None

    # -- actors that take turns ---------------------------------------------------------------

    def start(self, name, body):
        own = threading.Semaphore(0)

        def run():
            own.acquire()
            self.here.semaphore, self.here.name = own, name
            try:
                body()
            except BaseException as error:
                self.problem = self.problem or error
            del self.actors[name], self.waits[name]
            self.turn.release()

        self.actors[name], self.waits[name] = own, lambda: True
        threading.Thread(target=run, daemon=True).start()

    def until(self, condition):
        """Another actor's turn, until it holds."""
        while True:
            self.waits[self.here.name] = condition
            self.turn.release()
            self.here.semaphore.acquire()
            if condition():
                return

    def pause(self):
        self.until(lambda: True)

    def go_on(self):
        """Turns until all actors have ended."""
        for _ in range(100_000):
            if not self.actors:
                return
            able = [name for name in self.actors if self.waits[name]()]
            assert able, f"all wait for one another: {list(self.actors)}"
            self.befall()
            self.actors[self.random.choice(sorted(able))].release()
            self.turn.acquire()
            if self.problem is not None:
                raise self.problem
        raise AssertionError("it does not end")

    # -- what befalls workers -----------------------------------------------------------------

    def befall(self):
        if self.kills and self.random.random() < 0.02:
            alive = [m for m, process in enumerate(self.processes) if process.alive]
            present = [m for m in alive if self.tasks[m].is_present]
            if len(present) > 1 or (present and self.random.random() < 0.03):
                self.kills -= 1
                self.processes[self.random.choice(present)].alive = False
        for task in self.tasks:
            name = f"worker {task.index}"
            if not task.is_present and name not in self.actors and self.random.random() < 0.1:
                self.come_back(task)
                self.start(name, lambda m=task.index: self.train(m))

    def come_back(self, task):
        """It was stopped, and what was on its way to it may still come; or it is a new one."""
        goes_on = self.random.random() < 0.5
        table = self.processes[task.index].table if goes_on else None
        self.processes[task.index] = process = Process(table)
        process.table.strays.update(process.table)
        task.become(TaskState.JOINING)
        task.become(TaskState.IDLE)
        self.seen["joined"] += 1

    def lose(self, m):
        task = self.tasks[m]
        if task.is_present and not self.processes[m].alive:
            task.become(TaskState.LOST)
            task.incarnation += 1
            self.seen["lost"] += 1
            if not self.present():
                self.failed = self.failed or self.all_lost()

    # -- a worker's thread ----------------------------------------------------------------------

    def train(self, m):
        task = self.tasks[m]
        while self.queue and self.failed is None and task.is_present:
            batch = self.queue.pop()
            header = (m, task.incarnation, batch)
            try:
                self.post.round(m, lambda key, due, h=header: self.compute(m, key, due, h))
            except Gone:
                self.lose(m)
                assert not task.is_present or task.incarnation != header[1]
            except Wrong as error:
                self.failed = error
                self.discarded.append(header)
            except AllLost as error:
                self.failed = error
            if header not in self.headers:
                self.queue.append(batch)
            self.pause()

    def compute(self, m, key, due, header):
        process = self.called(m)
        if self.errors and self.random.random() < 0.05:
            raise Wrong  # before anything was taken in
        self.take(process, due)
        if self.errors and self.random.random() < 0.05:
            raise Wrong
        process.table[key] = header
        self.answered(process)
        return header

    def take(self, process, due):
        for key in due.thrown:
            del process.table[key]
        assert due.messages == tuple(sorted(due.messages, key=lambda pair: pair[1]))
        for key, number in due.messages:
            assert number == process.version + 1
            process.model.append(process.table.pop(key))
            process.version = number
        assert process.version == due.version

    # -- the wire -----------------------------------------------------------------------------

    def called(self, m):
        process = self.processes[m]
        self.pause()
        if not process.alive:
            raise Gone(m)
        return process

    def answered(self, process):
        self.pause()
        if not process.alive:
            raise Gone

    def clear(self, m):
        process = self.called(m)
        process.table.clear()
        process.table.strays.clear()
        self.answered(process)

    def begin(self, m, model, version):
        owner, numbers = model
        process = self.called(m)
        if owner is not None and not owner.alive:
            raise Gone
        self.seen["given"] += owner is not None
        process.model, process.version = list(numbers), version
        self.answered(process)

    def begin_as(self, m, giver, incarnation, model, version):
        self.begin(m, model, version)

    def fetch(self, m, due):
        process = self.called(m)
        self.take(process, due)
        assert self.errors or process.table.keys() <= process.table.strays
        process.table.clear()
        process.table.strays.clear()
        self.answered(process)

    def taken(self, m):
        return self.called(m).version

    def model(self, m):
        process = self.called(m)
        found = process, list(process.model)
        self.answered(process)
        return found

    def brought(self, m):
        process, found = self.model(m)
        self.answered(process)
        return found

    def collect(self, m, key):
        process = self.called(m)
        process.table[key] = self.accrued
        self.answered(process)
        return self.accrued

    def send(self, source, key, targets):
        sender = self.processes[source]
        calls = {j: (self.processes[j], self.tasks[j].incarnation) for j in targets}
        entries = {j: self.entry(j) for j in targets}
        arrived = set()
        for j in self.random.sample(targets, len(targets)):
            receiver, incarnation = calls[j]
            self.pause()
            if sender.alive and not receiver.alive and self.random.random() < 0.5:
                self.start_ghost(sender.table[key], key, receiver)
            if receiver.alive and (sender.alive or self.random.random() < 0.5):
                receiver.table.setdefault(key, sender.table[key])
                self.pause()
                if sender.alive and receiver.alive:
                    arrived.add(j)
                else:
                    receiver.table.strays.add(key)
            if not receiver.alive and self.tasks[j].incarnation == incarnation:
                self.lose(j)
        if not sender.alive:
            self.lose(source)
        for j in arrived:
            if self.entry(j) != entries[j]:  # it came for a mailbox that is no more
                calls[j][0].table.strays.add(key)
        return arrived

    def entry(self, m):
        """Of the mailbox that a worker has now."""
        box = self.post._boxes._boxes.get(m)
        return None if box is None else box.entry

    def start_ghost(self, message, key, receiver):
        """A call that was let go of comes after all, once the receiver goes on."""
        self.seen["ghosts"] += 1
        name = f"ghost {self.seen['ghosts']}"

        def late():
            for _ in range(self.random.randint(0, 30)):
                self.pause()
            self.seen["late"] += any(p.table is receiver.table and p.alive for p in self.processes)
            receiver.table.strays.add(key)
            receiver.table.setdefault(key, message)

        self.start(name, late)

    def lost(self, m, incarnation, error):
        task = self.tasks[m]
        if not isinstance(error, Gone):
            return False
        if task.is_present and task.incarnation == incarnation and self.processes[m].alive:
            return False
        if task.incarnation == incarnation:
            self.lose(m)
        return True

    def gone(self, m):
        return Gone(m)

    def edition(self):
        return self.editions

    def shown(self):
        return (None, list(self.outside)), self.shown_version

    def show(self, model, version):
        self.outside, self.shown_version = list(model), version

    def count(self, header):
        m, incarnation, _ = header
        assert self.tasks[m].is_present and self.tasks[m].incarnation == incarnation
        assert header not in self.headers
        self.headers.add(header)
        self.counted.append(header)
        return True

    def withdraw(self, header):
        assert header not in self.headers | self.withdrawn
        self.withdrawn.add(header)

    def all_lost(self):
        updates = len(self.counted) - len(self.outside)
        return AllLost(updates) if updates else None

    # -- a whole history ------------------------------------------------------------------------

    def run(self, epochs=3):
        done = 0
        for _ in range(epochs):
            batches = self.random.randint(1, 25)
            self.queue = list(range(done, done + batches))
            self.kills = self.random.randint(0, 4)
            for task in self.tasks:
                if task.is_present:
                    self.start(f"worker {task.index}", lambda m=task.index: self.train(m))
            self.go_on()
            if isinstance(self.failed, AllLost):
                return
            if self.failed is None:
                while self.queue:  # given back as the last one ended
                    if not self.present():
                        self.come_back(self.random.choice(self.tasks))
                    self.start("last", functools.partial(self.train, self.present()[0]))
                    self.go_on()
                    if self.failed is not None:
                        return
                done += batches
                assert sorted(batch for _, _, batch in self.counted) == list(range(done))
            self.kills = 0
            self.start("main", self.drain)
            self.go_on()
            if isinstance(self.failed, AllLost):
                return
            if self.failed is not None:
                self.failed = None
                assert len({batch for _, _, batch in self.counted}) == len(self.counted)
                return

    def present(self):
        return [task.index for task in self.tasks if task.is_present]

    def discard(self):
        """After an error: its workers' messages are refused, and those of others may be whole."""
        failed = {m: header for header in self.discarded for m in header[:1]}
        for m in self.present():
            valid, incarnation = m not in failed, self.tasks[m].incarnation
            has_model = self.post._boxes.is_whole(m, incarnation)  # else it has computed nothing
            if valid and not (has_model and self.queue and self.random.random() < 0.5):
                continue
            batch = self.queue.pop() if valid else failed[m][2]
            self.accrued = (m, incarnation, batch)
            try:
                self.post.push(m, valid)
            except Gone:
                self.lose(m)
                continue
            known = self.headers if valid else self.withdrawn
            here = self.tasks[m].is_present and self.tasks[m].incarnation == incarnation
            assert self.accrued in known or not here
            self.sent_after_errors[valid] += 1
        self.discarded.clear()

    def drain(self):
        if isinstance(self.failed, Wrong):
            self.discard()
        here = []
        for m in self.present():
            try:
                self.post.fetch(m)
            except Gone:
                self.lose(m)
            except AllLost as error:
                self.failed = error
                return
            else:
                here.append(m)
        shown = False
        for m in here:
            if not shown:
                try:
                    self.post.show(m)
                    shown = True
                except Gone:
                    self.lose(m)
        if not shown:
            self.failed = AllLost(0)
            return
        for m in here:
            if self.processes[m].alive:
                assert self.processes[m].model == self.counted
        assert self.outside == self.counted and self.shown_version == len(self.counted)
        self.editions += 1
