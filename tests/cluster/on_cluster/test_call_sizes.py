"""What one call brings to a worker: less than gRPC and protobuf take, with lower limits here."""

import keras
import numpy as np
import pytest

import tf_dsgd
from tests import helpers
from tf_dsgd.engine import remote
from tf_dsgd.strategies.packing import Packing

STEPS, BATCH = 64, 2
BATCH_BYTES = BATCH * (3 + 1) * 4  # three inputs and a target, float32


@pytest.fixture
def made():
    strategy = tf_dsgd.DownpourStrategy(helpers.workers(2), push_every=8, fetch_every=8)
    with strategy.scope():
        return strategy, helpers.constant_gradient_model(keras.optimizers.SGD(1.0))


def fit(model):
    x, y = helpers.ones(STEPS * BATCH)
    model.fit(x, y, batch_size=BATCH, verbose=0)


def test_a_message_of_more_than_one_call_takes(made, monkeypatch):
    """Eight mini-batches in a message, at most three in a call."""
    strategy, model = made
    monkeypatch.setattr(remote, "MOST_CALL_BYTES", 4 * BATCH_BYTES - 1)
    pack, calls = Packing.pack, []

    def noted(self, batches):
        calls.append(batches.shape[0])
        return pack(self, batches)

    monkeypatch.setattr(Packing, "pack", noted)
    fit(model)
    assert sum(calls) == STEPS and max(calls) == 3
    np.testing.assert_array_equal(model.get_weights()[0], np.full((3, 1), -STEPS, "float32"))
    helpers.assert_ledger_balances(strategy)


def test_a_mini_batch_that_no_call_takes_is_refused(made, monkeypatch):
    """Before it is sent; the strategy trains on with smaller ones."""
    strategy, model = made
    with monkeypatch.context() as lower:
        lower.setattr(remote, "MOST_CALL_BYTES", BATCH_BYTES - 1)
        with pytest.raises(ValueError, match=r"Received: 32 bytes in one.*smaller batch_size"):
            fit(model)
    assert strategy.steps == 0
    fit(model)
    assert strategy.steps == STEPS
    helpers.assert_ledger_balances(strategy)
