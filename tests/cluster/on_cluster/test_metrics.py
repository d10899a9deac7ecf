"""Metrics of workers in other processes: the chief's at rest, whoever reads and writes them."""

import keras
import numpy as np
import tensorflow as tf

import tf_dsgd
from tests import helpers

EXAMPLES, BATCH = 64, 4


def made(strategy):
    """Predicts the example itself, and keeps to that: the rate is 0."""
    with strategy.scope():
        total = keras.metrics.Sum(name="total")
        model = keras.Sequential(
            [keras.Input((1,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")]
        )

        class Model(keras.Model):
            def __init__(self):
                super().__init__(model.inputs, model.outputs)
                self.total = total

            def train_step(self, data):
                x, y = data
                logs = super().train_step((x, y))
                self.total.update_state(x)
                return logs | {"total": self.total.result()}

        built = Model()
        built.compile(keras.optimizers.SGD(0.0), "mse")
    return built


def examples():
    x = np.arange(EXAMPLES, dtype="float32")[:, None]
    return x, np.zeros_like(x)


def lent(strategy):
    (program,) = strategy.batches.programs
    return program.program.lent


def calls_of(strategy, monkeypatch):
    calls, own = [], lent(strategy)
    for name in ("_send", "_bring"):
        call = getattr(own, name)
        noted = lambda name=name, call=call: (calls.append(name), call())[1]  # noqa: E731
        monkeypatch.setitem(own.__dict__, name, noted)
    return calls


def test_an_epoch_is_one_call_each_way_and_its_results_are_exact(monkeypatch):
    strategy = tf_dsgd.DownpourStrategy(push_every=2, fetch_every=2)
    model = made(strategy)
    x, y = examples()
    first = model.fit(x, y, batch_size=BATCH, verbose=0).history
    calls = calls_of(strategy, monkeypatch)
    history = model.fit(x, y, batch_size=BATCH, epochs=3, verbose=0).history
    assert history["total"] == first["total"] * 3 == [float(x.sum())] * 3
    np.testing.assert_allclose(history["loss"], [(x**2).mean()] * 3, rtol=1e-6)
    assert calls == ["_send", "_bring"] * 3
    helpers.assert_ledger_balances(strategy)


def test_at_rest_they_are_the_chiefs_and_workers_go_on_from_there(monkeypatch):
    """A function of the user's writes one, which no other code sees; and so does evaluate."""
    strategy = tf_dsgd.DownpourStrategy()
    model = made(strategy)
    x, y = examples()
    model.fit(x, y, batch_size=BATCH, verbose=0)
    calls = calls_of(strategy, monkeypatch)

    @tf.function
    def add():
        model.total.update_state(1000.0)

    add()
    assert float(model.total.result()) == x.sum() + 1000
    loss, _ = model.evaluate(x + 1, y, batch_size=BATCH, verbose=0)
    np.testing.assert_allclose(loss, ((x + 1) ** 2).mean(), rtol=1e-6)
    assert calls == []
    model.total.reset_state()
    add()
    seen = []

    class Adding(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 7:
                seen.append(float(self.model.total.result()))  # which waits for all handed out
                add()

    history = model.fit(x, y, batch_size=BATCH, verbose=0, callbacks=[Adding()]).history
    assert history["total"] == [x.sum() + 1000]
    assert 0 < seen[0] <= x.sum()
    assert calls.count("_send") == 2  # at first, and after what was added


def test_a_metric_goes_on_where_another_model_trains_with_it():
    """Two programs, each of which is lent the same metric."""
    strategy = tf_dsgd.DownpourStrategy()
    first = made(strategy)
    x, y = examples()
    first.fit(x, y, batch_size=BATCH, verbose=0)
    second = made(strategy)
    second.total = first.total
    with strategy.scope():
        second.compile(keras.optimizers.SGD(0.0), "mse")
    assert second.fit(x, y, batch_size=BATCH, verbose=0).history["total"] == [x.sum()]
    assert first.fit(x + 1, y, batch_size=BATCH, verbose=0).history["total"] == [(x + 1).sum()]
    assert float(second.total.result()) == (x + 1).sum()


def test_a_state_has_them():
    strategy = tf_dsgd.DownpourStrategy()
    model = made(strategy)
    x, y = examples()
    model.fit(x, y, batch_size=BATCH, verbose=0)
    state = strategy.state(held=())
    model.total.reset_state()
    strategy.restore(state)
    assert float(model.total.result()) == x.sum()
    model.fit(x, y, batch_size=BATCH, verbose=0)
    assert float(model.total.result()) == x.sum()
