"""How the chief adds workers that come, without TensorFlow."""

import threading

import pytest
import tensorflow as tf

from tf_dsgd import probing, tasks
from tf_dsgd.connection import Connection


@pytest.fixture
def connection(monkeypatch):
    """One whose workers answer, and whose adding waits for the test."""
    made = Connection.__new__(Connection)
    made.tasks = tasks.from_cluster_spec(
        tf.train.ClusterSpec({"worker": ["a:1", "b:1"], "ps": ["c:1"]})
    )
    made.workers, made._known, made._join = [0, 1], {0, 1}, None
    made.added, made.go_on, made.error = [], threading.Event(), None

    def add(worker):
        assert made.go_on.wait(30.0)
        made.added.append(worker)
        if made.error is not None:
            raise made.error

    made._add = add
    made.answering = True
    monkeypatch.setattr(probing, "answers", lambda address, seconds: made.answering)
    return made


def test_a_worker_that_stops_while_it_is_added_holds_nobody(connection):
    assert not connection.join(1, 0.01)
    assert not connection.join(0, 0.01)  # one at a time
    connection.go_on.set()
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
