"""Metrics that are the chief's at rest and on shards while workers work: here in one process."""

import numpy as np
import pytest
import tensorflow as tf

from tf_dsgd.engine.lent import Lent

pytestmark = pytest.mark.fast
CPU = "/device:CPU:0"


class Metric:
    """A variable of the chief's, and that of its shard."""

    def __init__(self, first, shard=0):
        self.shard = shard
        self.primary = tf.Variable(first)
        self.there = tf.Variable(tf.zeros_like(self.primary))
        self.known_there = None

    def on_shard(self, shard):
        assert shard == self.shard
        return self.there

    @property
    def both(self):
        return self.primary.numpy().tolist(), self.there.numpy().tolist()


def noted(lent):
    """Calls to shards, in turn."""
    calls = []
    for name in ("_send", "_bring"):
        call = getattr(lent, name)
        lent.__dict__[name] = lambda name=name, call=call: (calls.append(name), call())[1]
    return calls


def test_shards_get_what_the_chief_has_and_the_chief_what_they_made_of_it():
    metrics = [Metric(1.5), Metric(np.array([2, 3], "int64"), 1), Metric(np.float64(4)), Metric(5)]
    lent = Lent(metrics, [CPU, CPU])
    lent.lend()
    assert [metric.both for metric in metrics] == [(m, m) for m in (1.5, [2, 3], 4.0, 5)]
    for metric in metrics:
        metric.there.assign_add(tf.ones_like(metric.there))
    assert metrics[0].both == (1.5, 2.5)  # until all is at rest
    lent.take_back()
    assert [metric.both for metric in metrics] == [(m, m) for m in (2.5, [3, 4], 5.0, 6)]


def test_nothing_is_sent_that_shards_have_and_each_way_is_one_call():
    metrics = [Metric(0.0), Metric(1.0)]
    lent = Lent(metrics, [CPU])
    calls = noted(lent)
    lent.take_back()
    assert calls == []  # none was lent
    for _ in range(3):  # mini-batches of one run
        lent.lend()
    assert calls == ["_send"]
    metrics[0].there.assign(7.0)
    for _ in range(3):  # readings of one drain
        lent.take_back()
    assert calls == ["_send", "_bring"]
    lent.lend()
    assert calls == ["_send", "_bring"]  # shards have it
    lent.take_back()
    metrics[1].primary.assign(2.0)  # by anyone, such as a function of the user's
    lent.lend()
    assert calls == ["_send", "_bring", "_bring", "_send"]
    assert [metric.both for metric in metrics] == [(7.0, 7.0), (2.0, 2.0)]


def test_what_the_chief_adds_while_they_are_lent_is_added():
    metric, other = Metric(10.0), Metric("none")
    lent = Lent([metric, other], [CPU])
    lent.lend()
    metric.there.assign_add(0.1)
    metric.primary.assign_add(5.0)
    other.there.assign("of a worker")
    lent.take_back()
    assert metric.primary.numpy() == pytest.approx(15.1)
    assert metric.there.numpy() == np.float32(10.1)
    assert other.primary.numpy() == b"of a worker"
    lent.lend()
    assert metric.both[0] == metric.both[1]
    other.primary.assign("of the chief")
    other.there.assign("of another worker")
    lent.take_back()
    assert other.primary.numpy() == b"of the chief"


def test_of_two_programs_each_knows_what_the_other_left_on_shards():
    metric = Metric(1.0)
    first, second = Lent([metric], [CPU]), Lent([metric], [CPU])
    first.lend()
    first.take_back()
    second.lend()
    metric.there.assign(5.0)
    second.take_back()
    metric.primary.assign(1.0)  # as the first one has left it
    first.lend()
    assert metric.both == (1.0, 1.0)


def test_nan_is_no_change():
    metric = Metric(np.array([np.nan, 1.0], "float32"))
    lent = Lent([metric], [CPU])
    calls = noted(lent)
    lent.lend()
    metric.there.assign([0.0, 2.0])  # as after a reset on a shard
    lent.take_back()
    assert metric.primary.numpy().tolist() == [0.0, 2.0]
    metric.there.assign([np.nan, 2.0])
    metric.primary.assign([np.nan, 2.0])
    lent.lend()
    lent.take_back()
    lent.lend()
    assert calls.count("_send") == 2  # the first, and that of the assignment


def test_a_call_that_was_broken_off_is_made_again():
    """Ctrl-C in the middle: what was reset is not overwritten by what shards had before."""
    metric = Metric(1.0)
    lent = Lent([metric], [CPU])
    lent.lend()
    lent.take_back()
    metric.primary.assign(0.0)
    send = lent._send

    def broken_off():
        raise KeyboardInterrupt

    lent.__dict__["_send"] = broken_off
    with pytest.raises(KeyboardInterrupt):
        lent.lend()
    lent.take_back()
    assert metric.both == (0.0, 1.0)
    lent.__dict__["_send"] = send
    lent.lend()
    assert metric.both == (0.0, 0.0)
    bring, lent.__dict__["_bring"] = lent._bring, broken_off
    metric.there.assign(3.0)
    with pytest.raises(KeyboardInterrupt):
        lent.take_back()
    lent.__dict__["_bring"] = bring
    lent.take_back()
    assert metric.both == (3.0, 3.0)
