"""What the chief of a cluster does about workers that come and go, without a cluster."""

import time
import types

import pytest
import tensorflow as tf

from tf_dsgd import _tf
from tf_dsgd.algorithms.downpour import Periods
from tf_dsgd.engine import members as module
from tf_dsgd.engine.log import Log
from tf_dsgd.engine.remote import RemoteRounds
from tf_dsgd.engine.scheduler import Scheduler
from tf_dsgd.engine.threads import ThreadsEngine
from tf_dsgd.engine.work import Loss
from tf_dsgd.membership import deadlines
from tf_dsgd.membership.group import Group
from tf_dsgd.membership.liveness import Liveness
from tf_dsgd.membership.peer import Peer
from tf_dsgd.membership.task import TaskState
from tf_dsgd.resuming import ENDS_TRAINING
from tf_dsgd.transport import probing
from tf_dsgd.transport.connection import UnequalVersions

SILENT = (
    "failed to connect to all addresses; last error: UNKNOWN: ipv4:127.0.0.1:35265: connection "
    "attempt timed out before receiving SETTINGS frame"
)
GONE = tf.errors.UnavailableError(None, None, "connection refused")


class Connection:
    """Two workers on this process's processor, and a ps."""

    shards_on_workers = False
    host_device = "CPU:0"

    def __init__(self, present=(True, True), listening=(True, True)):
        self.reasons, self.asked = [], []
        self.here, self.listening = list(present), list(listening)
        self.versions, self.replaced = ["ours", "ours"], None
        self.liveness = Liveness(5.0)
        self.groups = [Group([Peer(m, f"w{m}:1")]) for m in range(2)]
        for group in self.groups:
            group.enter()

    def present(self):
        return self.here

    def part_devices(self):
        return [["CPU:0"], ["CPU:0"]]

    def shard_devices(self):
        return ["CPU:0"]

    def addresses(self):
        return []

    def silent_shards(self):
        return []

    def ended_shards(self, seconds=0.0):
        return []

    def unanswering_shards(self, seconds):
        return []

    def name_at(self, address):
        return f"a task at {address}"

    def has_shard(self, address):
        return address.startswith("ps")

    def worker_listens(self, m):
        return self.listening[m]

    def answering(self, workers):
        self.asked.append(list(workers))
        return self.reached(workers)

    def reached(self, workers):
        return {m for m in workers if self.listening[m]}

    def worker_is_silent(self, m):
        return self.liveness.is_silent(f"w{m}:1")

    def with_partners(self, addresses):
        return set(addresses)

    def worker_name(self, m):
        return f"worker {m}"

    def call(self, m, action):
        return action()

    def join(self, m, seconds):
        if self.versions[m] != "ours":
            raise UnequalVersions(f"worker {m} runs another version.")
        return True

    def was_replaced(self, m):
        replaced, self.replaced = self.replaced == m, None
        return replaced


class Shard:
    """Tells what it has of a worker that is fenced; fails as often as it is told to."""

    log = None

    def __init__(self, fails=0):
        self.fails, self.fenced = fails, []

    def fence(self, worker, incarnation):
        if self.fails:
            self.fails -= 1
            raise GONE
        self.fenced.append((int(worker), int(incarnation)))
        return tf.constant(0, tf.int64)

    def steps_done(self):
        return 0


class Unanswering:
    """A variable on a worker that does not answer."""

    device = "CPU:0"

    def __init__(self, error):
        self.error = error

    def numpy(self):
        raise self.error


def made(connection, shard=None):
    """An engine on it, whose tasks nobody probes."""
    rounds = RemoteRounds(connection, 5.0, overlaps=False)
    engine = ThreadsEngine(rounds.members.store, Scheduler(Periods(), rounds.members.tasks), rounds)
    engine.shards = [shard or Shard()]
    rounds.members._engine = engine
    return engine


@pytest.mark.parametrize("left", [True, False])
def test_workers_that_are_lost_while_the_engine_is_made(left, monkeypatch):
    """The first variable cannot be created there."""
    calls = []

    def make(*args, **kwargs):
        calls.append(args)
        if len(calls) == (2 if left else 1):
            raise GONE
        return made_by_tensorflow(*args, **kwargs)

    made_by_tensorflow = _tf.make_variable
    monkeypatch.setattr(_tf, "make_variable", make)
    connection = Connection(present=(left, True), listening=(False, False))
    if not left:
        with pytest.raises(RuntimeError, match="All workers were lost while the strategy was made"):
            RemoteRounds(connection, 5.0, overlaps=False)
        return
    members = RemoteRounds(connection, 5.0, overlaps=False).members
    assert members.store.present == [True, False]
    assert [task.state for task in members.tasks] == [TaskState.IDLE, TaskState.LOST]


