"""What becomes of a lost worker's mini-batches, by the numbers that its shards know."""

import threading

import pytest
import tensorflow as tf

from tf_dsgd import _tf
from tf_dsgd.algorithms.downpour import Periods
from tf_dsgd.engine.base import WorkerState
from tf_dsgd.engine.cluster import ClusterEngine
from tf_dsgd.engine.late import LateWork
from tf_dsgd.engine.unapplied import CutOff, Unapplied


def books(*, kept):
    """Worker 1 has sent two messages; "a" is of the third, "b" is behind it."""
    unapplied = Unapplied(3)
    for _ in range(2):
        unapplied.held[1].append("done")
        assert unapplied.acknowledge(1) is None
    unapplied.held[1].append("a")
    if kept:
        unapplied.keep(1, "message", steps=1)
        unapplied.held[1].append("b")
    return unapplied


@pytest.mark.parametrize(
    ("kept", "last", "again", "cut_off"),
    [
        (False, [2, 2], ["a"], None),
        (False, [3, 3], [], None),
        (False, [2, 3], [], CutOff(1, 3, ["a"])),
        (True, [2, 2], ["a", "b"], None),
        (True, [3, 3], ["b"], None),
        (True, [3, 2], ["b"], CutOff(1, 3, ["a"])),
    ],
)
def test_a_lost_worker(kept, last, again, cut_off):
    unapplied = books(kept=kept)
    assert unapplied.lose(1, last) == (again, cut_off)
    assert unapplied.applied == [0, max(last), 0]  # where its next incarnation goes on
    assert unapplied.held[1] == [] and unapplied.kept[1] is None


def test_a_kept_message_is_acknowledged_before_what_follows():
    unapplied = books(kept=True)
    assert unapplied.acknowledge(1).held == ["a"]
    assert unapplied.held[1] == ["b"] and unapplied.applied[1] == 3
    assert unapplied.acknowledge(1) is None
    assert unapplied.held[1] == [] and unapplied.applied[1] == 4


def test_after_an_error_nothing_is_given_to_others():
    unapplied = books(kept=True)
    (kept,) = [k for k in unapplied.clear() if k is not None]
    assert (kept.message, kept.steps) == ("message", 1)
    assert unapplied.lose(1, [2]) == ([], None)


def test_a_worker_waits_until_its_cut_off_message_is_completed():
    """Its next number would make the shard that lacks that message refuse it."""
    engine = ClusterEngine.__new__(ClusterEngine)
    engine._stream, engine._completing, engine._cut_off = None, {}, [CutOff(1, 3, ["a"])]
    engine._lateness = LateWork(3, None)
    workers = [WorkerState(m) for m in range(3)]
    assert [engine._limit(w) > 0 for w in workers] == [True, False, True]
    engine._completing[2] = engine._cut_off.pop()
    assert [engine._limit(w) > 0 for w in workers] == [True, False, True]
    del engine._completing[2]
    assert all(engine._limit(w) > 0 for w in workers)


def test_who_may_complete_a_message():
    """Any worker for a lost one; from the moment it is let in again only it itself."""
    engine = ClusterEngine.__new__(ClusterEngine)
    engine._changed = engine._idle = threading.Condition()
    engine._may_begin = lambda worker: True
    engine._lost, engine._completing = {1: 0.0}, {}
    engine._joining = None
    engine._cut_off = [CutOff(1, 3, ["a"])]
    workers = [WorkerState(m) for m in range(3)]
    may = [engine._next_cut_off(w) is not None for w in workers]
    assert may == [True, True, True]
    assert engine._admits(1)
    may = [engine._next_cut_off(w) is not None for w in workers]
    assert may == [False, True, False]
    engine._completing[0] = engine._cut_off[0]
    assert not engine._admits(1)


@pytest.mark.parametrize("left", [True, False])
def test_workers_that_are_lost_while_the_engine_is_made(left, monkeypatch):
    """The first variable cannot be created there."""

    class Connection:
        shards_on_workers = False

        def __init__(self):
            self.reasons = []

        def present(self):
            return [left, True]

        def worker_devices(self):
            return ["CPU:0", "CPU:0"]

        def shard_devices(self):
            return ["CPU:0"]

        def addresses(self):
            return []

        def silent_shards(self):
            return []

        def worker_listens(self, m):
            return False

        def call(self, m, action):
            return action()

    calls = []

    def make(*args, **kwargs):
        calls.append(args)
        if len(calls) == (2 if left else 1):
            raise tf.errors.UnavailableError(None, None, "connection refused")
        return made(*args, **kwargs)

    made = _tf.make_variable
    monkeypatch.setattr(_tf, "make_variable", make)
    if not left:
        with pytest.raises(RuntimeError, match="All workers were lost while the strategy was made"):
            ClusterEngine(Connection(), Periods(), 5.0, None)
        return
    engine = ClusterEngine(Connection(), Periods(), 5.0, None)
    assert engine.store.present == [True, False]
    assert list(engine._lost) == [1]
