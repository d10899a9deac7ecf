"""Downpour against traces in integers that were worked out by hand.

The model is one weight w, the loss of a batch with target v is (w - v)^2 / 2, so its gradient is
w - v, and every rate is 1.
"""

import keras
import numpy as np
import pytest

import tf_dsgd
from tests import helpers


def half_square(y_true, y_pred):
    return 0.5 * keras.ops.mean(keras.ops.square(y_true - y_pred), axis=-1)


def one_weight(strategy, rate=1.0):
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((1,)),
                keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros"),
            ]
        )
        model.compile(keras.optimizers.SGD(rate), half_square)
    return model


def fit(model, targets):
    y = np.array(targets, "float32")[:, None]
    model.fit(np.ones_like(y), y, batch_size=1, shuffle=False, verbose=0)
    return float(model.get_weights()[0][0, 0])


# Two workers, A takes 2 seconds for a batch and B 5; periods of 1; the targets are in TARGETS.
#
# The network takes no time:
#   t = 0   A fetches w = 0, takes 1.   B fetches w = 0, takes 2.
#   t = 2   A pushes 0 - 1 = -1: w =  1, version 1, staleness 0.   A fetches 1, takes 3.
#   t = 4   A pushes 1 - 3 = -2: w =  3, version 2, staleness 0.   A fetches 3, takes 4.
#   t = 5   B pushes 0 - 2 = -2: w =  5, version 3, staleness 2.   B fetches 5, takes 7.
#   t = 6   A pushes 3 - 4 = -1: w =  6, version 4, staleness 1.   A fetches 6, takes 9.
#   t = 8   A pushes 6 - 9 = -3: w =  9, version 5, staleness 0.   Nothing is left for A.
#   t = 10  B pushes 5 - 7 = -2: w = 11, version 6, staleness 2.
#
# The network takes 1 second each way: A's round takes 1 + 2 + 1, from a fetch of what the shard
# holds to the push's arrival, and B's 1 + 5 + 1:
#   t = 0   A fetches w = 0, takes 1.   B fetches w = 0, takes 2.
#   t = 4   A's 0 - 1 = -1 arrives: w =  1, version 1, staleness 0.   A fetches 1, takes 3.
#   t = 7   B's 0 - 2 = -2 arrives: w =  3, version 2, staleness 1.   B fetches 3, takes 4.
#   t = 8   A's 1 - 3 = -2 arrives: w =  5, version 3, staleness 1.   A fetches 5, takes 7.
#   t = 12  A's 5 - 7 = -2 arrives: w =  7, version 4, staleness 0.   A fetches 7, takes 9.
#   t = 14  B's 3 - 4 = -1 arrives: w =  8, version 5, staleness 2.   Nothing is left for B.
#   t = 16  A's 7 - 9 = -2 arrives: w = 10, version 6, staleness 1.
#
# LAST holds the weight at the end of a run of the first 1 to 6 batches.
TARGETS = [1, 2, 3, 4, 7, 9]
LAST = {0.0: [1, 3, 5, 6, 8, 11], 1.0: [1, 3, 5, 6, 8, 10]}


@pytest.mark.thin
@pytest.mark.parametrize("count", range(1, 7))
@pytest.mark.parametrize("network", LAST)
def test_two_workers_of_different_speed(network, count):
    cluster = tf_dsgd.SimulatedCluster(
        2, compute_seconds=[2.0, 5.0], network_seconds=network, seed=0
    )
    strategy = tf_dsgd.DownpourStrategy(cluster)
    model = one_weight(strategy)
    assert fit(model, TARGETS[:count]) == LAST[network][count - 1]
    assert strategy.updates == int(model.optimizer.iterations) == count
    if count == 6:
        assert [worker.steps for worker in strategy.ledger().workers] == [4, 2]
        staleness = strategy.staleness()
        assert staleness.mean == pytest.approx(5 / 6)  # 0 0 2 1 0 2, and 0 1 1 0 2 1
        assert (staleness.max, staleness.count) == (2, 6)
        assert 0 <= staleness.p50 <= 1  # the median, by whichever convention


# One worker, push_every=2, fetch_every=3; s is its step, L its copy, a what it has accrued.
#
#   s  fetch    target  local rule "sgd": g,  L,  a   server   |  "none": L,  g,  a   server
#   0  yes      4                        -4,  4, -4            |          0, -4, -4
#   1           1                         3,  1, -1   push:  1 |          0, -1, -5   push:  5
#   2           7                        -6,  7, -6            |          0, -7, -7
#   3  yes      2      (L = 1 before)    -1,  2, -7   push:  8 |          5,  3, -4   push:  9
#   4           5                        -3,  5, -3            |          5,  0,  0
#   5           9                        -4,  9, -7   push: 15 |          5, -4, -4   push: 13
#   6  yes      3      (L = 15 before)   12,  3, 12            |         13, 10, 10
#   drain                                            push:  3 |                      push:  3
#
# Stopped after n batches the drain pushes what is accrued.
PERIOD_TARGETS = [4, 1, 7, 2, 5, 9, 3]
PERIOD_LAST = {"sgd": [4, 1, 7, 8, 11, 15, 3], "none": [4, 5, 12, 9, 9, 13, 3]}


@pytest.mark.thin
@pytest.mark.parametrize("engine", ["local", "simulated"])
@pytest.mark.parametrize("local_rule", PERIOD_LAST)
def test_periods_of_two_and_three(local_rule, engine):
    cluster = (
        helpers.workers(1)
        if engine == "local"
        else tf_dsgd.SimulatedCluster(1, compute_seconds=1.0, network_seconds=0.0, seed=0)
    )
    strategy = tf_dsgd.DownpourStrategy(cluster, push_every=2, fetch_every=3, local_rule=local_rule)
    model = one_weight(strategy)
    seen = []
    for count in range(1, len(PERIOD_TARGETS) + 1):
        model.set_weights([np.zeros((1, 1))])  # assigning restarts the periods and is fetched
        seen.append(fit(model, PERIOD_TARGETS[:count]))
    assert seen == PERIOD_LAST[local_rule]
    assert strategy.updates == sum(-(-count // 2) for count in range(1, 8))
    assert strategy.steps == sum(range(1, 8))


def test_a_zero_gradient_changes_nothing():
    """Periods of K and zero gradients after the first leave the one step of that first gradient."""
    strategy = tf_dsgd.DownpourStrategy(helpers.workers(1), push_every=4, fetch_every=4)
    assert fit(one_weight(strategy), [6, 6, 6, 6]) == 6.0
    assert strategy.updates == 1


def test_the_local_rate_may_differ_from_the_servers():
    """LocalSGD(2): g = 0 - 4, L = 8; g = 8 - 1 = 7; pushed -4 + 7 = 3: w = -3 with rate 1."""
    strategy = tf_dsgd.DownpourStrategy(
        helpers.workers(1), push_every=2, fetch_every=2, local_rule=tf_dsgd.LocalSGD(2.0)
    )
    assert fit(one_weight(strategy), [4, 1]) == -3.0


def test_reading_the_weights_drains():
    """A callback that reads weights at each batch turns push_every=4 into pushes of one."""
    strategy = tf_dsgd.DownpourStrategy(helpers.workers(1), push_every=4, fetch_every=4)
    model = one_weight(strategy)
    seen = []
    read = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: seen.append(float(model.get_weights()[0][0, 0]))
    )
    y = np.array([[4], [1], [7]], "float32")
    model.fit(np.ones_like(y), y, batch_size=1, shuffle=False, verbose=0, callbacks=[read])
    assert seen == [4.0, 1.0, 7.0]
    assert strategy.updates == 3