def test_a_fence_that_fails_is_tried_again(capsys):
    """Else a shard would take what the lost worker still sends, and refuse its successor."""
    shard = Shard(fails=1)
    engine = made(Connection(), shard)
    members, task = engine.rounds.members, engine.tasks[1]
    with pytest.raises(tf.errors.UnavailableError):
        members.lose(task)
    assert task.state is TaskState.LOST and shard.fenced == []
    members.lose(task)
    assert shard.fenced == [(1, 1)] and task.incarnation == 1
    members.lose(task)  # it is done
    assert shard.fenced == [(1, 1)]
    assert "lost worker 1; 0 unfinished" in capsys.readouterr().err


def test_what_an_error_names_as_lost_is_not_told_of_again(capsys):
    """That error is a script's last line, and says how to go on; a probe may find out later."""
    engine = made(Connection())
    members, lost = engine.rounds.members, ["a task at ps0:1"]
    engine.rounds.members.connection.ended_shards = lambda _=0.0: lost
    with pytest.raises(RuntimeError, match="Lost a task at ps0:1, and the part of the model"):
        members.look()
    members.probes.condemn(["ps0:1", "w0:1"])
    members.probes.condemn(["w1:1"])
    assert capsys.readouterr().err.splitlines() == [
        "tf_dsgd: a task at w1:1 has not answered for 5 s and counts as lost"
    ]


def test_weights_that_are_out_of_reach_for_a_moment_are_not_lost():
    """Calls that are under way go on, or fail, or a probe finds out; a look has no hurry."""
    engine = made(Connection())
    engine.rounds.members.connection.silent_shards = lambda: ["a task at ps0:1"]
    engine.rounds.members.look()


def test_an_error_waits_until_it_is_known_whether_a_part_of_the_model_is_lost(monkeypatch):
    """One lost packet is not the loss of a ps, and what the error was is said."""
    members = made(Connection()).rounds.members
    out_of_reach = [["a task at ps0:1"], ["a task at ps0:1"], []]
    monkeypatch.setattr(members.connection, "silent_shards", lambda: out_of_reach.pop(0))
    user_error = tf.errors.InvalidArgumentError(None, None, "a shape")
    assert members.reason(user_error) is None and len(out_of_reach) == 3  # it is not waited for
    assert members.reason(GONE) is None and out_of_reach == []
    out_of_reach += [["a task at ps0:1"]] * 2
    ended = [[], ["a task at ps0:1"]]
    monkeypatch.setattr(members.connection, "ended_shards", lambda _: ended.pop(0))
    with pytest.raises(RuntimeError, match="Lost a task at ps0:1"):
        members.was_lost_by(1, GONE)


def test_all_that_are_absent_are_asked_at_the_same_time(monkeypatch):
    """And nobody for a second after that: on a machine that is gone each answer takes its time."""
    connection = Connection(present=(True, False), listening=(True, False))
    members = made(connection).rounds.members
    now = [members._looked]
    monkeypatch.setattr(module, "time", types.SimpleNamespace(monotonic=lambda: now[0]))
    answering = connection.answering

    def slow(workers):
        now[0] += 2 * deadlines.LOOK_SECONDS
        return answering(workers)

    connection.answering = slow
    for _ in range(110):
        now[0] += 0.03 * deadlines.LOOK_SECONDS
        members.look_now_and_then()
    assert connection.asked == [[1]] * 3


def test_a_worker_is_not_told_of_while_another_completes_its_message():
    connection = Connection()
    engine = made(connection)
    members, task = engine.rounds.members, engine.tasks[1]
    members.lose(task)
    joined = []
    connection.join = lambda m, seconds: bool(joined.append(m)) or True
    orphan = types.SimpleNamespace(owner=1, runner=0)
    engine.scheduler.orphans.append(orphan)
    members.look()
    assert joined == [] and task.state is TaskState.LOST
    engine.scheduler.orphans.remove(orphan)
    members.look()
    assert joined == [1] and task.state is TaskState.IDLE


def test_where_a_worker_computes_is_seen_as_it_joins():
    """One that was not there when the strategy was made may have a GPU."""
    connection = Connection(present=(True, False))
    members = made(connection).rounds.members
    connection.part_devices = lambda: [["CPU:0"], ["/device:CPU:0"]]
    members.look()
    assert members.tasks[1].state is TaskState.IDLE
    assert members.store.worker_devices == ["CPU:0", "/device:CPU:0"]
    assert members.store.part_devices == [["CPU:0"], ["/device:CPU:0"]]


@pytest.mark.parametrize("found_by", ["its own call", "another's"])
def test_of_each_worker_that_does_not_answer_it_is_said(found_by, monkeypatch, capsys):
    """Also if gRPC finds it before a probe does: as its own call, or another's to it, fails."""
    engine = made(Connection())
    members, error = engine.rounds.members, tf.errors.UnavailableError(None, None, SILENT)
    members.store.kept = {"kernel": {"drawn": None}}  # as of QSGD, which holds nothing back
    monkeypatch.setattr(probing, "not_answering", lambda addresses, _: set(addresses))
    if found_by == "its own call":
        assert members.was_lost_by(1, error)
    else:
        monkeypatch.setattr(members.store.clock, "copies", [None, Unanswering(error)])
        assert members.is_gone(1, 0)
    said = capsys.readouterr().err.splitlines()
    assert said[0] == "tf_dsgd: a task at w1:1 has not answered for 5 s and counts as lost"
    assert said[1] == (
        "tf_dsgd: lost worker 1; 0 unfinished mini-batches go to others, 1 of 2 workers go on"
    )


