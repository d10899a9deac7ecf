"""A shard that applies messages side by side: each once and whole, whoever is lost meanwhile."""

import dataclasses
import random
import threading

import pytest
import tensorflow as tf

# Whether a call that its caller gives up leaves something half done. TF 2.21.
from tensorflow.python.eager import cancellation  # noqa: TID251

from tf_dsgd import _tf
from tf_dsgd.algorithms.hogwild import AddInPlace
from tf_dsgd.engine.shard import Shard
from tf_dsgd.membership import deadlines

WORKERS, MOST = 3, 40
SECONDS = 60.0
HEADER = tf.TensorSpec([5], tf.int64)
"""(worker, incarnation, sequence, version, steps)."""
NUMBER = tf.TensorSpec([], tf.int64)


def made(**options):
    count = _tf.make_variable(tf.zeros([], tf.int64), device=None)
    return Shard(0, WORKERS, None, count, **options)


IN_THREAD = threading.local()


@pytest.fixture(autouse=True)
def each_thread_gives_up_its_own(monkeypatch):
    """TensorFlow has one for all threads."""
    monkeypatch.setattr(cancellation, "context", lambda: getattr(IN_THREAD, "manager", None))


@dataclasses.dataclass(eq=False)
class Call:
    """A message, or a fence, on its way in a thread of its own."""

    worker: int
    incarnation: int
    sequence: int | None = None
    """None: a fence."""
    is_current: bool = False
    place: int = 0
    """Of the gate that the message's application waits at."""
    found: object = None
    manager: object = None

    def start(self, function, *inputs):
        self.manager = cancellation.CancellationManager()

        def run():
            IN_THREAD.manager = self.manager
            try:
                self.found = function(*inputs).numpy()
            except tf.errors.CancelledError:
                self.found = "cancelled"

        self.thread = threading.Thread(target=run)
        self.thread.start()

    def ended(self):
        self.thread.join(SECONDS)
        assert not self.thread.is_alive(), f"{self} waits for ever"
        return self.found


class World:
    """A shard, messages that are applied when they are told to, and what has been applied."""

    def __init__(self, **options):
        self.shard = made(**options or {"rule": AddInPlace()})
        self._new = self.shard.state()
        self.applied = _tf.make_variable(tf.zeros([WORKERS, MOST], tf.int64), device=None)
        self.begun = tf.queue.FIFOQueue(-1, [tf.int64], [[]])
        self.gates = [tf.queue.FIFOQueue(1, [tf.bool], [[]]) for _ in range(MOST)]
        self.calls = []

        def apply(content, tau):
            header, place = content
            gate = tf.gather(tf.stack([gate.queue_ref for gate in self.gates]), place)
            with tf.control_dependencies([self.begun.enqueue(place)]):
                opened = tf.raw_ops.QueueDequeueV2(handle=gate, component_types=[tf.bool])
            with tf.control_dependencies(opened):
                place = tf.stack([header[0], header[2]])[None]
                self.applied.scatter_nd_add(place, tf.ones([1], tf.int64))
            return True

        self._receive = tf.function(
            lambda header, place: self.shard.receive([header, place], list, apply),
            input_signature=[HEADER, NUMBER],
            autograph=False,
        ).get_concrete_function()

    def begin_anew(self):
        self.shard.restore(self._new, [0] * WORKERS)
        self.applied.assign(tf.zeros_like(self.applied))
        self.calls = []

    def send(self, worker, sequence, incarnation=0):
        call = Call(worker, incarnation, sequence, place=len(self.calls))
        self.calls.append(call)
        header = tf.constant([worker, incarnation, sequence, 0, 1], tf.int64)
        call.start(self._receive, header, tf.constant(call.place, tf.int64))
        return call

    def fence(self, worker, incarnation):
        call = Call(worker, incarnation)
        call.start(self.shard.fence, *(tf.constant(n, tf.int64) for n in (worker, incarnation)))
        return call

    def begins(self):
        """The call whose message is being applied next; it waits for that."""
        return self.calls[int(self.begun.dequeue())]

    def open(self, call):
        self.gates[call.place].enqueue(True)

    def times(self, worker, sequence):
        return int(self.applied.numpy()[worker, sequence])


