"""Settings in which a closed form, or another optimizer's result, is known."""

import keras
import numpy as np
import pytest

import tf_dsgd
from tests import helpers
from tests.equivalence import twin
from tests.optimizers.bench import Bench
from tf_dsgd import optimizers

SHAPE = (3, 2)
START = np.linspace(-1.0, 1.0, 6).reshape(SHAPE)


def bench(optimizer, workers=3):
    made = Bench(optimizer, workers, SHAPE)
    made.reset(START)
    for m in range(workers):
        made.fetch(m)
    return made


# -- AdaptiveRevision ---------------------------------------------------------------------------


@pytest.mark.parametrize("initial", [1.0, 0.1])
def test_if_nobody_fetches_again_the_sum_of_gradients_makes_one_step(initial):
    """x - x0 = -alpha S / sqrt(z'), z = z0 + S^2 and z' the largest z so far, for any order."""
    ours = bench(lambda: optimizers.AdaptiveRevision(0.5, initial))
    random = np.random.default_rng(0)
    total, largest = np.zeros(SHAPE), np.full(SHAPE, initial)
    for _ in range(40):
        gradient = random.normal(0.2, 1.0, SHAPE).astype("float32")
        ours.push(random.integers(3), gradient)
        total = total + gradient
        largest = np.maximum(largest, initial + total**2)
        gbar, z, top = ours.slots()
        np.testing.assert_allclose(gbar, total, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(z, initial + total**2, rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(top, largest, rtol=1e-4)
        want = START - 0.5 * total / np.sqrt(largest)
        np.testing.assert_allclose(ours.weight(), want, rtol=1e-4, atol=1e-5)
    assert (largest > initial + total**2).any(), "z never fell below its maximum"


def test_a_worker_that_fetches_after_every_message_is_plain_adagrad():
    """Whatever the others do not do: no message is stale, so nothing is revised."""
    ours = bench(lambda: optimizers.AdaptiveRevision(0.5))
    gradients = np.random.default_rng(1).normal(size=(20, *SHAPE))
    for k, gradient in enumerate(gradients):
        ours.fetch(k % 3)
        ours.push(k % 3, gradient)
    z = 1.0 + np.cumsum(gradients**2, 0)
    want = START - (0.5 * gradients / np.sqrt(z)).sum(0)
    np.testing.assert_allclose(ours.weight(), want, rtol=1e-5, atol=1e-5)


def test_the_alias_is_the_same_class():
    assert optimizers.DelayTolerantAdagrad is optimizers.AdaptiveRevision


# -- DelayCompensatedSGD ------------------------------------------------------------------------


def test_a_gradient_is_moved_to_the_current_weights_where_lam_g_g_is_the_hessian():
    """Loss w^2 / 2 at w_seen = 2: g = 2, H = 1 = lam g g for lam = 1/4; then w - eta w."""
    ours = Bench(lambda: optimizers.DelayCompensatedSGD(0.25, lam=0.25), 2, SHAPE)
    ours.reset(np.full(SHAPE, 2.0))
    ours.fetch(0)
    ours.fetch(1)
    ours.push(0, np.full(SHAPE, 4.0))  # w = 1
    np.testing.assert_array_equal(ours.weight(), np.full(SHAPE, 1.0))
    ours.push(1, np.full(SHAPE, 2.0))  # the gradient at 2, moved to 1: 2 + 1/4 * 4 * (1 - 2)
    np.testing.assert_array_equal(ours.weight(), np.full(SHAPE, 0.75))


def test_each_worker_is_compensated_from_what_it_fetched_itself():
    """w = 0; 0 fetches; 1's g = -4: w = 4; 1 fetches; then 1 drifts by 0 and 0 by 4 or more.

    From 1: g = 2 + 0.5 * 4 * 0 = 2: w = 2. From 0: g = 2 + 0.5 * 4 * (2 - 0) = 6: w = -4. A memory
    common to both, of the last fetch, would have given 2 + 0.5 * 4 * (2 - 4) = -2, and w = 4.
    """
    ours = Bench(lambda: optimizers.DelayCompensatedSGD(1.0, lam=0.5), 2, SHAPE)
    ours.reset(np.zeros(SHAPE))
    ours.fetch(0)
    ours.fetch(1)
    ours.push(1, np.full(SHAPE, -4.0))
    ours.fetch(1)
    ours.push(1, np.full(SHAPE, 2.0))
    ours.push(0, np.full(SHAPE, 2.0))
    np.testing.assert_array_equal(ours.weight(), np.full(SHAPE, -4.0))


def delayed_run(optimizer):
    """A fit of three simulated workers, the same order of messages every time."""
    cluster = tf_dsgd.SimulatedCluster(
        3, compute_seconds=[1.0, 1.713, 2.937], network_seconds=0.25, seed=0
    )
    strategy = tf_dsgd.DownpourStrategy(cluster)
    with strategy.scope():
        model, _, _ = twin.fit(twin.mlp(optimizer), *twin.data())
    assert strategy.staleness().max >= 2
    return model.get_weights()


@pytest.mark.few(1)
@pytest.mark.parametrize("decay", [None, 0.9])
def test_without_lambda_it_is_sgd_at_any_delay(decay):
    ours = delayed_run(lambda: optimizers.DelayCompensatedSGD(0.1, 0.0, decay))
    helpers.assert_close(ours, delayed_run(lambda: keras.optimizers.SGD(0.1)), 1e-6)
    moved = delayed_run(lambda: optimizers.DelayCompensatedSGD(0.1, 1.0, decay))
    assert max(abs(a - b).max() for a, b in zip(ours, moved, strict=True)) > 1e-4


# -- FASGD --------------------------------------------------------------------------------------


def test_a_step_is_divided_by_its_staleness_and_by_at_least_one():
    """beta near 1 and v_0 = 1: v stays 1, and a step is alpha g / max(tau, 1)."""
    ours = bench(lambda: optimizers.FASGD(1.0, beta=1 - 1e-7), workers=3)
    for m, divisor in ((0, 1), (1, 1), (2, 2), (0, 3)):  # tau = 0, 1, 2, 3
        before = ours.weight()
        ours.push(m, np.full(SHAPE, 6.0))
        np.testing.assert_allclose(before - ours.weight(), 6.0 / divisor, rtol=1e-5)


def test_a_constant_gradient_leaves_the_deviation_of_its_moving_averages():
    """beta = 0 and g = c: n - b^2 = c^2 (1 - q) q with q = gamma^k after k messages."""
    ours = bench(lambda: optimizers.FASGD(1.0, gamma=0.5, beta=0.0, epsilon=1e-12), workers=1)
    for k in range(1, 6):
        before = ours.weight()
        ours.fetch(0)
        ours.push(0, np.full(SHAPE, 3.0))
        q = 0.5**k
        want = 3.0 / (3.0 * np.sqrt(q * (1 - q)))
        np.testing.assert_allclose(before - ours.weight(), want, rtol=1e-4)
