"""Where nothing is delayed, optimizers for delayed gradients are those they are made from."""

import keras
import numpy as np
import pytest

import tf_dsgd
from tests import helpers
from tests.equivalence import twin
from tests.equivalence.models import MODELS
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


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("name", PAIRS)
def test_in_plain_keras_it_is_what_it_is_made_from(name, option):
    make_ours, make_theirs = pair(name, option)
    assert_same_weights(
        twin.fit(make_ours, *twin.data())[0], twin.fit(make_theirs, *twin.data())[0]
    )


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


@pytest.mark.parametrize("engine", twin.ENGINES)
@pytest.mark.parametrize("name", OURS)
def test_one_worker_equals_plain_keras(name, engine):
    """Slots too."""
    strategy = tf_dsgd.DownpourStrategy(twin.ENGINES[engine]())
    twin.assert_same_as_plain(twin.mlp(OURS[name]), strategy, *twin.data(), tolerance=2e-6)
    assert strategy.steps == strategy.updates == twin.STEPS


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


@pytest.mark.parametrize("name", OURS)
def test_float16_with_overflow(name):
    keras.config.set_dtype_policy("mixed_float16")
    strategy = tf_dsgd.DownpourStrategy(helpers.workers(1))
    x, y = twin.data()
    _, plain = twin.assert_same_as_plain(
        twin.mlp(OURS[name]), strategy, x, 100.0 * y, tolerance=1e-4
    )
    assert float(plain.optimizer.dynamic_scale) < 2.0**15, "nothing overflowed"


@pytest.mark.parametrize("name", OURS)
def test_sparse_gradients_do_what_dense_ones_do(name):
    """In plain Keras; ids that repeat in a batch count as their sum, as they do in a dense one."""
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 20, (48, 4)), rng.standard_normal((48, 1)).astype("float32")
    weights = []
    for sparse in (True, False):
        keras.utils.set_random_seed(1)
        model = keras.Sequential(
            [keras.Input((4,), dtype="int32"), Table(sparse), keras.layers.Dense(1)]
        )
        model.compile(OURS[name](), "mse")
        # Every row in every batch, so that means of a row's messages are means of all messages.
        every = np.tile(np.arange(20), (1, 1)).repeat(8, 0)
        for k in range(6):
            batch = np.concatenate([x[8 * k : 8 * k + 8], every], 1)
            model.train_on_batch(batch, y[8 * k : 8 * k + 8])
        weights.append(model.get_weights())
    helpers.assert_close(*weights, 1e-5)


class Table(keras.layers.Layer):
    """The mean of rows of a table, whose gradient is sparse, or dense by a one-hot product."""

    def __init__(self, sparse):
        super().__init__()
        self.sparse = sparse
        start = keras.initializers.RandomUniform(-0.05, 0.05, seed=3)
        self.table = self.add_weight(shape=(20, 3), initializer=start, name="table")

    def call(self, ids):
        if self.sparse:
            return keras.ops.mean(keras.ops.take(self.table, ids, axis=0), 1)
        return keras.ops.mean(keras.ops.matmul(keras.ops.one_hot(ids, 20), self.table), 1)

    def compute_output_shape(self, shape):
        return (shape[0], 3)


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
