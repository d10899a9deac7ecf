"""`strategy.run` called from Python, outside of any `tf.function`: what it is given may change."""

import contextlib
import copy
import functools
import gc
import pickle
import weakref

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_dsgd
from tests import helpers

if helpers.ON_CLUSTER:
    pytest.skip("Objects of other processes are not seen here.", allow_module_level=True)


@pytest.fixture
def strategy():
    return tf_dsgd.DownpourStrategy(tf_dsgd.LocalCluster(1))


def adding(strategy):
    """A weight from which a step takes `amount`."""
    with strategy.scope():
        weight = tf.Variable([0.0])
        optimizer = keras.optimizers.SGD(1.0)
        optimizer.build([weight])

    def step(ticket, amount=1.0, scale=1.0):
        del ticket
        optimizer.apply([amount * scale * tf.ones([1])], [weight])

    return weight, step


def tickets(strategy, number):
    return strategy.experimental_distribute_dataset(tf.data.Dataset.range(number))


@pytest.mark.parametrize(
    "arguments",
    [
        lambda k: {"args": (2.0 + k,)},
        lambda k: {"kwargs": {"amount": 2.0 + k}},
        lambda k: {"args": (np.array([2.0 + k], "float32"),)},
        lambda k: {"args": (tf.constant([2.0 + k]),)},
        lambda k: {"args": (2.0, 3.0)[: k + 1]},
    ],
)
def test_other_arguments_than_at_first_are_refused(strategy, arguments):
    """Or workers would go on with the first ones, which they have in their graph."""
    weight, step = adding(strategy)

    def loop(k, number):
        given = arguments(k)
        for ticket in tickets(strategy, number):
            strategy.run(step, args=(ticket, *given.get("args", ())), kwargs=given.get("kwargs"))

    loop(0, 3)
    with pytest.raises(ValueError, match=r"'step' than at its first call.*data set.*Received"):
        loop(1, 1)
    strategy.settle()
    assert strategy.steps == 3
    np.testing.assert_array_equal(weight.numpy(), [-6.0])


def test_an_array_that_was_changed_in_place_is_another(strategy):
    _, step = adding(strategy)
    amount = np.ones([1], "float32")
    first, second = tickets(strategy, 2)
    strategy.run(step, args=(first, amount))
    amount += 1.0
    with pytest.raises(ValueError, match="Received"):
        strategy.run(step, args=(second, amount))


def test_the_remedies_of_the_message_do_what_was_meant(strategy):
    weight, step = adding(strategy)
    for amount in (1.0, 2.0):
        of_this = functools.partial(step, amount=amount)
        for ticket in tickets(strategy, 2):
            strategy.run(of_this, args=(ticket,))
    np.testing.assert_array_equal(weight.numpy(), [-6.0])
    with strategy.scope():
        scale = tf.Variable(1.0, trainable=False)

    def scaled(ticket):
        step(ticket, scale=scale.read_value())

    def of_elements(element):
        step(element, amount=tf.cast(element, tf.float32))

    for value in (1.0, 3.0):
        scale.assign(value)
        for ticket in tickets(strategy, 2):
            strategy.run(scaled, args=(ticket,))
    np.testing.assert_array_equal(weight.numpy(), [-6.0 - 2.0 - 6.0])
    for ticket in tickets(strategy, 4):
        strategy.run(of_elements, args=(ticket,))
    np.testing.assert_array_equal(weight.numpy(), [-14.0 - 6.0])


def test_a_model_that_is_compiled_again_trains_as_it_was_compiled_last(strategy):
    """The optimizer and the loss, as in plain Keras, whose `fit` makes its step anew."""
    x, y = helpers.regression(24, ids=False)

    def weights(scope, fit):
        keras.utils.set_random_seed(0)
        found = []
        with scope:
            model = keras.Sequential([keras.Input((x.shape[1],)), keras.layers.Dense(1)])
            optimizer = keras.optimizers.SGD(0.1)
            model.compile(optimizer, "mse")
            fit(model)
            model.compile(optimizer, "mae")
            fit(model)
            found += model.get_weights()
            model.compile(keras.optimizers.SGD(0.01, momentum=0.9), "mae")
            fit(model)
        return [*found, *model.get_weights()]

    def loop(model):
        dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(4)
        for batch in strategy.experimental_distribute_dataset(dataset):
            strategy.run(model.train_step, args=(batch,))

    plain = weights(
        contextlib.nullcontext(), lambda m: m.fit(x, y, batch_size=4, shuffle=False, verbose=0)
    )
    helpers.assert_close(weights(strategy.scope(), loop), plain, tolerance=1e-5)


def test_a_constant_that_is_no_number_and_a_large_one_stay_the_same(strategy):
    """NaN is not equal to itself, and a large array is not read at each call."""
    weight, step = adding(strategy)
    large = np.zeros(1 << 20, "float32")
    with_nan = np.array([1.0, np.nan], "float32")

    def given(ticket, *others):
        step(ticket)

    for ticket in tickets(strategy, 3):
        strategy.run(given, args=(ticket, large, with_nan, float("nan")))
    np.testing.assert_array_equal(weight.numpy(), [-3.0])
    (ticket,) = tickets(strategy, 1)
    with pytest.raises(ValueError, match="given other arguments"):
        strategy.run(given, args=(ticket, large, with_nan + 1.0, float("nan")))


def test_what_a_model_was_compiled_as_before_is_not_kept(strategy):
    with strategy.scope():
        model = helpers.constant_gradient_model(keras.optimizers.SGD(1.0))
    optimizers = []
    for _ in range(3):
        with strategy.scope():
            model.compile(keras.optimizers.SGD(1.0), model.loss)
        optimizers.append(weakref.ref(model.optimizer))
        data = tf.data.Dataset.from_tensor_slices(helpers.ones(4)).batch(2)
        for batch in strategy.experimental_distribute_dataset(data):
            strategy.run(model.train_step, args=(batch,))
        del batch
    gc.collect()
    assert len(strategy._eager._traced) == 1


class Trainer:
    """A user's own object, of which one method is a step."""

    def __init__(self, step=None):
        self.step = step

    def run(self, ticket):
        self.step(ticket)


def test_an_object_whose_method_was_run_is_copied_and_pickled_as_before(strategy):
    weight, step = adding(strategy)
    trainer = Trainer(step)
    for _ in range(2):
        for ticket in tickets(strategy, 2):
            strategy.run(trainer.run, args=(ticket,))
    np.testing.assert_array_equal(weight.numpy(), [-4.0])
    other = copy.copy(trainer)
    for ticket in tickets(strategy, 2):
        strategy.run(other.run, args=(ticket,))
    np.testing.assert_array_equal(weight.numpy(), [-6.0])
    trainer.step = None
    assert pickle.loads(pickle.dumps(trainer)).step is None
