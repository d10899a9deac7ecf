"""Other threads than the one that trains read the model, a worker's own Python code among them."""

import threading

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_dsgd
from tests import helpers

CLUSTERS = {
    "threads": lambda: tf_dsgd.LocalCluster(2),
    "simulated": lambda: tf_dsgd.SimulatedCluster(2, compute_seconds=1.0, seed=0),
}


@pytest.fixture(params=CLUSTERS)
def strategy(request):
    return tf_dsgd.DownpourStrategy(CLUSTERS[request.param]())


class Beside:
    """Within, another thread calls `read` again and again, until that raises an error."""

    def __init__(self, read):
        self._read = read
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.found, self.error = [], None

    def _run(self):
        try:
            while not self._stop.is_set():
                self.found.append(self._read())
        except Exception as error:  # the test looks at it
            self.error = error

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *exception):
        self._stop.set()
        self._thread.join(60)
        assert not self._thread.is_alive()


def test_another_thread_reads_weights_while_fit_runs(strategy):
    """What it finds is whole: each mini-batch that was handed out has moved all weights by -1."""
    with strategy.scope():
        model = helpers.constant_gradient_model(keras.optimizers.SGD(1.0))
    x, y = helpers.ones(1200)
    model.fit(x[:2], y[:2], batch_size=2, verbose=0)
    with Beside(lambda: model.get_weights()[0]) as beside:
        model.fit(x, y, batch_size=2, epochs=2, verbose=0)
    assert beside.error is None
    done = -np.stack(beside.found)[:, :, 0]
    assert (done == done[:, :1]).all() and (done == np.round(done)).all()
    assert done[0, 0] >= 1 and (np.diff(done[:, 0]) >= 0).all()
    assert strategy.steps == 1201
    np.testing.assert_array_equal(model.get_weights()[0], np.full((3, 1), -1201.0, "f"))
    helpers.assert_ledger_balances(strategy)


def test_an_error_of_training_is_raised_where_it_trains(strategy):
    """Not in whatever thread looks first, after which `fit` would go on with less."""

    def loss(y, outputs):
        with tf.control_dependencies([tf.debugging.assert_less(y, 2.0, "too much")]):
            return tf.reduce_mean(outputs, axis=-1)

    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.01), loss)
    x, y = helpers.ones(400)
    model.fit(x[:2], y[:2], batch_size=2, verbose=0)
    y[-2:] = 3.0
    with (
        Beside(strategy.settle) as beside,
        pytest.raises(tf.errors.InvalidArgumentError, match="too much"),
    ):
        model.fit(x, y, batch_size=2, epochs=2, shuffle=False, verbose=0)
    assert beside.error is None or "too much" in str(beside.error.__cause__ or beside.error)
    model.fit(x[:8], y[:8], batch_size=2, verbose=0)  # goes on
    strategy.settle()


def test_another_thread_settles_between_a_token_and_its_step(strategy):
    with strategy.scope():
        weight = tf.Variable([0.0])
        optimizer = keras.optimizers.SGD(1.0)
        optimizer.build([weight])

    def step(ticket):
        del ticket
        optimizer.apply([tf.ones([1])], [weight])

    tickets = tf.data.Dataset.range(5)
    for ticket in strategy.experimental_distribute_dataset(tickets):
        other = threading.Thread(target=strategy.settle)
        other.start()
        other.join()
        strategy.run(step, args=(ticket,))
    assert strategy.steps == 5
    np.testing.assert_array_equal(weight.numpy(), [-5.0])


def test_another_thread_predicts_between_a_step_and_the_next_token(strategy):
    """By tokens of its own, which say nothing of the step that was run before."""
    with strategy.scope():
        model = helpers.constant_gradient_model(keras.optimizers.SGD(1.0))
    x, _ = helpers.ones(10)
    model.predict(x, verbose=0)
    asked, answered, end = threading.Event(), threading.Event(), threading.Event()

    def predict():
        while asked.wait(60) and not end.is_set():
            asked.clear()
            model.predict(x, batch_size=5, verbose=0)
            answered.set()

    other = threading.Thread(target=predict, daemon=True)  # which stays
    other.start()
    data = tf.data.Dataset.from_tensor_slices(helpers.ones(10)).batch(2)
    for batch in strategy.experimental_distribute_dataset(data):
        strategy.run(model.train_step, args=(batch,))
        answered.clear()
        asked.set()
        assert answered.wait(60)
    strategy.settle()
    end.set()
    asked.set()
    other.join(60)
    assert strategy.steps == 5
    np.testing.assert_array_equal(model.get_weights()[0], np.full((3, 1), -5.0, "f"))


@pytest.mark.parametrize("call", [tf.numpy_function, tf.py_function])
def test_python_code_of_a_step_that_reads_a_weight_is_refused(strategy, call):
    """TensorFlow may run it in a thread of its own, of which no worker knows."""
    read = []

    class Reading(keras.layers.Layer):
        def build(self, shape):
            self.scale = self.add_weight(shape=(1,), initializer="ones", name="scale")

        def call(self, inputs):
            def python(values):
                read.append(self.scale.numpy())
                return values

            return tf.ensure_shape(call(python, [inputs], tf.float32), inputs.shape) * self.scale

    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), Reading(), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    with pytest.raises(tf.errors.OpError, match="would wait for itself"):
        model.fit(*helpers.ones(8), batch_size=2, verbose=0)
    assert not read
    model.predict(helpers.ones(2)[0], verbose=0)  # where nothing is under way
    assert len(read) == 1
