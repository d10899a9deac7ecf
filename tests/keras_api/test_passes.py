"""Passes over one dataset: where their batches are meanwhile."""

import numpy as np
import pytest
import tensorflow as tf

import tf_dsgd
from tf_dsgd.strategies.kept import Kept
from tf_dsgd.strategies.stream import Queues


@pytest.fixture
def data():
    strategy = tf_dsgd.DownpourStrategy(tf_dsgd.LocalCluster(1))
    numbers = tf.data.Dataset.from_tensor_slices(np.arange(6.0, dtype="float32")).batch(2)
    return strategy.experimental_distribute_dataset(numbers)


def taken(token):
    return token.batch().numpy().tolist()


def test_a_pass_takes_the_queues_of_one_that_is_over(data):
    """TensorFlow keeps some 50 KB of each queue that was ever made."""
    places = set()
    for _ in range(20):
        iterator = iter(data)
        places.add(id(iterator.stream._queues))
        assert [taken(token) for token in iterator] == [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]]
        del iterator
    assert len(places) == 1
    assert len(data._queues) == 1


def test_passes_at_the_same_time_have_queues_of_their_own(data):
    first, second = iter(data), iter(data)
    read = [taken(next(each)) for each in (first, second, second, first, first, second)]
    assert read[0] == read[1] == [0.0, 1.0]
    assert read[2] == read[3] == [2.0, 3.0]
    assert read[4] == read[5] == [4.0, 5.0]
    del first, second
    third = iter(data)
    assert taken(next(third)) == [0.0, 1.0]
    assert len(data._queues) == 2


def test_after_ctrl_c_while_batches_were_read_nothing_is_taken_over(data):
    """What they were noted by would be waited for, by a pass that keeps its batches, for ever."""
    stream = data.stream()
    stream.keep(Kept())
    pull = stream._pull

    def interrupted(*arguments):
        pull(*arguments)
        raise KeyboardInterrupt

    stream._pull = interrupted
    with pytest.raises(KeyboardInterrupt):
        stream.take(at_once=True)
    queues = stream._queues
    assert not int(queues.batches.size())
    del stream
    again = data.stream()
    assert again._queues is not queues
    again.keep(Kept())
    assert again.take(at_once=True)


def test_a_pass_that_ends_while_others_are_looked_at_gives_nothing(data, monkeypatch):
    """Its end is not seen at once: another thread may let go of it at any moment."""
    passes = [data.stream(), data.stream()]
    left, over = passes
    assert left.take(at_once=True) and not left.at_end()
    del left, over
    passes.pop()  # the second is over, and empty
    seen = Queues.are_empty

    def slowly(queues):
        passes.clear()  # now the first is over, too
        return seen(queues)

    monkeypatch.setattr(Queues, "are_empty", slowly)
    taken_over = data.stream()
    assert seen(taken_over._queues)


def test_in_a_function_it_is_said_that_one_loops_outside(data):
    data.stream()  # a pass that is over

    @tf.function
    def loop():
        for batch in data:
            tf.print(batch)

    with pytest.raises(RuntimeError, match="Loop outside"):
        loop()


def test_what_a_pass_left_behind_is_in_no_other(data):
    for _ in range(3):
        left = data.stream()
        assert left.take(at_once=True)
        assert not left.at_end()  # another one is there
        assert not left._queues.are_empty()
        del left
        assert [taken(token) for token in iter(data)] == [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]]
    assert len(data._queues) <= 2
