"""A strategy that users can reach runs through the conformance checks."""

import inspect

import tf_dsgd
from tests.conformance import registry


def test_every_public_strategy_is_registered():
    public = {
        name
        for name, value in inspect.getmembers(tf_dsgd)
        if name.endswith("Strategy") and not name.startswith("_") and inspect.isclass(value)
    }
    assert public == registry.STRATEGIES


def test_every_registered_strategy_has_a_configuration():
    made = {type(registry.make(name, "simulated")).__name__ for name in registry.CONFIGURATIONS}
    assert made == registry.STRATEGIES


def test_every_public_cluster_is_an_engine():
    """A bare cluster class that no check runs on would be untested."""
    public = {
        name
        for name, value in inspect.getmembers(tf_dsgd)
        if name.endswith("Cluster") and not name.startswith("_") and inspect.isclass(value)
    }
    assert public == {type(make()).__name__ for make in registry.ENGINES.values()}


def test_a_strategy_is_a_tf_distribute_strategy():
    import tensorflow as tf

    for name in registry.CONFIGURATIONS:
        strategy = registry.make(name, "local")
        assert isinstance(strategy, tf.distribute.Strategy)
        with strategy.scope():
            assert tf.distribute.get_strategy() is strategy
