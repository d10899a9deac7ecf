"""One worker and plain Keras, to 1e-6, slots among what is compared: what `compile` and `fit` take.

Under averaging, softsync and `local_rule="optimizer"`; for Downpour see test_optimizers.py.
"""

import functools

import keras
import numpy as np
import pytest
from keras import optimizers

import tf_dsgd
from tests import helpers
from tests.equivalence import twin

STRATEGIES = {
    "averaging": lambda c: tf_dsgd.PeriodicAveragingStrategy(c, average_every=4),
    "softsync": lambda c: tf_dsgd.SoftsyncStrategy(c, gradients_per_update=1),
    "update": lambda c: tf_dsgd.DownpourStrategy(c, local_rule="optimizer"),
    "update, periods of 3": lambda c: tf_dsgd.DownpourStrategy(
        c, local_rule="optimizer", push_every=3, fetch_every=3
    ),
}
OPTIONS = {
    "global_clipnorm": lambda: optimizers.SGD(0.1, momentum=0.9, global_clipnorm=0.1),
    "clipvalue": lambda: optimizers.Adagrad(0.1, clipvalue=0.02),
    "weight_decay": lambda: optimizers.SGD(0.1, momentum=0.9, weight_decay=0.1),
    "accumulation": lambda: optimizers.Adam(0.05, gradient_accumulation_steps=3),
    "ema": lambda: optimizers.SGD(0.1, use_ema=True, ema_momentum=0.8),
    "loss_scale_factor": lambda: optimizers.Adam(0.05, loss_scale_factor=8.0),
}


def same(name, optimizer, *, tolerance=2e-6, **fit_args):
    strategy = STRATEGIES[name](helpers.workers(1))
    twin.assert_same_as_plain(
        twin.mlp(optimizer), strategy, *twin.data(), tolerance=tolerance, **fit_args
    )
    assert strategy.steps == twin.STEPS * fit_args.get("epochs", twin.EPOCHS) // twin.EPOCHS


@pytest.mark.few(2)
@pytest.mark.thin
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("name", STRATEGIES)
def test_options(name, option):
    same(name, OPTIONS[option])


@pytest.mark.few(1)
@pytest.mark.parametrize("name", STRATEGIES)
def test_a_rate_that_a_callback_lowers(name):
    """At the end of the second epoch and of each later one, as no loss falls by 10."""
    falls = keras.callbacks.ReduceLROnPlateau(
        monitor="loss", factor=0.1, patience=0, min_delta=10.0
    )
    same(name, lambda: optimizers.SGD(0.1, momentum=0.9), callbacks=[falls], epochs=4)
    assert falls.model.optimizer.learning_rate.numpy() < 2e-4


@pytest.mark.few(1)
@pytest.mark.parametrize("name", STRATEGIES)
def test_several_steps_in_an_execution(name):
    def make():
        model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(1)])
        optimizer = optimizers.Adam(0.05)
        model.compile(optimizer, "mse", metrics=["mae"], steps_per_execution=3)
        return model

    strategy = STRATEGIES[name](helpers.workers(1))
    twin.assert_same_as_plain(make, strategy, *twin.data(), tolerance=2e-6)
    assert strategy.steps == twin.STEPS


@pytest.mark.few(2)
@pytest.mark.parametrize("name", [*STRATEGIES, "elastic"])
def test_data_that_are_not_numbers_reach_the_weights_as_in_plain_keras(name):
    """Nothing hangs, everything is counted, and TerminateOnNaN ends the training."""
    elastic = functools.partial(tf_dsgd.ElasticAveragingStrategy, average_every=2)
    strategy = {**STRATEGIES, "elastic": elastic}[name](tf_dsgd.LocalCluster(2))
    x, y = twin.data()
    y[20] = np.nan
    with strategy.scope():
        model = twin.mlp(lambda: optimizers.SGD(0.1))()
    ends = keras.callbacks.TerminateOnNaN()
    model.fit(x, y, batch_size=twin.BATCH, epochs=3, callbacks=[ends], verbose=0)
    assert np.isnan(model.get_weights()[0]).any()
    assert model.stop_training
    ledger = strategy.ledger()
    assert ledger.in_flight == 0 and ledger.sent == ledger.applied + ledger.refused
