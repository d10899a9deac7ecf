"""Periodic averaging against a twin in NumPy, closed forms, and plain Keras."""

import keras
import numpy as np
import pytest

import tf_dsgd
from tests import helpers
from tests.algorithms import averaging_twin as twins
from tests.contract.linear import BATCH, FEATURES, data, gradient, split

COMPUTE, NETWORK = [1.0, 1.713, 2.937], [0.25, 0.531, 0.117]  # no two turns at one instant
RATE = 0.02
OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(RATE),
    "momentum": lambda: keras.optimizers.SGD(RATE, momentum=0.9),
    "adam": lambda: keras.optimizers.Adam(RATE),
    "adagrad": lambda: keras.optimizers.Adagrad(RATE),
}


START = np.random.default_rng(3).standard_normal((FEATURES + 1, 1)).astype("float32")


def model_of(strategy, optimizer):
    with strategy.scope():
        model = keras.Sequential([keras.Input((FEATURES,)), keras.layers.Dense(1)])
        model.compile(optimizer(), loss="mse")
    model.set_weights([START[:-1], START[-1]])
    return model


def weights_of(model):
    kernel, bias = model.get_weights()
    return np.concatenate([kernel, bias[None]])


def fit(strategy, optimizer, x, y, **options):
    model = model_of(strategy, optimizer)
    model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0, **options)
    return weights_of(model), model


def simulated(num_workers=3):
    return tf_dsgd.SimulatedCluster(
        num_workers,
        compute_seconds=COMPUTE[:num_workers],
        network_seconds=NETWORK[:num_workers],
        seed=0,
    )


def averaging(cluster, every=4, policy="average", outer=None):
    return tf_dsgd.PeriodicAveragingStrategy(
        cluster, average_every=every, optimizer_state=policy, outer_optimizer=outer
    )


@pytest.mark.few(4)
@pytest.mark.thin(2)
@pytest.mark.parametrize("batches", [48, 53])
@pytest.mark.parametrize("policy", ["average", "local", "reset"])
@pytest.mark.parametrize("optimizer", ["momentum", "adam", "adagrad"])
def test_each_policy_equals_its_twin(optimizer, policy, batches):
    x, y = data(batches)
    twin = twins.Averaging(START, 3, 4, optimizer, RATE, policy)
    twin.run(3, COMPUTE, NETWORK, split(x, y))
    strategy = averaging(simulated(), policy=policy)
    weights, model = fit(strategy, OPTIMIZERS[optimizer], x, y)
    np.testing.assert_allclose(weights, twin.w, rtol=1e-4, atol=1e-5)
    assert strategy.updates == twin.version
    assert strategy.steps == batches
    assert int(model.optimizer.iterations) == batches // 3


@pytest.mark.slow
def test_policies_differ():
    x, y = data(48)
    for optimizer in ("momentum", "adam"):
        found = [
            fit(averaging(simulated(), policy=policy), OPTIMIZERS[optimizer], x, y)[0]
            for policy in ("average", "local", "reset")
        ]
        for i in range(3):
            assert np.abs(found[i] - found[i - 1]).max() > 1e-3, optimizer


