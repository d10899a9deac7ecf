"""A factor of 1/2 halves the step of every optimizer: plain Keras at half the rate."""

import pytest
from keras import optimizers

import tf_dsgd
from tests.equivalence import twin

OPTIMIZERS = {
    "sgd": lambda rate: optimizers.SGD(5.0 * rate),
    "nesterov": lambda rate: optimizers.SGD(5.0 * rate, momentum=0.9, nesterov=True),
    "adagrad": lambda rate: optimizers.Adagrad(10.0 * rate),
    "rmsprop": lambda rate: optimizers.RMSprop(rate, momentum=0.5, centered=True),
    "adadelta": lambda rate: optimizers.Adadelta(100.0 * rate),
    "adam": lambda rate: optimizers.Adam(rate),
    "adamw": lambda rate: optimizers.AdamW(rate, weight_decay=0.1, clipnorm=0.1),
    "schedule": lambda rate: optimizers.Adam(
        optimizers.schedules.ExponentialDecay(5.0 * rate, 4, 0.5)
    ),
}
STRATEGIES = {
    "downpour": tf_dsgd.DownpourStrategy,
    "softsync": lambda *args, **options: tf_dsgd.SoftsyncStrategy(
        *args, gradients_per_update=1, **options
    ),
}


@pytest.mark.few(2)
@pytest.mark.thin
@pytest.mark.parametrize("engine", twin.ENGINES)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_half_is_half_the_rate(name, strategy, engine):
    """A gradient of half the size would change nothing under Adagrad, RMSprop or Adam."""
    x, y = twin.data()
    want, _, _ = twin.fit(twin.mlp(lambda: OPTIMIZERS[name](0.01)), x, y)
    made = STRATEGIES[strategy](twin.ENGINES[engine](), staleness_scaling=lambda tau: 0.5)
    with made.scope():
        got, _, _ = twin.fit(twin.mlp(lambda: OPTIMIZERS[name](0.02)), x, y)
    twin.helpers.assert_close(twin.state(got.weights), twin.state(want.weights), 1e-6)
