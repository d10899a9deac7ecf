"""How the chief adds workers that come, without TensorFlow."""

import os
import threading
import time

import pytest
import tensorflow as tf

from tf_dsgd import _tf_remote
from tf_dsgd.membership import deadlines
from tf_dsgd.membership.group import Group
from tf_dsgd.membership.liveness import Liveness
from tf_dsgd.membership.peer import Peer, PeerState
from tf_dsgd.transport import channels, cluster_spec, names, opening, probing
from tf_dsgd.transport.connection import Connection


@pytest.fixture
def connection(monkeypatch):
    """One whose workers answer, and whose adding waits for the test."""
    made = Connection.__new__(Connection)
    made.tasks = cluster_spec.from_cluster_spec(
        tf.train.ClusterSpec({"worker": ["a:1", "b:1"], "ps": ["c:1"]})
    )
    made._join, made.shards_on_workers = None, False
    made.groups = [Group([Peer(0, "a:1")]), Group([Peer(1, "b:1")])]
    for group in made.groups:
        group.enter()
    made.liveness = Liveness(60.0)
    made.added, made.go_on, made.error = [], threading.Event(), None

    def add(group):
        assert made.go_on.wait(30.0)
        made.added.append(group.peers[0].index)
        if made.error is not None:
            raise made.error
        group.enter()

    made._add = add
    made.answering = True
    monkeypatch.setattr(probing, "answers", lambda address, seconds: made.answering)
    return made


def states(connection):
    return [peer.state for peer in connection.peers]


def known(connection):
    """The workers that TensorFlow has in its cluster."""
    return {peer.index for peer in connection.peers if peer.is_known}


def test_a_worker_that_stops_while_it_is_added_holds_nobody(connection):
    assert not connection.join(1, 0.01)
    assert not connection.join(0, 0.01)  # one at a time
    connection.go_on.set()
    assert connection._join[1].wait(30.0)
    assert not connection.join(0, 30.0)  # that was the other one
    assert connection.join(0, 30.0)
    assert connection.added == [1, 0]


def test_its_error_is_raised_where_it_is_waited_for(connection):
    connection.error = tf.errors.UnavailableError(None, None, "gone")
    connection.go_on.set()
    with pytest.raises(tf.errors.UnavailableError):
        connection.join(1, 30.0)
    connection.error = None
    assert connection.join(1, 30.0)


def test_the_error_of_one_that_another_waited_for_is_not_forgotten(connection, capsys):
    """It may not know all functions: it leaves before it joins."""
    connection.error = tf.errors.UnavailableError(None, None, "gone")
    assert not connection.join(1, 0.01)
    connection.go_on.set()
    assert connection._join[1].wait(30.0)
    assert not connection.join(0, 30.0)
    assert states(connection) == [PeerState.MEMBER, PeerState.LEFT_OUT]
    assert "worker 1 at b:1 has not joined: gone" in capsys.readouterr().err


def test_one_that_does_not_answer_is_not_added(connection):
    connection.answering = False
    assert not connection.join(1, 30.0)
    assert connection.added == []


def test_one_that_is_gone_again_as_a_strategy_is_made_is_not_there(connection, monkeypatch):
    monkeypatch.setattr(probing, "reachable", lambda address, seconds: True)
    monkeypatch.setattr(probing, "not_reachable", lambda addresses, seconds: set())
    monkeypatch.setattr(cluster_spec, "remote_version", lambda device: "1.0")
    connection.peers[1].forget()
    connection.error = tf.errors.UnavailableError(None, None, "gone")
    connection.go_on.set()
    assert connection.present() == [True, False]
    connection.error = None
    assert connection.present() == [True, True]