def test_averaged_momentum_is_what_the_model_keeps():
    x, y = data(48)
    twin = twins.Averaging(START, 3, 4, "momentum", RATE, "average")
    twin.run(3, COMPUTE, NETWORK, split(x, y))
    _, model = fit(averaging(simulated()), OPTIMIZERS["momentum"], x, y)
    kernel, bias = (v.numpy() for v in model.optimizer.variables[2:])
    found = np.concatenate([kernel, bias[None]])
    np.testing.assert_allclose(found, twin.state[0], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("nesterov", [False, True])
def test_block_momentum_equals_the_papers_equations(nesterov):
    x, y = data(60)
    outer = twins.BlockMomentum(2 / 3, 0.9, nesterov)
    twin = twins.Averaging(START, 3, 4, "momentum", RATE, "reset", outer)
    twin.run(3, COMPUTE, NETWORK, split(x, y))
    block = tf_dsgd.optimizers.BlockMomentum(block_learning_rate=0.9, nesterov=nesterov)
    strategy = averaging(simulated(), policy="reset", outer=block)
    weights, _ = fit(strategy, OPTIMIZERS["momentum"], x, y)
    assert strategy.outer_optimizer.momentum == pytest.approx(1 - 1 / 3)
    np.testing.assert_allclose(weights, twin.w, rtol=1e-4, atol=1e-5)
    # The model W of the paper, from what the strategy holds:
    velocity = np.concatenate(
        [v.numpy().reshape(-1, 1) for v in strategy.outer_optimizer.variables[2:]]
    )
    ahead = strategy.outer_optimizer.momentum * velocity if nesterov else 0.0
    np.testing.assert_allclose(weights - ahead, outer.model, rtol=1e-4, atol=1e-5)


def test_block_momentum_follows_a_schedule_of_mini_batches():
    """All three workers average after 12 mini-batches in all; zeta is 0 from the third time on."""
    x, y = data(60)
    first = len(x) * 24 // 60
    plain = averaging(simulated(), policy="reset")
    two, _ = fit(plain, OPTIMIZERS["sgd"], x[:first], y[:first])
    zeta = keras.optimizers.schedules.PiecewiseConstantDecay([30], [1.0, 0.0])
    block = tf_dsgd.optimizers.BlockMomentum(0.0, zeta, nesterov=False)
    strategy = averaging(simulated(), policy="reset", outer=block)
    weights, _ = fit(strategy, OPTIMIZERS["sgd"], x, y)
    np.testing.assert_allclose(weights, two, rtol=1e-6, atol=1e-6)
    copy = type(block).from_config(block.get_config())
    assert copy.get_config() == block.get_config()


def test_diloco_by_hand():
    x, y = data(60)
    twin = twins.Averaging(START, 3, 4, "adam", RATE, "local", twins.DiLoCo(0.7, 0.9))
    twin.run(3, COMPUTE, NETWORK, split(x, y))
    outer = keras.optimizers.SGD(0.7, momentum=0.9, nesterov=True)
    strategy = averaging(simulated(), policy="local", outer=outer)
    weights, _ = fit(strategy, OPTIMIZERS["adam"], x, y)
    np.testing.assert_allclose(weights, twin.w, rtol=1e-4, atol=1e-5)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "outer",
    [
        lambda: keras.optimizers.SGD(1.0),
        lambda: tf_dsgd.optimizers.BlockMomentum(momentum=0.0),
    ],
    ids=["rate_1", "eta_0"],
)
def test_plain_outer_optimizers_are_plain_averaging(outer):
    x, y = data(53)
    plain, _ = fit(averaging(simulated()), OPTIMIZERS["adam"], x, y)
    weights, _ = fit(averaging(simulated(), outer=outer()), OPTIMIZERS["adam"], x, y)
    np.testing.assert_allclose(weights, plain, rtol=1e-6, atol=1e-6)


def two_workers(engine):
    return tf_dsgd.SimulatedCluster(2, seed=0) if engine == "simulated" else helpers.workers(2)


ENGINES = helpers.engines(local=None, simulated=None)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_period_of_one_is_synchronous_sgd_on_the_joint_batch(engine):
    x, y = data(40)
    strategy = averaging(two_workers(engine), every=1)
    weights, _ = fit(strategy, OPTIMIZERS["sgd"], x, y)
    w = START.astype("float64")
    for i in range(0, len(x), 2 * BATCH):
        w -= RATE * gradient(w, (x[i : i + 2 * BATCH], y[i : i + 2 * BATCH]))
    np.testing.assert_allclose(weights, w, rtol=1e-5, atol=1e-6)
    assert strategy.updates == 20


