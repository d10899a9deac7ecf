"""A shard that applies messages side by side: what it counts, also of one whose sender is lost."""

import threading

import numpy as np
import pytest
import tensorflow as tf

from tf_dsgd import _tf
from tf_dsgd.algorithms.hogwild import AddInPlace
from tf_dsgd.engine.ledger import TORN
from tf_dsgd.engine.shard import Shard

HEADER = tf.TensorSpec([5], tf.int64)
"""(worker, incarnation, sequence, version, steps)."""


class Held:
    """An application of a message that goes on when it is told."""

    def __init__(self, shard, raises=False):
        self.begun, self.goes_on, self.answers = threading.Event(), threading.Event(), []
        self._raises = raises

        def wait():
            self.begun.set()
            assert self.goes_on.wait(30)
            if self._raises:
                raise ValueError("it ends in the middle")
            return True

        self._receive = tf.function(
            lambda header: shard.receive(
                [header], list, lambda content, tau: tf.py_function(wait, [], tf.bool)
            ),
            input_signature=[HEADER],
            autograph=False,
        ).get_concrete_function()

    def _send(self, header):
        try:
            self.answers.append(bool(self._receive(tf.constant(header, tf.int64))))
        except tf.errors.OpError as error:
            self.answers.append(type(error))

    def sends(self, header):
        thread = threading.Thread(target=self._send, args=(header,))
        thread.start()
        assert self.begun.wait(30)
        return thread


def made():
    count = _tf.make_variable(tf.zeros([], tf.int64), device=None)
    return Shard(0, 2, None, count, rule=AddInPlace())


@pytest.fixture
def shard():
    return made()


def fenced(shard, worker, incarnation):
    return int(shard.fence(tf.constant(worker, tf.int64), tf.constant(incarnation, tf.int64)))


def counts(shard, sent):
    ledger = shard.ledger(sent)
    return [(w.steps, w.applied, w.torn, w.refused, w.in_flight) for w in ledger.workers]


def test_what_is_being_applied_is_in_flight(shard):
    held = Held(shard)
    thread = held.sends([1, 0, 1, 0, 1])
    assert counts(shard, [0, 1])[1] == (1, 0, 0, 0, 1)
    held.goes_on.set()
    thread.join(30)
    assert held.answers == [True]
    assert counts(shard, [0, 1]) == [(0,) * 5, (1, 1, 0, 0, 0)]
    assert int(shard.version.numpy()) == int(shard.schedule_step.numpy()) == 1


def test_the_message_of_a_lost_worker_is_torn_until_it_is_counted(shard):
    held = Held(shard)
    thread = held.sends([1, 0, 1, 0, 1])
    assert fenced(shard, 1, 1) == 1  # a shard has it: nobody else does its mini-batch
    assert counts(shard, [0, 1])[1] == (1, 0, 1, 0, 0)
    held.goes_on.set()
    thread.join(30)
    assert counts(shard, [0, 1])[1] == (1, 1, 0, 0, 0)


def test_what_ends_in_the_middle_stays_torn_and_others_go_on(shard):
    held = Held(shard, raises=True)
    thread = held.sends([1, 0, 1, 0, 1])
    held.goes_on.set()
    thread.join(30)
    assert held.answers == [tf.errors.InvalidArgumentError]
    assert fenced(shard, 1, 1) == 1 and fenced(shard, 1, 2) == 1
    assert counts(shard, [0, 1])[1] == (1, 0, 1, 0, 0)
    for header, applied in (([1, 0, 1, 0, 1], False), ([1, 2, 2, 0, 1], True)):
        again = Held(shard)
        again.goes_on.set()
        again._send(header)
        assert again.answers == [applied]
    assert counts(shard, [0, 2])[1] == (2, 1, 1, 1, 0)
    assert shard.books().numbered.tolist() == [0, 2]


def test_counts_are_saved_and_those_of_earlier_versions_read(shard):
    held = Held(shard, raises=True)
    held.goes_on.set()
    held._send([0, 0, 1, 0, 1])
    fenced(shard, 0, 1)
    other = Shard(
        0, 2, None, _tf.make_variable(tf.zeros([], tf.int64), device=None), rule=AddInPlace()
    )
    state = shard.state()
    other.restore(state, [1, 0])
    assert counts(other, None) == counts(shard, None) == [(1, 0, 1, 0, 0), (0,) * 5]
    state["books"] = state["books"][:, : TORN - 1]
    other.restore(state, [1, 0])
    assert counts(other, None)[0] == (1, 0, 0, 0, 0)
    assert fenced(other, 0, 2) == 1 and counts(other, None)[0] == (1, 0, 0, 0, 0)
    assert np.array_equal(other.state()["books"][:, : TORN - 1][1], np.zeros(TORN - 1))
