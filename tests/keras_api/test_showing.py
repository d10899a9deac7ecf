"""The step that `fit` calls once workers train shows what Keras's own would, at less cost."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_dsgd
from tests import helpers
from tf_dsgd import _tf_order
from tf_dsgd.strategies import handing_out
from tf_dsgd.strategies.showing import Logs, ShowingStep, step_of_keras

pytestmark = pytest.mark.medium

STEPS = 12


def cluster():
    return tf_dsgd.SimulatedCluster(2, compute_seconds=[1.0, 1.5], network_seconds=0.1, seed=0)


class Rate(keras.metrics.Metric):
    """The optimizer's rate, which is no state of a metric."""

    def __init__(self):
        super().__init__(name="rate")
        self.seen = self.add_weight(name="seen", initializer="zeros")
        self.optimizer = None

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.seen.assign_add(1.0)

    def result(self):
        return self.seen * 0.0 + self.optimizer.learning_rate


class Noted(keras.callbacks.Callback):
    """Every step's logs; halves the rate at each step, and spoils what it was given."""

    def __init__(self):
        super().__init__()
        self.logs = []
        self.steps = set()

    def on_train_batch_end(self, batch, logs=None):
        self.logs.append((batch, dict(logs)))
        self.steps.add(type(self.model.train_function))
        self.model.optimizer.learning_rate = self.model.optimizer.learning_rate.numpy() / 2
        logs.clear()


def make(kind, steps_per_execution):
    keras.utils.set_random_seed(0)
    model = helpers.OwnLogs("own") if kind == "own" else keras.Sequential([keras.layers.Dense(1)])
    rate = Rate()
    metrics = {"own": None, "plain": ["mae"], "rate": [rate]}[kind]
    model.compile(
        keras.optimizers.SGD(0.01), "mse", metrics=metrics, steps_per_execution=steps_per_execution
    )
    rate.optimizer = model.optimizer
    model.build((None, 3))
    return model


def data():
    rng = np.random.default_rng(0)
    x = rng.normal(size=[STEPS * 4, 3]).astype("float32")
    return x, x.sum(1, keepdims=True)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("kind", "steps_per_execution"),
    [("plain", 1), ("plain", 5), ("own", 1), ("own", 5), ("rate", 1)],
)
def test_logs_of_every_step_are_those_of_keras_s_own_step(kind, steps_per_execution, monkeypatch):
    def logs():
        noted = Noted()
        strategy = tf_dsgd.DownpourStrategy(cluster(), push_every=3, fetch_every=3)
        with strategy.scope():
            model = make(kind, steps_per_execution)
        x, y = data()
        history = model.fit(x, y, batch_size=4, epochs=3, verbose=0, callbacks=[noted])
        again = model.fit(x, y, batch_size=4, epochs=2, verbose=0, callbacks=[noted])
        return noted, history.history, again.history

    showing = logs()
    monkeypatch.setattr(handing_out, "show_only", lambda model: None)
    keras_s = logs()
    assert keras_s[0].steps.isdisjoint([ShowingStep]) and showing[0].steps == {ShowingStep}
    assert showing[0].logs == keras_s[0].logs
    assert showing[1:] == keras_s[1:]


def test_what_is_no_step_of_fit_goes_to_keras_s_own():
    strategy = tf_dsgd.DownpourStrategy(cluster())
    with strategy.scope():
        model = make("plain", 1)
    x, y = data()
    model.fit(x, y, batch_size=4, verbose=0)
    before = step_of_keras(model)
    assert isinstance(model.train_function, ShowingStep) and before is not model.train_function
    weights = model.get_weights()
    model.train_on_batch(x[:4], y[:4])
    assert any((a != b).any() for a, b in zip(weights, model.get_weights(), strict=True))

    model.fit(x[:, :], y, batch_size=4, verbose=0)
    assert step_of_keras(model) is before
    with strategy.scope():
        model.compile("sgd", "mae")
    assert model.train_function is None
    model.fit(x, y, batch_size=4, verbose=0)
    assert step_of_keras(model) is not before
    assert strategy.steps == 3 * STEPS


def test_batches_of_another_type_are_trained_on_too():
    strategy = tf_dsgd.DownpourStrategy(cluster())
    with strategy.scope():
        model = make("plain", 1)
    x, y = data()
    weighted = x, y, np.full([len(x)], 0.0, "float32")
    model.fit(x, y, batch_size=4, verbose=0)
    weights = model.get_weights()
    for _ in range(2):
        shown = model.fit(*weighted[:2], sample_weight=weighted[2], batch_size=4, verbose=0)
        assert shown.history["loss"] == [0.0]
    for a, b in zip(weights, model.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)
    assert model.fit(x, y, batch_size=4, verbose=0).history["loss"] != [0.0]
    assert strategy.steps == 4 * STEPS


def test_a_user_s_own_function_stays_in_its_place():
    strategy = tf_dsgd.DownpourStrategy(cluster())
    with strategy.scope():
        model = make("plain", 1)
    model.make_train_function()
    inner, calls = model.train_function, []

    def outer(iterator):
        calls.append(1)
        return inner(iterator)

    model.train_function = outer
    x, y = data()
    model.fit(x, y, batch_size=4, epochs=2, verbose=0)
    assert len(calls) == 2 * STEPS and model.train_function is outer


def test_xla_s_functions_are_not_made_anew():
    strategy = tf_dsgd.DownpourStrategy(cluster())
    with strategy.scope():
        model = make("plain", 1)
        model.compile("sgd", "mse", jit_compile=True)
    x, y = data()
    model.fit(x, y, batch_size=4, verbose=0)
    before = step_of_keras(model)
    model.fit(x, y, batch_size=4, verbose=0)
    assert step_of_keras(model) is before


class Running:
    edition = 0


def test_logs_are_read_again_only_after_a_report():
    variable, running = tf.Variable(1.0), Running()
    logs = Logs(lambda: {"a": variable + 1.0}, running, [variable])
    assert float(logs.now()["a"]) == 2.0
    variable.assign(5.0)
    assert float(logs.now()["a"]) == 2.0
    running.edition += 1
    assert float(logs.now()["a"]) == 6.0


def test_logs_that_hang_on_more_are_read_at_every_step():
    variable, other = tf.Variable(1.0), tf.Variable(1.0)
    logs = Logs(lambda: {"a": variable + other}, Running(), [variable])
    assert float(logs.now()["a"]) == 2.0
    other.assign(5.0)
    assert float(logs.now()["a"]) == 6.0


@pytest.mark.parametrize(
    ("function", "alone"),
    [
        (lambda v, w: v + 1.0, True),
        (lambda v, w: tf.constant(1.0), True),
        (lambda v, w: v + w, False),
        (lambda v, w: v + tf.random.uniform([]), False),
        (lambda v, w: v + tf.cast(tf.timestamp(), tf.float32), False),
        (lambda v, w: v.assign_add(1.0), False),
    ],
)
def test_what_a_function_depends_on(function, alone):
    v, w = tf.Variable(1.0), tf.Variable(1.0)
    concrete = tf.function(lambda: function(v, w)).get_concrete_function()
    assert _tf_order.depends_on_alone(concrete, [v]) == alone
