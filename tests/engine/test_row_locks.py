"""Locks of rows: who shares a row is never within together, who does not may be, nobody waits."""

import contextlib
import threading

import numpy as np
import pytest
import tensorflow as tf

from tf_dsgd.engine.row_locks import RowLocks


def meeting_under(locks, seconds):
    """A function of (rows of table 0, of table 1) whose two callers meet within, if they can."""
    met, meeting = [], threading.Barrier(2)

    def meet():
        with contextlib.suppress(threading.BrokenBarrierError):
            meeting.wait(seconds)
            met.append(True)
        return np.int32(0)

    @tf.function(input_signature=[tf.TensorSpec([None], tf.int64)] * 2, autograph=False)
    def call(first, second):
        return locks.held({0: first, 1: second}, lambda: tf.py_function(meet, [], tf.int32))

    return call, met


def in_threads(*calls):
    threads = [threading.Thread(target=call) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)


def rows(*numbers):
    return tf.constant(numbers, tf.int64, shape=[len(numbers)])


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (([3, 5], []), ([5, 9], [])),
        (([], [3]), ([], [3])),
        (([7], []), ([7 + 1024], [])),  # another row of the same lock
    ],
    ids=["a_row", "of_the_second_table", "a_lock"],
)
def test_who_shares_a_lock_is_not_within_together(one, other):
    call, met = meeting_under(RowLocks(None), 0.5)
    first, second = ([rows(*r) for r in side] for side in (one, other))
    in_threads(lambda: call(*first), lambda: call(*second))
    assert not met


@pytest.mark.parametrize(
    ("one", "other"),
    [(([3, 5], []), ([6, 9], [])), (([3], []), ([], [3]))],
    ids=["other_rows", "of_another_table"],
)
def test_who_shares_no_lock_may_be_within_together(one, other):
    call, met = meeting_under(RowLocks(None), 30)
    first, second = ([rows(*r) for r in side] for side in (one, other))
    in_threads(lambda: call(*first), lambda: call(*second))
    assert len(met) == 2


def test_rows_in_any_order_are_locked_without_waiting_for_each_other():
    """What is read, and written after, would lose additions without locks."""
    locks = RowLocks(None)
    table = tf.Variable(tf.zeros([8]))
    square = tf.random.stateless_normal([64, 64], [0, 0])

    @tf.function(input_signature=[tf.TensorSpec([None], tf.int64)], autograph=False)
    def add(named):
        def once(i):
            def body():
                read = table.sparse_read(named)
                with tf.control_dependencies([read]):
                    longer = tf.reduce_sum(tf.matmul(square, square))
                grown = read + 1.0 + 0.0 * longer
                table.scatter_update(tf.IndexedSlices(grown, named))

            locks.held({0: named}, body)
            return i + 1

        return tf.while_loop(lambda i: i < 200, once, [0], parallel_iterations=1)

    orders = [(0, 1, 2, 3), (3, 2, 1, 0), (2, 3), (3, 0)]
    in_threads(*(lambda r=r: add(rows(*r)) for r in orders))
    kept = [sum(200 for order in orders if row in order) for row in range(8)]
    np.testing.assert_array_equal(table.numpy(), kept)


def test_an_error_within_gives_the_locks_back():
    locks = RowLocks(None)

    @tf.function(
        input_signature=[tf.TensorSpec([None], tf.int64), tf.TensorSpec([], tf.bool)],
        autograph=False,
    )
    def call(named, fails):
        def body():
            check = tf.debugging.Assert(tf.logical_not(fails), ["it fails within"])
            with tf.control_dependencies([check]):
                return tf.constant(1)

        return locks.held({0: named}, body)

    with pytest.raises(tf.errors.InvalidArgumentError, match="it fails within"):
        call(rows(1, 2), True)
    found = []
    in_threads(lambda: found.append(int(call(rows(1, 2), False))))
    assert found == [1]