@pytest.mark.few(3)
@pytest.mark.thin(2)
@pytest.mark.parametrize("policy", ["average", "local"])
@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adam"])
@pytest.mark.parametrize("engine", ENGINES)
def test_equal_data_is_one_worker(engine, optimizer, policy):
    """Every worker gets the same batches: the mean of equal weights is what one of them has."""
    x, y = data(20)
    twice = np.concatenate([np.concatenate([part, part]) for part in np.split(x, 20)])
    targets = np.concatenate([np.concatenate([part, part]) for part in np.split(y, 20)])
    strategy = averaging(two_workers(engine), every=1, policy=policy)
    weights, model = fit(strategy, OPTIMIZERS[optimizer], twice, targets)
    plain = keras.Sequential([keras.Input((FEATURES,)), keras.layers.Dense(1)])
    plain.compile(OPTIMIZERS[optimizer](), loss="mse")
    plain.set_weights([START[:-1], START[-1]])
    plain.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)
    np.testing.assert_allclose(weights, weights_of(plain), rtol=1e-6, atol=1e-6)
    assert int(model.optimizer.iterations) == int(plain.optimizer.iterations) == 20


@pytest.mark.parametrize("every", [1, 7])
def test_one_worker_is_plain_keras(every):
    x, y = data(20)

    def compiled():
        return keras.optimizers.AdamW(RATE, use_ema=True, ema_momentum=0.9, clipnorm=1.0)

    weights, model = fit(averaging(tf_dsgd.LocalCluster(1), every=every), compiled, x, y, epochs=2)
    plain = keras.Sequential([keras.Input((FEATURES,)), keras.layers.Dense(1)])
    plain.compile(compiled(), loss="mse")
    plain.set_weights([START[:-1], START[-1]])
    plain.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0, epochs=2)
    np.testing.assert_allclose(weights, weights_of(plain), rtol=1e-6, atol=1e-6)
    for mine, theirs in zip(model.optimizer.variables, plain.optimizer.variables, strict=True):
        np.testing.assert_allclose(mine.numpy(), theirs.numpy(), rtol=1e-5, atol=1e-7)


def test_integers_by_hand():
    """Gradient 1, rate 1: worker A does 3 steps to B's 1 where 4 batches are left of a period."""
    strategy = averaging(tf_dsgd.SimulatedCluster(2, compute_seconds=[1.0, 10.0], seed=0), every=3)
    with strategy.scope():
        model = helpers.constant_gradient_model(keras.optimizers.SGD(1.0))
    x, y = helpers.ones(4)
    before = float(model.get_weights()[0][0, 0])
    model.fit(x, y, batch_size=1, verbose=0)
    # A at -3, B at -1, by work: (3 * -3 + 1 * -1) / 4.
    assert float(model.get_weights()[0][0, 0]) - before == pytest.approx(-2.5)
    assert strategy.updates == 1


def test_the_period_may_change():
    """Post-local SGD: averages at every step, then at every fourth; across epochs."""
    asked = []

    def period(step):
        asked.append(step)
        return 1 if step < 6 else 4

    strategy = averaging(simulated(2), every=period)
    x, y = data(20)
    fit(strategy, OPTIMIZERS["sgd"], x, y, epochs=3)  # 10 steps a worker and epoch
    # Epoch 1: 6 single ones, then one of 4. Epochs 2 and 3: 4, 4, 2.
    assert strategy.updates == 7 + 3 + 3
    assert set(asked) >= {0, 1, 5, 6, 10, 14, 18, 20}
    assert max(asked) < 30  # a table of the periods is long enough that ends with the run


