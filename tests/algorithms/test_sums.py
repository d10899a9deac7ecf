"""Sums of gradients of weights whose type cannot hold them."""

import keras
import ml_dtypes
import numpy as np
import pytest

import tf_dsgd


@pytest.mark.parametrize("sparse", [False, True])
def test_many_gradients_of_bfloat16_are_all_in_the_sum(sparse):
    """In bfloat16 256 + 1 is 256."""
    gradient = ([0, 1], np.ones([2, 1])) if sparse else np.ones([2, 1])
    steps = [(0, "step", [gradient])] * 511
    result = tf_dsgd.simulate(
        tf_dsgd.DownpourStrategy(push_every=512, fetch_every=512),
        keras.optimizers.SGD(1.0),
        [np.zeros([2, 1], ml_dtypes.bfloat16)],
        [(0, "fetch"), *steps, (0, "push", [gradient])],
    )
    np.testing.assert_array_equal(np.asarray(result.weights[-1][0], float), -512.0)


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("scaling", [None, "inverse"])
def test_a_mean_of_float16_is_one_though_the_sum_is_none(sparse, scaling):
    """Four of 30,000 are more than 65,504."""
    gradient = ([0, 1], np.full([2, 1], 3e4)) if sparse else np.full([2, 1], 3e4)
    result = tf_dsgd.simulate(
        tf_dsgd.SoftsyncStrategy(gradients_per_update=4, staleness_scaling=scaling),
        keras.optimizers.SGD(2.0**-10),
        [np.zeros([2, 1], np.float16)],
        [event for m in range(4) for event in ((m, "fetch"), (m, "push", [gradient]))],
    )
    np.testing.assert_allclose(np.asarray(result.weights[-1][0], float), -3e4 / 1024, rtol=1e-3)
