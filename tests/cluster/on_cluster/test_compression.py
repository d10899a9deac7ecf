"""Codecs on processes: what was applied and what workers keep, and what crosses."""

import keras
import numpy as np
import tensorflow as tf

import tf_dsgd
from tests import helpers
from tf_dsgd import _tf_prepared, compression

BATCH, STEPS, SIZE = 4, 40, 30_000


def made(codec, rate=1.0):
    """A model whose gradient is a mini-batch's mean input, for each of many outputs."""
    strategy = tf_dsgd.DownpourStrategy(
        helpers.workers(2), push_every=4, fetch_every=4, compression=codec
    )
    with strategy.scope():
        layer = keras.layers.Dense(SIZE // 6, use_bias=False, kernel_initializer="zeros")
        model = keras.Sequential([keras.Input((6,)), layer])
        model.compile(keras.optimizers.SGD(rate), loss=lambda y, p: tf.reduce_sum(p, -1))
    return strategy, model


def data():
    """Inputs in eighths: sums of their means are exact in float32."""
    x = np.random.default_rng(0).integers(-16, 16, (STEPS * BATCH, 6)).astype("float32") / 8
    return x, np.zeros((len(x), 1), "float32")


def test_what_was_applied_and_what_workers_keep_are_all_gradients():
    strategy, model = made(compression.Threshold(2.0, entropy=True))
    x, y = data()
    model.fit(x, y, batch_size=BATCH, verbose=0)
    (cells,) = strategy.engine.store.kept.values()
    found = cells["residual"].read()
    assert sorted(found) == [0, 1]
    # Each mini-batch's gradient is the mean of its inputs, of the same for every output.
    wanted = np.repeat(x.reshape(STEPS, BATCH, 6).mean(1).sum(0)[:, None], SIZE // 6, 1)
    np.testing.assert_array_equal(sum(found.values()) - model.get_weights()[0], wanted)
    norms = [np.linalg.norm(found[m].astype("float64")) for m in range(2)]
    np.testing.assert_allclose(strategy.residual(), norms)
    assert np.abs(model.get_weights()[0]).max() >= 2.0
    helpers.assert_ledger_balances(strategy)


def crossing(codec):
    """Types of all tensors of a round that go from worker 0 to a ps."""
    strategy, model = made(codec)
    x, y = data()
    model.fit(x, y, batch_size=BATCH, verbose=0)
    packed = helpers.packed(strategy, (x[: 4 * BATCH], y[: 4 * BATCH]), BATCH)
    worker = strategy.engine.store.worker_devices[0]
    program = strategy.engine.program
    found = []
    for graph in _tf_prepared.partitions(program.round_on[0], worker, packed):
        nodes = {node.name: node for node in graph.node}
        for node in graph.node:
            if node.op != "_Send" or "job:worker" not in node.attr["send_device"].s.decode():
                continue
            if "job:ps" not in node.attr["recv_device"].s.decode():
                continue
            if nodes[node.input[0].split(":")[0]].op != "Const":
                found.append(tf.as_dtype(node.attr["T"].type).name)
    return found


def test_what_crosses_is_what_the_codec_gives():
    """Without one a kernel of 120 kB: test_wire.py. Places, or signs joined with all that is small.

    To the ps without a weight a header goes by itself.
    """
    assert sorted(crossing(compression.Threshold(2.0))) == ["int64", "uint32", "uint8"]
    assert sorted(crossing(compression.OneBit())) == ["int64", "uint8"]
