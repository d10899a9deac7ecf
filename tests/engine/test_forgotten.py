"""What workers have of variables that are no more: freed once, and not while a function uses it."""

import functools
import gc
import weakref

import numpy as np
import tensorflow as tf

from tf_dsgd.engine.state import Store, traced


def kept(store):
    return {replicated.owner for replicated in store.replicas} - {None}


def made(store, owner, value=1.0):
    return store.replicate(
        lambda m: np.float32(value + m), dtype=tf.float32, name=owner, owner=owner
    )


def test_copies_and_cells_of_what_is_gone_are_freed():
    store = Store(["CPU:0", "CPU:0"])
    first, second = made(store, "a_1"), made(store, "b_2")
    copy = functools.partial(store.copy_of, dtype=tf.float32, name="times")
    cell = store.cell(("times", "a_1"), functools.partial(copy, first))
    other = store.cell(("times", "b_2"), functools.partial(copy, second))
    alive = [weakref.ref(each) for each in (first, first.of(1), cell, other, second)]
    before = len(store.replicas)
    store.forget(["a_1"])
    del first, cell
    gc.collect()
    assert [each() is None for each in alive] == [True, True, True, False, False]
    assert len(store.replicas) == before - 2 and kept(store) == {"b_2"}
    assert store.cell(("times", "b_2"), None) is other


def test_a_worker_that_comes_back_has_what_is_left():
    store = Store(["CPU:0", "CPU:0"])
    made(store, "a_1")
    left = made(store, "b_2", 5.0)
    store.lose(1)
    store.forget(["a_1"])
    store.renew(1, 0)
    assert kept(store) == {"b_2"} and left.read() == {0: 5.0, 1: 6.0}


def test_what_a_function_uses_is_there_until_nobody_has_the_function():
    """Or a worker that comes back would have it run on another one's variables."""
    store = Store(["CPU:0", "CPU:0"])
    value = made(store, "a_1")
    functions = store.bind(traced(lambda: value.template.assign_add(1.0)))
    assert store.forget(["a_1"])
    assert kept(store) == {"a_1"}
    store.lose(1)
    store.renew(1, 0)
    functions[1]()
    assert value.read() == {0: 1.0, 1: 3.0}
    del functions
    gc.collect()
    assert not store.forget([])
    assert kept(store) == set()
