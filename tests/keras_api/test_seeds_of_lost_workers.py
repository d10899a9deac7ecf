"""What a checkpoint holds of random numbers, where workers are lost as it is written."""

import keras
import numpy as np
import pytest

import tf_dsgd

pytestmark = pytest.mark.medium


def test_lost_workers_draw_other_numbers_than_each_other_and_than_before():
    faults = [tf_dsgd.faults.fail_at(worker=m, step=6) for m in (0, 1, 2)]
    cluster = tf_dsgd.SimulatedCluster(4, compute_seconds=1.0, network_seconds=0.1, faults=faults)
    strategy = tf_dsgd.DownpourStrategy(cluster)
    with strategy.scope():
        layers = [keras.Input((4,)), keras.layers.Dropout(0.5, seed=3), keras.layers.Dense(1)]
        model = keras.Sequential(layers)
        model.compile("sgd", "mse")
    (seed,) = (v for v in model.non_trainable_variables if "seed" in v.path)
    first = [seed.value.first_value(m).tolist() for m in range(4)]
    model.fit(np.ones((160, 4)), np.ones((160, 1)), batch_size=4, verbose=0)
    assert len(strategy.ledger().workers) == 4
    (saved,) = (
        value
        for name, value in strategy.state().items()
        if name.endswith("_of_workers") and value.shape == (4, 2) and value.dtype.kind in "ui"
    )
    drawn = saved.tolist()
    assert len({tuple(each) for each in [*drawn, *first]}) == 8
