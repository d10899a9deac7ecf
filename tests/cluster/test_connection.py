"""How the chief adds workers that come, without TensorFlow."""

import os
import threading

import pytest
import tensorflow as tf

from tf_dsgd import channels, probing, tasks
from tf_dsgd.connection import Connection


@pytest.fixture
def connection(monkeypatch):
    """One whose workers answer, and whose adding waits for the test."""
    made = Connection.__new__(Connection)
    made.tasks = tasks.from_cluster_spec(
        tf.train.ClusterSpec({"worker": ["a:1", "b:1"], "ps": ["c:1"]})
    )
    made.workers, made._known, made._join, made._left = [0, 1], {0, 1}, None, {}
    made.shards_on_workers = False
    made.added, made.go_on, made.error = [], threading.Event(), None

    def add(worker):
        assert made.go_on.wait(30.0)
        made.added.append(worker)
        if made.error is not None:
            raise made.error
        made._known.add(worker)

    made._add = add
    made.answering = True
    monkeypatch.setattr(probing, "answers", lambda address, seconds: made.answering)
    return made


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


def test_one_that_does_not_answer_is_not_added(connection):
    connection.answering = False
    assert not connection.join(1, 30.0)
    assert connection.added == []


def test_one_that_is_gone_again_as_a_strategy_is_made_is_not_there(connection, monkeypatch):
    monkeypatch.setattr(probing, "reachable", lambda address, seconds: True)
    monkeypatch.setattr(tasks, "remote_version", lambda device: "1.0")
    connection._known, connection._estranged, connection.mute = {0}, set(), set()
    connection.error = tf.errors.UnavailableError(None, None, "gone")
    connection.go_on.set()
    assert connection.present() == [True, False]
    connection.error = None
    assert connection.present() == [True, True]


def test_pings_of_channels(monkeypatch):
    """A quarter of the timeout until one is sent; gRPC's numbers are 32 bits long."""
    monkeypatch.setenv("TF_GRPC_DEFAULT_OPTIONS", "")  # as it was, when this test has ended
    monkeypatch.delenv("TF_GRPC_DEFAULT_OPTIONS")
    channels.configure(8.0)
    told = dict(option.split("=") for option in os.environ["TF_GRPC_DEFAULT_OPTIONS"].split(","))
    assert told == {
        "grpc.keepalive_time_ms": "2000",
        "grpc.keepalive_timeout_ms": "8000",
        "grpc.http2.ping_timeout_ms": "8000",
        "grpc.min_reconnect_backoff_ms": "2000",
        "grpc.max_reconnect_backoff_ms": "2000",
        "grpc.http2.max_pings_without_data": "1",
    }
    channels.configure(1.0)  # TensorFlow reads it once
    assert "grpc.keepalive_time_ms=2000," in os.environ["TF_GRPC_DEFAULT_OPTIONS"]
    monkeypatch.delenv("TF_GRPC_DEFAULT_OPTIONS")
    channels.configure(9e8)
    for option in os.environ["TF_GRPC_DEFAULT_OPTIONS"].split(","):
        assert 1 <= int(option.split("=")[1]) < 2**31


@pytest.mark.parametrize(
    ("error", "same"),
    [
        (None, True),
        (tf.errors.NotFoundError(None, None, "'ask' is no function registered"), True),
        (tf.errors.AbortedError(None, None, "Cleanup 12"), True),
        (tf.errors.UnavailableError(None, None, "Connection refused"), False),
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
    monkeypatch.setattr(tasks, "remote_version", ask)
    monkeypatch.setattr(probing, "not_answering", lambda addresses, seconds: set())
    connection._estranged = set()
    connection._change = lambda joining, absent: told.append((set(joining), absent))
    connection._check_version = lambda *arguments: None
    connection.estrange(1)
    Connection._add(connection, 1)
    assert told == ([(set(), {1})] if same else [({1}, set())])
    assert connection._known == ({0} if same else {0, 1})
    if same:
        assert not connection.join(1, 0.01)  # it stays away for a moment
        assert connection.added == []
        Connection._add(connection, 1)
    assert told[-1] == ({1}, set())
    assert (connection._known, connection._estranged) == ({0, 1}, set())
