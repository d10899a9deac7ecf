"""Bytes take time on a simulated network: rounds by hand."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_dsgd
from tests import helpers
from tf_dsgd import compression
from tf_dsgd.algorithm import Codec
from tf_dsgd.simulation import study

HEADER, FETCH_SECONDS, RATE = 5 * 8, 0.25, 100.0


class Nothing(Codec):
    """A message of no bytes."""

    def encode(self, worker, index, tensor):
        return [tensor[:0]]

    def decode(self, place, index, sent):
        return tf.zeros_like(place.weights[index])


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("codec", "sent", "weight"),
    [
        (None, 12, 12),
        (compression.Cast("bfloat16"), 6, 6),
        (Nothing(), 0, 12),
        (compression.Threshold(0.5), 12, 12),  # gradients of 1: three places of 32 bits
        (compression.Threshold(1.5), 6, 12),  # every other message: three places, or none
        (compression.TopK(0.3), 8, 12),  # one of three: its place and its value
    ],
)
def test_a_message_and_a_fetch_take_their_bytes(codec, sent, weight):
    """A weight of three float32, which both bring; a fetch also the version and two counts."""
    cluster = tf_dsgd.SimulatedCluster(
        1, network_seconds=FETCH_SECONDS, network_bytes_per_second=RATE
    )
    strategy = tf_dsgd.DownpourStrategy(cluster, compression=codec)
    with strategy.scope():
        model = helpers.constant_gradient_model(keras.optimizers.SGD(0.0))
    x, y = helpers.ones(12)
    model.fit(x, y, batch_size=2, verbose=0)
    fetched = int(strategy.engine.store.fetched.of(0))
    assert weight + 8 <= fetched <= weight + 3 * 8
    seconds = (FETCH_SECONDS + fetched / RATE) + 1.0 + (FETCH_SECONDS + (HEADER + sent) / RATE)
    np.testing.assert_allclose(strategy.engine.clock(), 6 * seconds)


def test_a_fetch_of_a_table_takes_the_rows_that_it_brings():
    """Two workers: the first fetch is the whole table, a later one what has changed."""
    cluster = tf_dsgd.SimulatedCluster(2, network_bytes_per_second=1e4)
    strategy = tf_dsgd.DownpourStrategy(cluster)
    with strategy.scope():
        table = keras.layers.Embedding(1000, 4)
        layers = [table, keras.layers.Flatten(), keras.layers.Dense(1)]
        model = keras.Sequential([keras.Input((2,), dtype="int32"), *layers])
        model.compile("sgd", "mse")
    ids = np.arange(32).reshape(16, 2)
    model.fit(ids, np.ones((16, 1)), batch_size=2, verbose=0)
    whole, last = 1000 * 4 * 4, int(strategy.engine.store.fetched.of(0))
    # Rows of one or two messages of four, each with its number; the rest is some 60 bytes.
    assert 4 * (4 * 4 + 8) <= last <= 12 * (4 * 4 + 8) + 100
    # Four rounds of a second each; the whole table once.
    assert whole / 1e4 + 4 < strategy.engine.clock() < 2 * whole / 1e4 + 4


@pytest.mark.parametrize("value", [0, -1.0, np.inf, np.nan, "fast", True])
def test_a_wrong_rate_is_named(value):
    with pytest.raises(ValueError, match=r"network_bytes_per_second must be .*above 0.*Received:"):
        tf_dsgd.SimulatedCluster(2, network_bytes_per_second=value)


def test_what_has_no_bytes_says_so():
    with pytest.raises(ValueError, match="network_bytes_per_second cannot be put into a schedule"):
        tf_dsgd.SimulatedCluster(1, network_bytes_per_second=1e6, schedule=[])
    cluster = tf_dsgd.SimulatedCluster(2, network_bytes_per_second=1e6)
    assert "network_bytes_per_second=1e+06" in repr(cluster)
    with pytest.raises(ValueError, match="leave network_bytes_per_second out"):
        study.timetable(cluster, tf_dsgd.DownpourStrategy(cluster).algorithm.exchange, 3)
