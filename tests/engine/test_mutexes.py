"""Locks end with their owner, and the threads that TensorFlow gives them."""

import gc
import os

import tensorflow as tf

from tf_dsgd.engine.mutexes import mutexes

NUMBER = 200


class Owner:
    pass


def threads():
    return len(os.listdir("/proc/self/task"))


def taken_and_given(handles):
    for handle in handles:
        lock = tf.raw_ops.MutexLock(mutex=handle)
        tf.raw_ops.ConsumeMutexLock(mutex_lock=lock)


def test_threads_of_locks_end_with_their_owner():
    owner = Owner()
    before = threads()
    taken_and_given(mutexes(owner, NUMBER, None))
    assert threads() >= before + NUMBER - 20  # others may have ended
    del owner
    gc.collect()
    assert threads() < before + 20