def test_pings_of_channels(monkeypatch):
    """An eighth of the timeout until one is sent, and the rest for its answer.

    gRPC's numbers are 32 bits long.
    """
    monkeypatch.setenv("TF_GRPC_DEFAULT_OPTIONS", "")  # as it was, when this test has ended
    monkeypatch.delenv("TF_GRPC_DEFAULT_OPTIONS")
    channels.configure(8.0)
    told = dict(option.split("=") for option in os.environ["TF_GRPC_DEFAULT_OPTIONS"].split(","))
    assert told == {
        "grpc.keepalive_time_ms": "1000",
        "grpc.keepalive_timeout_ms": "7000",
        "grpc.http2.ping_timeout_ms": "7000",
        "grpc.min_reconnect_backoff_ms": "2000",
        "grpc.max_reconnect_backoff_ms": "2000",
        "grpc.http2.max_pings_without_data": "1",
        "grpc.enable_http_proxy": "0",
    }
    channels.configure(1.0)  # TensorFlow reads it once
    assert "grpc.keepalive_time_ms=1000," in os.environ["TF_GRPC_DEFAULT_OPTIONS"]
    monkeypatch.delenv("TF_GRPC_DEFAULT_OPTIONS")
    channels.configure(9e8)
    *numbers, direct = os.environ["TF_GRPC_DEFAULT_OPTIONS"].split(",")
    assert direct == "grpc.enable_http_proxy=0"
    for option in numbers:
        assert 1 <= int(option.split("=")[1]) < 2**31


@pytest.mark.parametrize(
    ("error", "same"),
    [
        (None, True),
        (tf.errors.NotFoundError(None, None, "'ask' is no function registered"), True),
        (tf.errors.AbortedError(None, None, "Cleanup 12"), True),
        (tf.errors.InvalidArgumentError(None, None, "Unable to find a context_id"), False),
    ],
)
def test_who_has_a_context_of_this_process_leaves_before_it_joins(
    connection, monkeypatch, error, same
):
    def ask(device):
        if error is not None:
            raise error

    told = []
    monkeypatch.setattr(cluster_spec, "remote_version", ask)
    monkeypatch.setattr(probing, "not_answering", lambda addresses, seconds: set())
    connection._change = lambda *who: told.append(tuple({p.index for p in some} for some in who))
    connection._check_version = lambda *arguments: None
    connection.peers[1].leave_out()
    Connection._add(connection, connection.groups[1])
    assert told == ([(set(), {1})] if same else [({1}, set())])
    assert known(connection) == ({0} if same else {0, 1})
    if same:
        assert not connection.join(1, 0.01)  # it stays away for a moment
        assert connection.added == []
        Connection._add(connection, connection.groups[1])
    assert told[-1] == ({1}, set())
    assert states(connection) == [PeerState.MEMBER] * 2


@pytest.fixture
def told(connection, monkeypatch):
    """What TensorFlow is told, and what is closed, in their order; a change may fail."""
    happened = []
    connection._left_out, connection.changes = set(), 0
    connection._check_version = lambda *arguments: None
    connection.failure, connection.silent_seconds = None, 60.0

    def change(job, joining, absent):
        happened.append((set(joining), set(absent)))
        if connection.failure is not None:
            raise connection.failure

    monkeypatch.setattr(_tf_remote, "change_tasks", change)
    monkeypatch.setattr(probing, "not_answering", lambda addresses, seconds: {"a:1"})
    monkeypatch.setattr(names, "close_connections", happened.append)
    return happened


GONE = tf.errors.UnavailableError(None, None, "Connection refused")
REPLACED = tf.errors.AbortedError(None, None, "Unable to find a context_id")


def remote_versions(monkeypatch, answers):
    """What workers answer one after another; the last again and again."""

    def ask(device):
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(cluster_spec, "remote_version", ask)


def test_tensorflow_is_not_told_of_one_that_calls_do_not_reach_yet(connection, told, monkeypatch):
    remote_versions(monkeypatch, [GONE])
    monkeypatch.setattr(deadlines, "REACH_SECONDS", 0.01)
    with pytest.raises(tf.errors.UnavailableError, match="No connection to it is made yet"):
        Connection._add(connection, connection.groups[1])
    assert told == []
    monkeypatch.setattr(deadlines, "REACH_SECONDS", 30.0)
    remote_versions(monkeypatch, [GONE, GONE, REPLACED])
    Connection._add(connection, connection.groups[1])
    assert told == [({1}, {0}), "a:1"]