def test_others_are_applied_while_one_is_and_its_sender_waits():
    world = World()
    held = world.send(0, 1)
    assert world.begins() is held
    other = world.send(1, 1)
    assert world.begins() is other
    world.open(other)
    assert other.ended() and world.times(1, 1) == 1
    assert world.fence(1, 1).ended() == 1
    # Who sends the first one again, perhaps in the sender's name, and who fences its sender:
    again, fence = world.send(0, 1), world.fence(0, 1)
    again.thread.join(0.2)
    assert again.thread.is_alive() and fence.thread.is_alive()
    assert world.times(0, 1) == 0
    world.open(held)
    assert held.ended() and not again.ended() and fence.ended() == 1
    assert world.times(0, 1) == 1
    ledger = world.shard.ledger([1, 1, 0])
    assert [(w.applied, w.refused, w.in_flight) for w in ledger.workers] == [
        (1, 1, 0),
        (1, 0, 0),
        (0, 0, 0),
    ]
    assert int(world.shard.version.numpy()) == world.shard.steps_done() == 2


def test_who_gives_up_waiting_leaves_nothing():
    """Of a mutex of TensorFlow's whoever gives up waiting takes it from who has it. TF 2.21."""
    world = World()
    held = world.send(0, 1)
    assert world.begins() is held
    waiting = world.send(0, 2)
    waiting.manager.start_cancel()
    assert waiting.ended() == "cancelled"
    world.open(held)
    assert held.ended() and world.fence(0, 1).ended() == 1
    again = world.send(0, 2, 1)
    assert world.begins() is again
    world.open(again)
    assert again.ended() and [world.times(0, k) for k in (1, 2)] == [1, 1]


def test_who_gives_up_waiting_for_a_shard_does_not_let_others_in():
    world = World(remote=True)
    held = world.send(0, 1)
    assert world.begins() is held
    waiting = world.send(1, 1)
    waiting.manager.start_cancel()
    assert waiting.ended() == "cancelled"
    other = world.send(2, 1)
    other.thread.join(0.2)
    assert other.thread.is_alive() and int(world.begun.size()) == 0
    world.open(held)
    assert held.ended() and world.begins() is other
    world.open(other)
    assert other.ended()
    assert [world.times(worker, 1) for worker in range(WORKERS)] == [1, 0, 1]


def test_a_message_waits_for_its_sender_alone():
    """Who waits for the shard's lock with the sender's would leave that behind, given up."""
    world = World()
    reading = threading.Event()
    read = tf.queue.FIFOQueue(1, [tf.bool], [[]])

    def body(_):
        return read.dequeue()

    fetch = tf.function(lambda: world.shard.locked([], body), autograph=False)
    fetch = fetch.get_concrete_function()
    thread = threading.Thread(target=lambda: (fetch(), reading.set()))
    thread.start()
    call = world.send(1, 1)
    assert world.begins() is call
    world.open(call)
    assert call.ended() and not reading.is_set()
    read.enqueue(True)
    thread.join(SECONDS)
    assert reading.is_set()


@pytest.mark.parametrize("options", [{"rule": AddInPlace()}, {"remote": True}])
def test_a_lock_that_an_error_leaves_behind_is_mended(options, monkeypatch):
    monkeypatch.setattr(deadlines, "LOCK_SECONDS", 0.2)
    shard = made(**options)
    fails = _tf.make_variable(True, device=None)

    def apply(content, tau):
        with tf.control_dependencies([tf.debugging.Assert(tf.logical_not(fails), ["by a rule"])]):
            return tf.constant(True)

    receive = tf.function(
        lambda header: shard.receive([header], list, apply),
        input_signature=[HEADER],
        autograph=False,
    ).get_concrete_function()
    with pytest.raises(tf.errors.InvalidArgumentError, match="by a rule"):
        receive(tf.constant([1, 0, 1, 0, 1], tf.int64))
    fails.assign(False)
    call = Call(1, 0, 2)
    call.start(receive, tf.constant([1, 0, 2, 0, 1], tf.int64))
    call.thread.join(0.2)
    assert call.thread.is_alive()
    shard.mend()
    assert call.ended()
    shard.mend()
    locks = [each for each in (shard._lock, shard._senders) if each is not None]
    assert all(number == 1 for each in locks for number in each._standing()[0].numpy())


