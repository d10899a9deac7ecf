"""A strategy whose workers fetch when told, and whose shards are given messages as told."""

import keras
import numpy as np
import tensorflow as tf

import tf_dsgd
from tests import helpers
from tf_dsgd.engine.state import SEQUENCE


class Rows(keras.layers.Layer):
    """A table; its gradient is sparse."""

    def __init__(self, shape):
        super().__init__()
        self.table = self.add_weight(shape=shape, initializer="zeros", name="table")

    def call(self, ids):
        return keras.ops.take(self.table, ids, axis=0)


class Bench:
    """One weight of the given shape, and an optimizer, on a shard with several workers.

    Args:
        optimizer: makes the optimizer, called in the scope.
        shape: of the weight.
        sparse: whether its gradient is sparse.
    """

    def __init__(self, optimizer, num_workers=3, shape=(4, 2), sparse=False, cluster=None):
        if cluster is None:
            cluster = tf_dsgd.SimulatedCluster(num_workers)
        self.strategy = tf_dsgd.DownpourStrategy(cluster)
        self.sparse, self.shape = sparse, shape
        with self.strategy.scope():
            if sparse:
                layers = [keras.Input((), dtype="int64"), Rows(shape)]
            else:
                dense = keras.layers.Dense(shape[1], use_bias=False, kernel_initializer="zeros")
                layers = [keras.Input(shape[:1]), dense]
            self.model = keras.Sequential(layers)
            self.model.compile(optimizer(), helpers.mean_output)
            self.model.optimizer.build(self.model.trainable_variables)
        self.variables = [*self.model.trainable_variables, *self.model.optimizer.variables]
        self._start = [v.numpy() for v in self.variables]
        x = np.zeros((1,), "int64") if sparse else np.zeros((1, shape[0]), "float32")
        self.model.fit(x, np.zeros((1, shape[1])), verbose=0)  # traces
        self.program = self.strategy.engine.program
        assert self.program.step.sparse == [sparse]

    def reset(self, weight):
        """As it was at first, with another weight."""
        for variable, value in zip(self.variables, [weight, *self._start[1:]], strict=True):
            variable.assign(value)

    def fetch(self, worker):
        self.program.fetch[worker]()

    def push(self, worker, gradient, rows=None):
        """Applies a message of a worker, which names a row once; rows given twice are added."""
        clocks = self.strategy.engine.store.clock.copies
        clock = clocks[worker].numpy()
        clock[SEQUENCE] += 1
        clocks[worker].assign(clock)
        version_fetched = clock[-1]
        head = tf.constant([worker, clock[1], clock[SEQUENCE], version_fetched, 1], tf.int64)
        if self.sparse:
            rows, place = np.unique(rows, return_inverse=True)
            total = np.zeros([len(rows), *self.shape[1:]])
            np.add.at(total, place, gradient)
            gradient = total
        gradient = self._gradient(gradient, rows)
        assert bool(self.program.deliver(head, [gradient]))

    def no_delay(self, gradient, rows=None):
        """Applies a gradient as plain Keras would, beside all messages."""
        gradient = self._gradient(gradient, rows)
        self.strategy.run(
            lambda: self.model.optimizer.apply([gradient], self.model.trainable_variables)
        )

    def _gradient(self, values, rows):
        values = tf.constant(values, tf.float32)
        if not self.sparse:
            return values
        return tf.IndexedSlices(values, tf.constant(rows, tf.int64), tf.constant(self.shape))

    def weight(self):
        return self.variables[0].numpy()

    def slots(self):
        """What the optimizer keeps beside the weight, in order."""
        return [v.numpy() for v in self.model.optimizer.variables if v.shape == self.shape]
