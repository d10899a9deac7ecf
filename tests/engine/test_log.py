"""The log from which peers read, by hand: who has read what, and what is still there."""

import numpy as np
import pytest
import tensorflow as tf

from tf_dsgd.engine.log import Log, Messages


class Bench:
    """A log of messages of one number of any length, and how many it has."""

    def __init__(self, workers):
        self.log = Log(workers, "/CPU:0")
        spec = [tf.TensorSpec([None], tf.float32), tf.TensorSpec([], tf.int64)]
        self.messages = Messages(spec, "/CPU:0")
        self.versions = 0

    def append(self):
        self.versions += 1
        version = tf.constant(self.versions, tf.int64)
        tensors = [tf.fill([self.versions], float(self.versions)), version]

        @tf.function(autograph=False)
        def append():
            self.log.append(self.messages, version, tensors)

        append()

    def reads(self, worker, after):
        self.log.reads(tf.constant(worker, tf.int64), tf.constant(after, tf.int64))

    @property
    def there(self):
        (first, last) = int(self.log.first.numpy()), self.versions
        table = self.messages._table
        assert int(tf.raw_ops.MapSize(**table)) == last - first + 1
        return list(range(first, last + 1))


def test_a_message_is_there_until_all_have_read_it():
    bench = Bench(2)
    for _ in range(3):
        bench.append()
    assert bench.there == [1, 2, 3]
    bench.reads(0, 3)
    bench.append()
    assert bench.there == [1, 2, 3, 4]  # for worker 1
    for number in bench.there:
        values, version = bench.messages.get(tf.constant(number, tf.int64))
        np.testing.assert_array_equal(values, np.full(number, number, "float32"))
        assert int(version) == number
    bench.reads(1, 2)
    bench.append()
    assert bench.there == [3, 4, 5]


def test_nothing_is_kept_for_a_worker_that_is_away():
    bench = Bench(2)
    bench.append()
    bench.append()
    bench.log.leaves(tf.constant(1, tf.int64))
    bench.reads(0, 2)
    bench.append()
    assert bench.there == [3]
    bench.log.shown.assign(3)
    bench.log.joins(1)  # with the model of version 3
    bench.append()
    bench.reads(0, 4)
    bench.append()
    assert bench.there == [4, 5]
    bench.reads(1, 3)
    bench.append()
    assert bench.there == [4, 5, 6]


def test_all_away_is_nothing_to_keep():
    bench = Bench(1)
    bench.log.leaves(tf.constant(0, tf.int64))
    bench.append()
    bench.append()
    assert bench.there == [2]  # the last one stays


def test_a_worker_that_asks_for_what_is_gone_is_told():
    """It would wait without end otherwise."""
    bench = Bench(1)
    for _ in range(3):
        bench.append()
    bench.reads(0, 3)
    bench.append()
    with pytest.raises(tf.errors.InvalidArgumentError, match="removed from the log before"):
        bench.reads(0, 1)


def test_at_rest_the_log_is_empty_and_all_begin_anew():
    bench = Bench(2)
    for _ in range(3):
        bench.append()
    bench.log.leaves(tf.constant(1, tf.int64))
    bench.log.begin_anew(bench.messages, tf.constant(3, tf.int64))
    assert bench.there == []
    assert bench.log.read_by.numpy().tolist() == [3, np.iinfo(np.int64).max]
    assert int(bench.log.edition) == 1


@pytest.mark.parametrize("version", [2, 7])
def test_restored_to_an_earlier_and_to_a_later_version(version):
    bench = Bench(2)
    for _ in range(3):
        bench.append()
    bench.log.begin_anew(bench.messages, tf.constant(3, tf.int64))
    bench.log.restore(version)
    bench.versions = version
    assert int(bench.log.shown) == version
    bench.append()
    bench.append()
    assert bench.there == [version + 1, version + 2]
    bench.reads(0, version + 2)
    bench.reads(1, version + 1)
    bench.append()
    assert bench.there == [version + 2, version + 3]


def test_messages_nobody_will_read_are_given_back():
    bench = Bench(1)
    bench.append()
    table = bench.messages._table
    assert int(tf.raw_ops.MapSize(**table)) == 1
    del bench
    assert int(tf.raw_ops.MapSize(**table)) == 0


def test_a_message_that_is_taken_is_there_no_more():
    bench = Bench(1)
    bench.append()
    values, _ = bench.messages.take(tf.constant(1, tf.int64))
    np.testing.assert_array_equal(values, np.ones([1], "float32"))
    assert int(tf.raw_ops.MapSize(**bench.messages._table)) == 0


def test_a_table_without_a_device_is_where_it_is_named():
    spec = [tf.TensorSpec([], tf.int64)]
    messages, key = Messages(spec, None), tf.constant(1, tf.int64)
    messages.put(key, [key], "/CPU:0")
    (found,) = messages.get(key, "/CPU:0")
    assert int(found) == 1
    messages.clear()