class History:
    """A random one. Messages are sent, sent again and given up; workers are lost and come back."""

    def __init__(self, world, seed):
        self.random = random.Random(seed)
        self.world = world
        world.begin_anew()
        self.last = [0] * WORKERS
        self.incarnation = [0] * WORKERS
        self.waiting, self.open = [], []
        self.fences = []

    def send(self):
        """The next message of a worker, whose last one was taken; or the last one again."""
        worker = self.random.randrange(WORKERS)
        last = self.last[worker]
        if not last or (self.world.times(worker, last) and self.random.random() < 0.7):
            self.last[worker] += 1
        # A sender that was lost may not know it yet.
        incarnation = max(self.incarnation[worker] - (self.random.random() < 0.1), 0)
        is_current = self._is_fenced(worker) and incarnation == self.incarnation[worker]
        call = self.world.send(worker, self.last[worker], incarnation)
        call.is_current = is_current
        self.waiting.append(call)

    def _is_fenced(self, worker):
        return all(f.found is not None for f in self.fences if f.worker == worker)

    def begin(self):
        """What has come to its gate is not given up: a rule has nothing in it that waits."""
        while int(self.world.begun.size()):
            call = self.world.begins()
            self.waiting.remove(call)
            self.open.append(call)

    def let_go(self):
        self.begin()
        if self.open:
            call = self.open.pop(self.random.randrange(len(self.open)))
            self.world.open(call)
            assert call.ended(), call
            assert self.world.times(call.worker, call.sequence) == 1, call

    def give_up(self):
        """One that is known to wait for its sender's lock."""
        self.begin()
        busy = {call.worker for call in self.open}
        waiting = [c for c in self.waiting if c.worker in busy and c.thread.is_alive()]
        if waiting:
            call = self.random.choice(waiting)
            self.waiting.remove(call)
            call.manager.start_cancel()
            assert call.ended() in ("cancelled", False), call

    def lose(self):
        """Of one worker one fence after the other is asked for, as engines do."""
        worker = self.random.randrange(WORKERS)
        if not self._is_fenced(worker):
            return
        self.incarnation[worker] += 1
        self.fences.append(self.world.fence(worker, self.incarnation[worker]))

    def run(self):
        act = [self.send, self.send, self.let_go, self.let_go, self.give_up, self.lose]
        while len(self.world.calls) < 15:
            self.random.choice(act)()
            self.check()
        while self.open or any(call.thread.is_alive() for call in self.waiting):
            self.let_go()
        for fence in self.fences:
            fence.ended()
        self.begin()
        assert not self.open
        self.check()
        self.end()

    def check(self):
        """What was answered is so."""
        for call in [c for c in self.waiting if not c.thread.is_alive()]:
            self.waiting.remove(call)
            assert call.found is not None and not call.found, call  # it did not come to its gate
            if call.is_current and call.incarnation == self.incarnation[call.worker]:
                assert self.world.times(call.worker, call.sequence) == 1  # refused: a repetition
        times = self.world.applied.numpy()
        assert times.max() <= 1
        for fence in self.fences:
            if fence.found is not None:
                assert times[fence.worker, 1 : fence.found + 1].tolist() == [1] * fence.found

    def end(self):
        times, world = self.world.applied.numpy(), self.world
        ledger = world.shard.ledger()
        assert [w.applied for w in ledger.workers] == times.sum(1).tolist()
        assert int(world.shard.version.numpy()) == world.shard.steps_done() == times.sum()
        given_up = sum(str(call.found) == "cancelled" for call in world.calls)
        assert ledger.applied + ledger.refused == len(world.calls) - given_up


@pytest.mark.medium
def test_random_histories():
    world = World()
    for seed in range(100):
        History(world, seed).run()


@pytest.mark.medium
@pytest.mark.parametrize("lock_free", [True, False])
def test_a_message_given_up_at_any_time_is_applied_whole_or_not_at_all(lock_free):
    """Of twelve weights all are changed, or none, and it is counted if they are."""
    weights = [_tf.make_variable(tf.zeros([500, 100]), device=None) for _ in range(12)]
    shard = made(rule=AddInPlace()) if lock_free else made(remote=True)

    def apply(content, tau):
        for weight in weights:
            weight.assign_add(tf.ones([500, 100]), read_value=False)
        return True

    receive = tf.function(
        lambda header: shard.receive([header], list, apply),
        input_signature=[HEADER],
        autograph=False,
    ).get_concrete_function()
    chance = random.Random(0)
    ended = []
    for number in range(1, 151):
        calls = []
        for worker in range(WORKERS):
            call = Call(worker, 0, number)
            call.start(receive, tf.constant([worker, 0, number, 0, 1], tf.int64))
            calls.append(call)
        threading.Event().wait(chance.random() * 0.02)
        for call in calls:
            call.manager.start_cancel()
        ended += [call.ended() for call in calls]
    for worker in range(WORKERS):
        shard.fence(tf.constant(worker, tf.int64), tf.constant(1, tf.int64))
    counts = {weight.numpy().min() for weight in weights} | {w.numpy().max() for w in weights}
    assert counts == {float(shard.ledger().applied)}
    assert int(shard.version.numpy()) == shard.ledger().applied
    assert {"cancelled", True} <= set(ended)
