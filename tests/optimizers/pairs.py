"""Optimizers for delayed gradients, and what they are where nothing is delayed."""

import keras

from tests import helpers
from tests.equivalence import twin
from tests.equivalence.test_optimizers import schedule
from tf_dsgd import optimizers

# Ours, and Keras's that does the same without delays.
PAIRS = {
    "adaptive_revision": (
        optimizers.AdaptiveRevision,
        lambda rate, **options: keras.optimizers.Adagrad(
            rate, initial_accumulator_value=1.0, epsilon=0.0, **options
        ),
    ),
    "delay_compensated": (
        lambda rate, **options: optimizers.DelayCompensatedSGD(rate, lam=5.0, **options),
        keras.optimizers.SGD,
    ),
}
OPTIONS = {
    "plain": {},
    "clipnorm": {"clipnorm": 0.05},
    "clipvalue": {"clipvalue": 0.02},
    "global_clipnorm": {"global_clipnorm": 0.1},
    "weight_decay": {"weight_decay": 0.1},
    "ema": {"use_ema": True, "ema_momentum": 0.8},
    "ema_overwritten": {"use_ema": True, "ema_momentum": 0.8, "ema_overwrite_frequency": 4},
    "schedule": {},
}
OURS = {
    "adaptive_revision": lambda: optimizers.AdaptiveRevision(0.1),
    "delay_compensated": lambda: optimizers.DelayCompensatedSGD(0.1),
    "delay_compensated_adaptive": lambda: optimizers.DelayCompensatedSGD(0.1, 2.0, 0.95),
    "fasgd": lambda: optimizers.FASGD(0.01),
}


def pair(name, option):
    ours, kerass = PAIRS[name]
    rate = (lambda: 0.1) if option != "schedule" else schedule
    options = OPTIONS[option]
    return twin.mlp(lambda: ours(rate(), **options)), twin.mlp(lambda: kerass(rate(), **options))


def assert_same_weights(ours, theirs):
    helpers.assert_close(ours.get_weights(), theirs.get_weights(), 2e-6)
    assert int(ours.optimizer.iterations) == int(theirs.optimizer.iterations)
