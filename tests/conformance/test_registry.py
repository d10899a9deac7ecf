"""A strategy that users can reach runs through the conformance checks."""

import inspect

import tf_dsgd
from tests import helpers
from tests.conformance import registry
from tf_dsgd.optimizers import delay


def test_every_public_strategy_is_registered():
    public = {
        name
        for name, value in inspect.getmembers(tf_dsgd)
        if name.endswith("Strategy") and not name.startswith("_") and inspect.isclass(value)
    }
    assert public == registry.STRATEGIES | set(registry.NOT_HERE)


def test_what_is_left_out_has_tests_of_its_own():
    for reason in registry.NOT_HERE.values():
        assert (helpers.ROOT / reason.split()[-1]).is_file()


def test_every_registered_strategy_has_a_configuration():
    engine = next(iter(registry.ENGINES))
    made = {type(registry.make(name, engine)).__name__ for name in registry.CONFIGURATIONS}
    assert made == registry.STRATEGIES


def test_every_public_codec_is_on_every_strategy_that_takes_it():
    public = {getattr(tf_dsgd.compression, name) for name in tf_dsgd.compression.__all__}
    assert public == {type(codec) for codec in registry.CODECS.values()}
    one = registry.CODECS["threshold"]
    made = {type(make(None, compression=one)).__name__ for make in registry.TAKE_CODECS.values()}
    takes = {name for name in registry.STRATEGIES if _takes_codecs(getattr(tf_dsgd, name))}
    assert made == takes


def _takes_codecs(strategy):
    return "compression" in inspect.signature(strategy).parameters


def test_every_optimizer_that_looks_at_delays_is_compiled():
    public = {
        value
        for _, value in inspect.getmembers(tf_dsgd.optimizers, inspect.isclass)
        if issubclass(value, delay.DelayTolerantOptimizer)
    }
    compiled = {type(make()) for make in registry.OPTIMIZERS.values()}
    assert public == {c for c in compiled if issubclass(c, delay.DelayTolerantOptimizer)}
    assert set(registry.OPTIMIZERS) <= set(registry.CONFIGURATIONS)


def test_every_public_cluster_is_an_engine():
    """A bare cluster class that no check runs on would be untested."""
    public = {
        name
        for name, value in inspect.getmembers(tf_dsgd)
        if name.endswith("Cluster") and not name.startswith("_") and inspect.isclass(value)
    }
    made = {type(make()).__name__ for make in registry.ENGINES.values()}
    # Processes: tests/cluster/test_conformance.py runs these checks under the launcher.
    assert public == made | {"TFCluster"} or helpers.ON_CLUSTER


def test_a_strategy_is_a_tf_distribute_strategy():
    import tensorflow as tf

    for name in registry.CONFIGURATIONS:
        strategy = registry.make(name, next(iter(registry.ENGINES)))
        assert isinstance(strategy, tf.distribute.Strategy)
        with strategy.scope():
            assert tf.distribute.get_strategy() is strategy
