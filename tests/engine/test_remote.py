"""How many mini-batches a call brings to a worker process; see also tests/cluster/on_cluster."""

import numpy as np
import pytest
import tensorflow as tf

import tf_dsgd
from tf_dsgd import console
from tf_dsgd.engine import remote


def test_a_call_stays_below_two_gigabytes():
    """All inputs are one message, of less than 2**31 bytes."""
    assert remote.longest_call(0) == remote.longest_call(1 << 20) == remote.LONGEST_CALL
    for size in (100_000_000, 700_000_000, 1_999_999_999, 2_000_000_000):
        count = remote.longest_call(size)
        assert count >= 1 and count * size < 1 << 31 and (count + 1) * size > 2_000_000_000
    refused = r"2\.5 GB cannot be sent.*Received: 2,500,000,000 bytes"
    with pytest.raises(ValueError, match=refused) as caught:
        remote.longest_call(2_500_000_000)
    assert caught.value.__notes__ == [console.NOTHING_TRAINED]  # a script ends in a line


def test_the_bytes_of_a_mini_batch():
    """Of strings their letters, of ragged and sparse tensors all parts, of None nothing."""
    strategy = tf_dsgd.DownpourStrategy(tf_dsgd.LocalCluster(1))
    words = np.array([b"a", b"bcd", b"\xc3\xa9"])
    ragged = tf.ragged.constant([[1, 2, 3], [], [4]])
    sparse = tf.sparse.from_dense(tf.constant([[0, 5], [0, 0], [6, 0]], tf.int16))
    element = {"x": np.ones((3, 2), np.float32), "words": words, "ragged": ragged}
    dataset = tf.data.Dataset.from_tensors((element, sparse, None))
    stream = iter(strategy.experimental_distribute_dataset(dataset)).stream
    stream.take()
    stream.make_ready()
    dense, letters = 3 * 2 * 4, 1 + 3 + 2
    rows = 4 * 4 + 4 * 8  # values, and where rows begin
    coordinates = 2 * (2 + 2 * 8) + 2 * 8  # values with their places, and the shape
    assert stream.batch_bytes == dense + letters + rows + coordinates
