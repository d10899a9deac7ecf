"""Where nothing is delayed, optimizers for delayed gradients are those they are made from."""

import keras
import pytest

import tf_dsgd
from tests import helpers
from tests.equivalence import twin
from tests.equivalence.models import MODELS
from tests.optimizers.pairs import OURS, PAIRS, assert_same_weights, pair
from tf_dsgd import optimizers

pytestmark = pytest.mark.medium


@pytest.mark.few(1)
@pytest.mark.thin
@pytest.mark.parametrize(
    "option", ["global_clipnorm", "weight_decay", "ema_overwritten", "schedule"]
)
@pytest.mark.parametrize("name", PAIRS)
def test_so_it_is_with_one_worker(name, option):
    """Here a fetch is remembered, and a message is 0 updates stale."""
    make_ours, make_theirs = pair(name, option)
    if (name, option) == ("delay_compensated", "weight_decay"):
        # Keras decays first, and the gradient is moved to the decayed weights: not SGD, but near.
        make_ours = twin.mlp(lambda: optimizers.DelayCompensatedSGD(0.1, 0.0, weight_decay=0.1))
    theirs, _, _ = twin.fit(make_theirs, *twin.data())
    with tf_dsgd.DownpourStrategy(helpers.workers(1)).scope():
        ours, _, _ = twin.fit(make_ours, *twin.data())
    assert_same_weights(ours, theirs)


@pytest.mark.few(2)
@pytest.mark.thin
@pytest.mark.parametrize("engine", twin.ENGINES)
@pytest.mark.parametrize("name", OURS)
def test_one_worker_equals_plain_keras(name, engine):
    """Slots too."""
    strategy = tf_dsgd.DownpourStrategy(twin.ENGINES[engine]())
    twin.assert_same_as_plain(twin.mlp(OURS[name]), strategy, *twin.data(), tolerance=2e-6)
    assert strategy.steps == strategy.updates == twin.STEPS


@pytest.mark.few(2)
@pytest.mark.parametrize("name", OURS)
def test_on_the_worker_it_equals_plain_keras(name):
    """Each worker sees its own updates at once: nothing is delayed, and nothing remembered."""
    strategy = tf_dsgd.DownpourStrategy(helpers.workers(1), local_rule="optimizer")
    model, _ = twin.assert_same_as_plain(
        twin.mlp(OURS[name]), strategy, *twin.data(), tolerance=2e-6
    )
    held = sum(v.shape.num_elements() * v.dtype.size for v in held_variables(model))
    assert sum(shard.bytes for shard in strategy.shards()) == held


def held_variables(model):
    """The variables of a model, its optimizer and its metrics, as TensorFlow's."""
    metrics = [v for metric in model.metrics for v in metric.variables]
    return [v.value for v in [*model.variables, *model.optimizer.variables, *metrics]]


@pytest.mark.few(1)
@pytest.mark.parametrize("name", OURS)
def test_gradient_accumulation(name):
    """In plain Keras, or on the worker, as Keras has it; on a shard it is refused."""

    def make():
        return type(OURS[name]()).from_config(
            {**OURS[name]().get_config(), "gradient_accumulation_steps": 2}
        )

    strategy = tf_dsgd.DownpourStrategy(helpers.workers(1), local_rule="optimizer")
    twin.assert_same_as_plain(twin.mlp(make), strategy, *twin.data(), tolerance=2e-6)
    with (
        pytest.raises(ValueError, match=r"Use push_every.*gradient_accumulation_steps=2"),
        tf_dsgd.DownpourStrategy(helpers.workers(1)).scope(),
    ):
        twin.fit(twin.mlp(make), *twin.data())


@pytest.mark.few(1)
@pytest.mark.parametrize("name", OURS)
def test_float16_with_overflow(name):
    keras.config.set_dtype_policy("mixed_float16")
    strategy = tf_dsgd.DownpourStrategy(helpers.workers(1))
    x, y = twin.data()
    _, plain = twin.assert_same_as_plain(
        twin.mlp(OURS[name]), strategy, x, 100.0 * y, tolerance=1e-4
    )
    assert float(plain.optimizer.dynamic_scale) < 2.0**15, "nothing overflowed"


@pytest.mark.few(1)
@pytest.mark.thin
@pytest.mark.parametrize("engine", twin.ENGINES)
@pytest.mark.parametrize("name", OURS)
def test_an_embedding_with_one_worker_equals_plain_keras(name, engine):
    _, data = MODELS["embedding"]

    def make():
        model = keras.Sequential(
            [
                keras.Input((6,), dtype="int32"),
                keras.layers.Embedding(40, 4),
                keras.layers.Flatten(),
                keras.layers.Dense(1),
            ]
        )
        model.compile(OURS[name](), "mse")
        return model

    strategy = tf_dsgd.DownpourStrategy(twin.ENGINES[engine]())
    twin.assert_same_as_plain(make, strategy, *data(), tolerance=2e-6)