def test_who_is_left_out_has_its_connections_closed_also_if_the_change_fails(
    connection, told, monkeypatch
):
    remote_versions(monkeypatch, [REPLACED])
    connection.failure = GONE
    with pytest.raises(tf.errors.UnavailableError):
        Connection._add(connection, connection.groups[1])
    assert told == [({1}, {0}), "a:1"]
    assert known(connection) == {1}  # as TensorFlow has it
    connection.failure = None
    monkeypatch.setattr(probing, "not_answering", lambda addresses, seconds: set())
    Connection._add(connection, connection.groups[0])
    assert told[2:] == ["a:1", ({0}, set())]  # before it is told of functions, not after
    assert known(connection) == {0, 1}


def test_one_stays_away_for_a_moment_also_if_its_leaving_fails(connection, told, monkeypatch):
    remote_versions(monkeypatch, ["1.0"])
    connection.peers[1].leave_out()
    connection.failure = GONE
    with pytest.raises(tf.errors.UnavailableError):
        Connection._add(connection, connection.groups[1])
    assert told[0] == (set(), {0, 1})
    assert known(connection) == set()
    assert not connection.join(1, 30.0)
    assert connection.added == []


def test_one_that_is_there_and_answers_no_calls_does_not_join_for_ever(
    connection, told, monkeypatch
):
    closed = threading.Event()

    def change(job, joining, absent):
        assert closed.wait(30.0)
        raise GONE

    remote_versions(monkeypatch, [REPLACED])
    monkeypatch.setattr(_tf_remote, "change_tasks", change)
    monkeypatch.setattr(probing, "not_answering", lambda addresses, seconds: set())
    monkeypatch.setattr(names, "close_connections", lambda address: closed.set())
    monkeypatch.setattr(deadlines, "CALL_EVERY_SECONDS", 0.02)
    monkeypatch.setattr(deadlines, "CALL_SECONDS", 0.01)
    connection.silent_seconds = 0.02
    with pytest.raises(tf.errors.UnavailableError, match="Connection refused"):
        Connection._add(connection, connection.groups[1])
    assert closed.is_set()


# -- a worker of two tasks --------------------------------------------------------------------


@pytest.fixture
def pairs(monkeypatch):
    """Two workers of two tasks each; `same` are the tasks that are the processes they were."""
    made = Connection.__new__(Connection)
    jobs = {"worker": ["a:1", "b:1", "c:1", "d:1"], "ps": ["p:1"]}
    made.tasks = cluster_spec.grouped(cluster_spec.from_cluster_spec(tf.train.ClusterSpec(jobs)), 2)
    made._join, made.shards_on_workers = None, False
    made.groups = [Group([Peer(i, jobs["worker"][i]) for i in g]) for g in made.tasks.groups]
    for group in made.groups:
        group.enter()
    made.liveness, made.silent_seconds = Liveness(60.0), 60.0
    made._left_out, made.changes = set(), 0
    made.same, made.told, made.closed, made.mute = {0, 1, 2, 3}, [], [], set()

    def ask(device):
        index = int(device.split("task:")[1][0])
        if index not in made.same:
            raise REPLACED
        return "1.0"

    def change(job, joining, absent):
        made.told.append((set(joining), set(absent)))

    monkeypatch.setattr(cluster_spec, "remote_version", ask)
    monkeypatch.setattr(_tf_remote, "change_tasks", change)
    monkeypatch.setattr(probing, "not_answering", lambda a, seconds: made.mute.intersection(a))
    monkeypatch.setattr(probing, "reachable", lambda address, seconds: address not in made.mute)
    monkeypatch.setattr(probing, "not_reachable", lambda a, seconds: made.mute.intersection(a))
    monkeypatch.setattr(names, "close_connections", made.closed.append)
    made._check_version = lambda *arguments: None
    return made


