"""Rules are traced once each, whichever functions an engine names, and in whatever order."""

from __future__ import annotations

import collections

import keras
import numpy as np
import pytest

import tf_dsgd
from tf_dsgd import algorithm
from tf_dsgd.algorithms.downpour import AccrueGradient, CompiledOptimizer, Periods
from tf_dsgd.engine.simulator import SimulatorEngine
from tf_dsgd.engine.threads import ThreadsEngine
from tf_dsgd.strategies.base import DistributedStrategy

FUNCTIONS = ["work", "collect", "deliver", "fetch", "push", "exchange", "fetch_as", "push_as"]

CALLS = collections.Counter()


class Counted:
    """Notes which methods of a rule were called, which is when they are traced."""

    def __getattribute__(self, name):
        if name in {"step", "message", "fetched", "receive", "answer"}:
            CALLS[type(self).__name__, name] += 1
        return super().__getattribute__(name)


class Local(Counted, AccrueGradient):
    pass


class Server(Counted, CompiledOptimizer):
    pass


def rules(period):
    periods = {"push_every": period, "fetch_every": period}
    return algorithm.Algorithm(Local(**periods), Periods(**periods), Server())


def fit(strategy):
    """A table's rows, whose update the delivery shows, and a rate that local steps read."""
    random = np.random.default_rng(0)
    x, y = random.integers(0, 20, (48, 3)), random.standard_normal((48, 1)).astype("float32")
    keras.utils.set_random_seed(1)
    with strategy.scope():
        layers = [keras.layers.Embedding(20, 2), keras.layers.Flatten(), keras.layers.Dense(1)]
        model = keras.Sequential([keras.Input((3,), dtype="int32"), *layers])
        model.compile(keras.optimizers.Adagrad(0.1), "mse")
    model.fit(x, y, batch_size=4, epochs=2, shuffle=False, verbose=0)
    return model.get_weights()


@pytest.mark.parametrize("period", [1, 4])
def test_each_rule_is_traced_once_for_all_functions(period, monkeypatch):
    monkeypatch.setattr(ThreadsEngine, "prepare", lambda _, program: program.prepare(*FUNCTIONS))
    CALLS.clear()
    strategy = DistributedStrategy(tf_dsgd.LocalCluster(2), rules(period))
    fit(strategy)
    assert strategy.ledger().applied == strategy.updates > 0
    assert CALLS == {
        ("Local", "step"): 1,
        ("Local", "message"): 1,
        ("Local", "fetched"): 1,
        ("Server", "receive"): 1,
        ("Server", "fetched"): 1,
        ("Server", "answer"): 3,  # of each weight
    }


def test_the_order_in_which_functions_are_named_makes_no_difference(monkeypatch):
    cluster = {"compute_seconds": [1.0, 1.3], "network_seconds": 0.2, "seed": 0}
    weights = []
    for order in (FUNCTIONS, FUNCTIONS[::-1], ["fetch"]):
        monkeypatch.setattr(
            SimulatorEngine, "prepare", lambda _, program, names=order: program.prepare(*names)
        )
        strategy = DistributedStrategy(tf_dsgd.SimulatedCluster(2, **cluster), rules(2))
        weights.append(fit(strategy))
    for other in weights[1:]:
        for ours, theirs in zip(weights[0], other, strict=True):
            np.testing.assert_array_equal(ours, theirs)


def test_a_function_that_no_program_has_is_refused():
    strategy = tf_dsgd.DownpourStrategy(tf_dsgd.SimulatedCluster(2))
    fit(strategy)
    with pytest.raises(AttributeError, match="no_such_function"):
        strategy.engine.program.prepare("no_such_function")
