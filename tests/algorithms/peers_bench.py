"""Peers on threads and on the simulator, and what each of them has, for several tests."""

import keras
import numpy as np
import tensorflow as tf

import tf_dsgd

BATCH = 4


def dyadic(batches, seed=0):
    """Inputs in eighths, targets in halves: sums of their products are exact in float32."""
    random = np.random.default_rng(seed)
    x = random.integers(-16, 16, (batches * BATCH, 6)).astype("float32") / 8
    return x, random.integers(-8, 8, (batches * BATCH, 4)).astype("float32") / 2


def gradients(x, y):
    """Of each mini-batch, by hand: x'y / (4 BATCH)."""
    parts = x.reshape(-1, BATCH, 6), y.reshape(-1, BATCH, 4)
    return np.einsum("nbi,nbj->nij", *parts).astype("float32") / (4 * BATCH)


def linear(strategy):
    """A loss that is linear in the weights: the same gradients come in any order."""
    with strategy.scope():
        layer = keras.layers.Dense(4, use_bias=False, kernel_initializer="zeros")
        model = keras.Sequential([keras.Input((6,)), layer])
        model.compile(keras.optimizers.SGD(1.0), loss=lambda y, p: tf.reduce_mean(p * y, -1))
    return model


def simulated(*seconds, network=0.0, **options):
    return tf_dsgd.SimulatedCluster(
        len(seconds), compute_seconds=list(seconds), network_seconds=network, seed=0, **options
    )


def copies(strategy):
    """Of each weight, and of what else layers keep, all workers' copies."""
    program = strategy.engine.program
    variables = [*program.step.weights, *(each.variable for each in program.merged)]
    return [
        [copy.numpy() for copy in v.on_workers().present()]
        for v in variables
        if v.dtype.is_floating
    ]


def assert_copies_are_equal(strategy):
    for of_one in copies(strategy):
        assert len(of_one) == strategy.num_workers
        for copy in of_one:
            np.testing.assert_array_equal(copy, of_one[0])


def residuals(strategy):
    """The sum over workers, of the only weight."""
    (cell,) = [
        found["residual"] for found in strategy.engine.store.kept.values() if "residual" in found
    ]
    return sum(copy.numpy() for copy in cell.present())