def test_tasks_in_a_row_are_one_worker(pairs):
    assert [group.addresses for group in pairs.groups] == [("a:1", "b:1"), ("c:1", "d:1")]
    assert pairs.worker_name(1) == "worker 2 at c:1 and worker 3 at d:1"
    assert pairs.part_devices() == [
        [f"/job:worker/replica:0/task:{index}/device:CPU:0" for index in group]
        for group in [(0, 1), (2, 3)]
    ]


@pytest.mark.parametrize("ended", [2, 3])
def test_all_of_a_worker_joins_anew_if_one_of_it_ended(pairs, ended):
    """Its first task knows where the functions of the second were, and the other way round."""
    pairs.groups[1].leave_out()
    pairs.same = {0, 1, 2, 3} - {ended}
    pairs._add(pairs.groups[1])
    assert pairs.told == [(set(), {2, 3})]
    assert known(pairs) == {0, 1}
    assert pairs.groups[1].stays_away(time.monotonic())
    pairs._add(pairs.groups[1])
    assert pairs.told[1:] == [({2, 3}, set())]
    assert pairs.groups[1].is_member and known(pairs) == {0, 1, 2, 3}


def test_a_worker_all_of_whose_tasks_are_new_joins_at_once(pairs):
    pairs.groups[0].leave_out()
    pairs.same = {2, 3}
    pairs._add(pairs.groups[0])
    assert pairs.told == [({0, 1}, set())]


def test_a_worker_one_of_whose_tasks_was_replaced_unnoticed_joins_anew(pairs):
    """As another strategy is made."""
    pairs.same = {0, 1, 2}
    assert [pairs.was_replaced(m) for m in (0, 1)] == [False, True]
    pairs._add(pairs.groups[1])
    assert pairs.told == [(set(), {2, 3})]


def test_a_worker_is_there_if_all_of_it_is(pairs):
    pairs.mute = {"d:1"}
    assert [pairs.worker_listens(m) for m in (0, 1)] == [True, False]
    assert pairs.present() == [True, False]


def test_who_waits_for_a_silent_task_is_told_by_closed_connections(pairs):
    """The call is to the worker's first task, which answers all the time."""
    pairs.mute = {"b:1", "p:1"}
    assert pairs.silence(pairs.addresses()) == {"b:1", "p:1"}
    assert set(pairs.closed) == {"a:1", "b:1", "p:1"}
    assert [pairs.worker_is_silent(m) for m in (0, 1)] == [True, False]
    with pytest.raises(tf.errors.UnavailableError, match="does not answer"):
        pairs.call(0, lambda: None)
    assert pairs.call(1, lambda: 3) == 3


def test_device_filters_open_the_edges_within_a_worker_and_no_others(pairs):
    filters = opening._filters(pairs.tasks)._device_filters
    chief, ps = f"/job:{opening.CHIEF}", "/job:ps"
    tasks = [opening.place("worker", index) for index in range(4)]
    partners = {0: 1, 1: 0, 2: 3, 3: 2}
    assert filters["worker"] == {i: [ps, chief, tasks[p]] for i, p in partners.items()}
    assert filters["ps"] == {0: ["/job:worker", chief]}


def test_shards_that_refuse_or_count_as_silent_have_ended(connection, monkeypatch):
    """Those that are only out of reach have not."""
    shards = [connection.tasks.jobs[job][index] for job, index in connection.tasks.of_shards]
    refusing = set()
    monkeypatch.setattr(probing, "not_reachable", lambda addresses, seconds: set(addresses))
    monkeypatch.setattr(probing, "refusing", lambda a, seconds: refusing.intersection(a))
    assert connection.ended_shards() == [] and len(connection.silent_shards()) == len(shards) > 0
    refusing.add(shards[0])
    assert connection.ended_shards() == [connection.name_at(shards[0])]
    refusing.clear()
    connection.liveness.condemn({shards[0]})
    assert connection.ended_shards() == [connection.name_at(shards[0])]
