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