@pytest.mark.few(1)
@pytest.mark.thin
@pytest.mark.parametrize("optimizer", ["momentum", "adam"])
@pytest.mark.parametrize("policy", ["average", "local", "reset"])
def test_a_scaled_loss_changes_nothing(policy, optimizer):
    """By a power of two, which floats divide by exactly; LossScaleOptimizer has one inside."""

    def scaled():
        inner = OPTIMIZERS[optimizer]()
        return keras.optimizers.LossScaleOptimizer(inner, initial_scale=16.0)

    x, y = data(24)
    weights = []
    for make in (OPTIMIZERS[optimizer], scaled):
        weights.append(fit(averaging(simulated(2), every=2, policy=policy), make, x, y)[0])
    helpers.assert_close(weights[1], weights[0], 1e-6)


def test_moving_statistics_are_those_of_all_mini_batches_with_none_first():
    strategy = averaging(simulated(2), every=5)
    with strategy.scope():
        model = keras.Sequential(
            [keras.Input((1,)), keras.layers.BatchNormalization(momentum=0.9, scale=False)]
        )
        model.compile(keras.optimizers.SGD(0.0), "mse")
    x = np.repeat(np.arange(10.0, dtype="float32"), 4)[:, None]  # batch b is of b alone
    model.fit(x, x, batch_size=4, shuffle=False, verbose=0)
    # Turns at 0: A takes batches 0-4, B 5-9. What each adds to 0.9^5 of the zero it began with:
    added = [sum(0.1 * 0.9 ** (4 - k) * (first + k) for k in range(5)) for first in (0, 5)]
    mean = sum(added) / (2 * (1 - 0.9**5))
    found = [v.numpy() for v in model.non_trainable_variables if "moving_mean" in v.path]
    np.testing.assert_allclose(found[0], [(1 - 0.9**10) * mean], rtol=1e-5)


@pytest.mark.parametrize("outer", [None, keras.optimizers.SGD(1.0)])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_weights_of_16_bits_are_added_up_in_float32(dtype, outer):
    """21 times 1e4 is no number of float16; 21 times the other has more bits than bfloat16."""
    first = {"float16": 1e4, "bfloat16": 1 + 2**-7}[dtype]
    outer = outer and keras.optimizers.SGD.from_config(outer.get_config())
    strategy = averaging(simulated(3), every=7, outer=outer)
    with strategy.scope():
        layer = keras.layers.Dense(
            1, use_bias=False, dtype=dtype, kernel_initializer=keras.initializers.Constant(first)
        )
        model = keras.Sequential([keras.Input((1,)), layer])
        model.compile(keras.optimizers.SGD(0.0), "mse")
    model.fit(np.zeros((42, 1)), np.zeros((42, 1)), batch_size=1, verbose=0)
    assert strategy.updates == 2
    assert float(layer.kernel.numpy().astype("float32")[0, 0]) == first


def test_moving_statistics_of_16_bits_are_added_up_in_float32():
    strategy = averaging(simulated(3), every=2)
    with strategy.scope():
        layer = keras.layers.BatchNormalization(momentum=0.9, dtype="float16")
        model = keras.Sequential([keras.Input((1,)), layer])
        model.compile(keras.optimizers.SGD(0.0), "mse")
    layer.moving_variance.assign([6e4])
    model.fit(np.zeros((48, 1)), np.zeros((48, 1)), batch_size=4, verbose=0)
    np.testing.assert_allclose(layer.moving_variance.numpy(), [6e4 * 0.9**12], rtol=6e-3)


def test_a_reset_that_would_lose_gradients_is_refused():
    strategy = averaging(simulated(2), policy="reset")
    x, y = data(8)
    with pytest.raises(ValueError, match=r"reset.*gradient_accumulation_steps=2"):
        fit(strategy, lambda: keras.optimizers.SGD(RATE, gradient_accumulation_steps=2), x, y)


def test_a_reset_that_would_begin_an_average_of_weights_anew_is_refused():
    x, y = data(8)
    with pytest.raises(ValueError, match=r"reset.*use_ema=True of adam"):
        fit(
            averaging(simulated(2), policy="reset"),
            lambda: keras.optimizers.Adam(use_ema=True),
            x,
            y,
        )
