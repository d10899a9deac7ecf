"""Elastic averaging against a twin in NumPy, and what it keeps: the sum of all weights."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_dsgd
from tests import helpers
from tests.algorithms.averaging_twin import Local
from tests.algorithms.test_averaging import COMPUTE, NETWORK, RATE, START, fit, simulated
from tests.contract.clockwork import Twin
from tests.contract.linear import data, gradient, split


class ElasticTwin(Twin):
    """The paper's algorithms 1 and 2; `arrive` is both halves of one force."""

    def __init__(self, num_workers, every, optimizer, a):
        self.push_every = self.fetch_every = every
        self.center = START.astype("float64")
        self.local = [self.center.copy() for _ in range(num_workers)]
        self.optimizers = [Local(optimizer, RATE, START.shape) for _ in range(num_workers)]
        self.a = a
        self.staleness = []

    def step(self, m, batch):
        self.local[m] = self.local[m] + self.optimizers[m].change(gradient(self.local[m], batch))

    def message(self, m):
        return self.local[m].copy()

    def arrive(self, worker, sent, staleness):
        force = self.a * (sent - self.center)
        self.center = self.center + force
        self.local[worker] = self.local[worker] - force
        self.staleness.append(staleness)
        return True


EPOCHS = 2
OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(RATE),
    "momentum": lambda: keras.optimizers.SGD(RATE, momentum=0.9),
    "adam": lambda: keras.optimizers.Adam(RATE),
}


@pytest.mark.thin
@pytest.mark.parametrize("batches", [48, 53])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_it_equals_the_twin(optimizer, batches):
    x, y = data(batches)
    twin = ElasticTwin(3, 4, optimizer, 0.3)
    for _ in range(EPOCHS):  # two epochs: workers keep their weights and slots
        twin.run(3, COMPUTE, NETWORK, split(x, y))
    strategy = tf_dsgd.ElasticAveragingStrategy(simulated(), average_every=4, elasticity=0.3)
    weights, model = fit(strategy, OPTIMIZERS[optimizer], x, y, epochs=EPOCHS)
    np.testing.assert_allclose(weights, twin.center, rtol=1e-4, atol=1e-5)
    assert strategy.updates == len(twin.staleness)
    assert strategy.staleness().mean == pytest.approx(np.mean(twin.staleness))
    assert int(model.optimizer.iterations) == EPOCHS * batches // 3


def copies(variable):
    return [float(copy.numpy().ravel()[0]) for copy in variable.copies.present()]


@pytest.mark.parametrize("engine", helpers.engines(local=None, simulated=None))
def test_forces_keep_the_sum(engine):
    """At rate 0 nothing but forces moves, and a force moves two by the same."""
    strategy = tf_dsgd.ElasticAveragingStrategy(helpers.workers(2), average_every=1)
    with strategy.scope():
        model = helpers.constant_gradient_model(keras.optimizers.SGD(0.0))
    x, y = helpers.ones(20)
    model.fit(x, y, batch_size=2, verbose=0)
    kernel = model.trainable_variables[0].value
    for copy, value in zip(kernel.copies.present(), (5.0, -1.0), strict=True):
        copy.assign(np.full(copy.shape, value))
    before = float(kernel.primary.numpy().ravel()[0])
    model.fit(x, y, batch_size=2, verbose=0)
    after = float(kernel.primary.numpy().ravel()[0])
    assert abs(after - before) > 0.1
    assert after + sum(copies(kernel)) == pytest.approx(before + 4.0, rel=1e-5)


def test_assigned_weights_reach_all_workers():
    strategy = tf_dsgd.ElasticAveragingStrategy(tf_dsgd.LocalCluster(2), average_every=2)
    with strategy.scope():
        model = helpers.constant_gradient_model(keras.optimizers.SGD(1.0))
    x, y = helpers.ones(20)
    model.fit(x, y, batch_size=2, verbose=0)
    model.set_weights([np.full_like(w, 7.0) for w in model.get_weights()])
    assert copies(model.trainable_variables[0].value) == [7.0, 7.0]
    model.optimizer.learning_rate = 0.0
    model.fit(x, y, batch_size=2, verbose=0)
    for weight in model.get_weights():
        np.testing.assert_allclose(weight, 7.0, rtol=1e-6)


def test_what_a_lost_worker_had_sent_does_not_move_its_successor():
    """The rule alone: a force waits for worker 0, whose variables are then made anew."""
    strategy = tf_dsgd.ElasticAveragingStrategy(
        tf_dsgd.SimulatedCluster(2, seed=0), average_every=1, elasticity=0.5
    )
    with strategy.scope():
        model = helpers.constant_gradient_model(keras.optimizers.SGD(1.0))
    x, y = helpers.ones(4)
    model.fit(x, y, batch_size=2, verbose=0)
    program, store = strategy.engine.program, strategy.engine.store
    kernel = model.trainable_variables[0].value
    program.push[0](tf.constant(True))
    numbered = store.sequences()[0]
    store.lose(0)
    store.renew(0, numbered)
    at_center = copies(kernel)[0]
    assert at_center == float(kernel.primary.numpy().ravel()[0])
    program.fetch[0]()
    assert copies(kernel)[0] == at_center
    # And it was for the first fetch alone: the next force moves it.
    kernel.copies.of(0).assign_add(np.ones(kernel.shape))
    program.push[0](tf.constant(True))
    program.fetch[0]()
    assert copies(kernel)[0] == pytest.approx(at_center + 0.5)