def test_a_worker_of_another_version_is_told_of_once_and_its_successor_joins(capsys):
    """Also one that took its place so soon that nobody saw its port closed."""
    connection = Connection(present=(True, False))
    connection.versions[1] = "another"
    members = made(connection).rounds.members
    task = members.tasks[1]
    for _ in range(3):
        members.look()
        assert task.state is TaskState.REFUSED
    assert capsys.readouterr().err.count("runs another version") == 1
    connection.versions[1], connection.replaced = "ours", 1
    members.look()
    members.look()
    assert task.state is TaskState.IDLE


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("another"), GONE])
def test_a_worker_whose_variables_cannot_be_made_joins_later(error, monkeypatch):
    engine = made(Connection())
    members, task = engine.rounds.members, engine.tasks[1]
    members.lose(task)
    since = task.since
    renew = members.store.renew

    def fails(*args):
        raise error

    monkeypatch.setattr(members.store, "renew", fails)
    if error is GONE:
        members.look()  # it is said, and training goes on
    else:
        with pytest.raises(type(error)):
            members.look()
    assert (task.state, task.since) == (TaskState.LOST, since)
    monkeypatch.setattr(members.store, "renew", renew)
    members.look()
    assert task.state is TaskState.IDLE and members.store.present == [True, True]


def test_no_worker_comes_before_the_first_step():
    """The error says so, and the next training does not stand still."""
    connection = Connection()
    engine = made(connection)
    for task in engine.tasks:
        engine.rounds.members.lose(task)
        task.since -= 1000.0
    connection.listening = [False, False]
    with pytest.raises(TimeoutError, match="All workers were lost, and none came back within 5 s"):
        engine.rounds.members.assemble()
    assert not engine.scheduler.stopped and not engine.has_failed


@pytest.mark.parametrize(("updates", "what"), [(32, "32 updates"), (1, "1 update")])
def test_where_workers_have_the_only_models_the_loss_of_all_ends_training_at_once(updates, what):
    """Whether they come back or not, with an error that is said in a line; and only once."""
    shard = Shard()
    shard.log, shard.version = Log(2, "CPU:0"), tf.Variable(updates, dtype=tf.int64)
    engine = made(Connection(), shard)
    engine.rounds.members.lose(engine.tasks[0])
    assert not engine.has_failed
    engine.rounds.members.lose(engine.tasks[1])
    with pytest.raises(RuntimeError, match=f"lost, and with them {what} that no other") as raised:
        engine.raise_error()
    assert raised.value.__notes__ == [ENDS_TRAINING]
    assert engine.all_lost() is None and not engine.scheduler.stopped


def test_the_loss_of_all_as_a_drain_ends_is_an_error_of_that_drain(monkeypatch):
    """The last ones are lost as their models are read; without that a script would go on."""
    shard = Shard()
    shard.log, shard.version = Log(2, "CPU:0"), tf.Variable(7, dtype=tf.int64)
    engine = made(Connection(), shard)
    lose = engine.rounds.members.lose
    monkeypatch.setattr(engine, "_program", types.SimpleNamespace(forget_fetched=lambda: None))
    monkeypatch.setattr(engine, "_come_to_rest", lambda: [lose(task) for task in engine.tasks])
    with pytest.raises(RuntimeError, match="with them 7 updates"):
        engine.drain()


@pytest.mark.parametrize(("count", "what"), [(1, "1 unfinished mini-batch goes"), (2, "es go")])
def test_a_lost_workers_mini_batches_are_counted_in_words(count, what):
    assert f"{what} to others" in Loss(count, None).words()


def test_a_silent_worker_that_has_nothing_to_do_is_lost():
    connection = Connection()
    engine = made(connection)
    connection.liveness.condemn(["w1:1"])
    connection.listening[1] = False
    engine.rounds.members.look()
    assert [task.state for task in engine.tasks] == [TaskState.IDLE, TaskState.LOST]
    connection.liveness.probed(0.0, time.monotonic(), {"w1:1"}, set())
    connection.listening[1] = True
    engine.rounds.members.look()
    assert engine.tasks[1].state is TaskState.IDLE


def test_without_ps_tasks_a_silent_worker_ends_training_and_no_more():
    """It may go on, and a second training with it."""
    connection = Connection()
    engine = made(connection)
    connection.shards_on_workers = True
    connection.liveness.condemn(["w1:1"])
    with pytest.raises(RuntimeError, match="Lost worker 1"):
        engine.rounds.members.look()
    assert engine.tasks[1].state is TaskState.IDLE
