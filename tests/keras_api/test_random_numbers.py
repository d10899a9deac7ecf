"""Where workers' random numbers come from: of their own, or it is refused by name."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_dsgd
from tests import helpers

SEED = 7


def drawn_under_tensorflows_own_strategy(number):
    """By the one replica of `tf.distribute.OneDeviceStrategy`."""
    strategy = tf.distribute.OneDeviceStrategy("/cpu:0")
    with strategy.scope():
        generator = tf.random.Generator.from_seed(SEED)
    return [float(strategy.run(lambda: generator.normal([]))) for _ in range(number)]


class Drawing:
    """Each worker keeps the last three numbers that it drew."""

    def __init__(self, strategy):
        self.strategy = strategy
        with strategy.scope():
            self.generator = tf.random.Generator.from_seed(SEED)
            self.w = tf.Variable(0.0)
            self.optimizer = keras.optimizers.SGD(1.0)
            self.optimizer.build([self.w])
            self.drawn = tf.Variable(
                np.zeros(3, np.float32),
                trainable=False,
                synchronization=tf.VariableSynchronization.ON_READ,
                aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA,
            )
        self.run = tf.function(lambda ticket: strategy.run(self.step, args=(ticket,)))

    def step(self, _ticket):
        number = tf.function(lambda: self.generator.normal([]))()  # in a function inside the step
        self.drawn.assign(tf.concat([self.drawn[1:], [number]], 0))
        self.optimizer.apply([number], [self.w])

    def __call__(self, tickets):
        for ticket in self.strategy.experimental_distribute_dataset(tf.data.Dataset.range(tickets)):
            self.run(ticket)
        return np.array(self.strategy.experimental_local_results(self.drawn))


def simulated(workers):
    return tf_dsgd.SimulatedCluster(workers, compute_seconds=1.0, seed=0)


def test_one_worker_draws_as_one_replica_of_tensorflows():
    drawing = Drawing(tf_dsgd.DownpourStrategy(helpers.workers(1), push_every=2, fetch_every=3))
    want = drawn_under_tensorflows_own_strategy(5)
    np.testing.assert_array_equal(drawing(3), [np.float32(want[:3])])
    np.testing.assert_array_equal(drawing(2), [np.float32(want[2:])])
    np.testing.assert_allclose(float(drawing.w), -sum(want), rtol=1e-6)


def test_each_worker_draws_its_own():
    strategy = tf_dsgd.DownpourStrategy(simulated(3))
    drawn = Drawing(strategy)(9)
    assert [worker.steps for worker in strategy.ledger().workers] == [3, 3, 3]
    np.testing.assert_array_equal(drawn[0], np.float32(drawn_under_tensorflows_own_strategy(3)))
    assert len(np.unique(drawn)) == 9


def test_a_state_has_where_each_worker_is():
    before = Drawing(tf_dsgd.DownpourStrategy(simulated(2)))
    before(4)
    state = before.strategy.state(held=set())
    after = Drawing(tf_dsgd.DownpourStrategy(simulated(2)))
    after.strategy.restore(state)
    np.testing.assert_array_equal(after(4), before(4))


class Noise(keras.layers.Layer):
    """Adds numbers of a seed generator, or, without one, of Keras's own."""

    def __init__(self, seed=None):
        super().__init__()
        self.seed = seed

    def call(self, inputs):
        return inputs + keras.random.normal(keras.ops.shape(inputs), seed=self.seed)


def fit(strategy, *layers, **options):
    with strategy.scope():
        layers = [keras.Input((3,)), *layers, keras.layers.Dense(1)]
        model = keras.Sequential(layers)
        model.compile("sgd", "mse", **options)
    model.fit(*helpers.ones(4), batch_size=2, verbose=0)


def start():
    return tf_dsgd.DownpourStrategy(helpers.workers(1))


def test_kerass_own_generator_is_told_of_by_that_name():
    keras.random.normal([])
    with pytest.raises(ValueError, match=r"without a seed.*seed=keras.random.SeedGenerator"):
        fit(start(), Noise())


def test_each_strategy_of_a_process_has_kerass_own_generator():
    """As where a notebook's cells run twice; each draws other numbers for each mini-batch."""
    x, y = helpers.ones(8)
    for _ in range(3):
        with start().scope():
            model = keras.Sequential([keras.Input((3,)), Noise(), keras.layers.Dense(1)])
            model.compile(keras.optimizers.SGD(0.0), "mse")
        seen = []
        note = keras.callbacks.LambdaCallback(
            on_train_batch_end=lambda batch, logs, seen=seen: seen.append(logs["loss"])
        )
        model.fit(x, y, batch_size=1, verbose=0, callbacks=[note])
        assert len({round(float(loss), 6) for loss in seen}) > 1


@pytest.mark.parametrize("what", ["metric", "seed_generator", "layer"])
def test_what_was_made_in_another_strategys_scope_is_refused(what):
    with start().scope():
        metric = keras.metrics.MeanSquaredError(name="theirs")
        seed = keras.random.SeedGenerator(3, name="theirs")
        layer = keras.layers.BatchNormalization(center=False, scale=False, name="theirs")
        layer.build((None, 3))
    layers = {"seed_generator": [Noise(seed)], "layer": [layer]}.get(what, [])
    with pytest.raises(ValueError, match=r"'theirs/.*outside this strategy's scope"):
        fit(start(), *layers, metrics=[metric] if what == "metric" else None)


def test_kerass_own_generator_made_while_a_step_is_traced_is_the_workers():
    fit(start(), Noise())
