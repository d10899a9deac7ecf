"""A message that no fetch waits for travels, and is applied, while the next round computes."""

import keras
import pytest
import tensorflow as tf

import tf_dsgd
from tests import helpers

SECONDS = 0.15
STEPS = 20


class SlowSGD(keras.optimizers.SGD):
    """Its update takes as long as a local step."""

    def update_step(self, gradient, variable, learning_rate):
        with tf.control_dependencies([helpers.sleep_in_graph(SECONDS)]):
            gradient = tf.identity(gradient)
        super().update_step(gradient, variable, learning_rate)


def test_push_overlaps_compute():
    """In turns a mini-batch would take twice as long."""
    strategy = tf_dsgd.DownpourStrategy(helpers.workers(1), push_every=1, fetch_every=20)
    with strategy.scope():
        model = helpers.constant_gradient_model(SlowSGD(1.0), extra=[helpers.Sleep(SECONDS)])
    clock = helpers.EpochSeconds()
    x, y = helpers.ones(2 * STEPS)
    model.fit(x, y, batch_size=2, epochs=2, verbose=0, callbacks=[clock])
    assert clock.seconds[-1] <= 0.75 * 2 * STEPS * SECONDS
    assert float(model.get_weights()[0][0, 0]) == -2 * STEPS
    helpers.assert_ledger_balances(strategy)


@pytest.mark.parametrize("periods", [(1, 2), (1, 3), (2, 7), (3, 5), (1, 100)])
def test_periods(periods):
    """Nothing is left behind at an epoch's end, whatever comes together."""
    strategy = tf_dsgd.DownpourStrategy(
        helpers.workers(2), push_every=periods[0], fetch_every=periods[1]
    )
    with strategy.scope():
        model = helpers.constant_gradient_model(keras.optimizers.SGD(1.0, momentum=1.0))
    x, y = helpers.ones(2 * 101)
    for epochs in range(1, 4):
        model.fit(x, y, batch_size=2, verbose=0)
        momentum = model.optimizer.variables[-1].numpy()
        assert momentum.ravel().tolist() == [-101 * epochs] * 3
        helpers.assert_ledger_balances(strategy)
        assert strategy.steps == 101 * epochs
