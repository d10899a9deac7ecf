"""One worker and periods of 1: every optimizer, with its options, ends where plain Keras does."""

import keras
import pytest
from keras import optimizers

import tf_dsgd
from tests import helpers
from tests.equivalence import twin

OPTIMIZERS = {
    "sgd": lambda: optimizers.SGD(0.05),
    "momentum": lambda: optimizers.SGD(0.05, momentum=0.9),
    "nesterov": lambda: optimizers.SGD(0.05, momentum=0.9, nesterov=True),
    "adagrad": lambda: optimizers.Adagrad(0.1),
    "rmsprop": lambda: optimizers.RMSprop(0.01),
    "rmsprop_centered": lambda: optimizers.RMSprop(0.01, momentum=0.9, centered=True),
    "adadelta": lambda: optimizers.Adadelta(1.0),
    "adam": lambda: optimizers.Adam(0.01),
    "amsgrad": lambda: optimizers.Adam(0.01, amsgrad=True),
    "adamw": lambda: optimizers.AdamW(0.01, weight_decay=0.1),
}
OTHERS = {  # not promised by name, but `compile` takes them: state of other shapes
    "nadam": lambda: optimizers.Nadam(0.01),
    "adafactor": lambda: optimizers.Adafactor(0.01),
    "lamb": lambda: optimizers.Lamb(0.01),
    "lion": lambda: optimizers.Lion(0.01),
    "ftrl": lambda: optimizers.Ftrl(0.1),
}


def schedule():
    return optimizers.schedules.PiecewiseConstantDecay([3, 7], [0.1, 0.02, 0.005])


def scaled(inner, **scaling):
    return lambda: optimizers.LossScaleOptimizer(inner(), **scaling)


OPTIONS = {
    "clipnorm": lambda: optimizers.SGD(0.1, momentum=0.9, clipnorm=0.05),
    "clipvalue": lambda: optimizers.Adagrad(0.1, clipvalue=0.02),
    "global_clipnorm": lambda: optimizers.SGD(0.1, momentum=0.9, global_clipnorm=0.1),
    "weight_decay": lambda: optimizers.SGD(0.1, momentum=0.9, weight_decay=0.1),
    "ema_overwritten_at_the_end": lambda: optimizers.SGD(0.1, use_ema=True, ema_momentum=0.8),
    "ema_overwritten_every_4": lambda: optimizers.Adam(
        0.05, use_ema=True, ema_momentum=0.8, ema_overwrite_frequency=4
    ),
    "accumulation_sgd": lambda: optimizers.SGD(0.1, gradient_accumulation_steps=3),
    "accumulation_over_the_epoch": lambda: optimizers.Adam(0.05, gradient_accumulation_steps=4),
    "schedule_sgd": lambda: optimizers.SGD(schedule()),
    "schedule_adam": lambda: optimizers.Adam(optimizers.schedules.ExponentialDecay(0.05, 4, 0.5)),
    "loss_scale_factor": lambda: optimizers.SGD(0.1, momentum=0.9, loss_scale_factor=64.0),
    "loss_scale_factor_clipped": lambda: optimizers.Adam(
        0.05, loss_scale_factor=64.0, global_clipnorm=0.1
    ),
    "loss_scale_constant": scaled(OPTIMIZERS["adam"], initial_scale=64.0),
    "loss_scale_grows": scaled(OPTIMIZERS["momentum"], initial_scale=4.0, dynamic_growth_steps=3),
    "multi": lambda: optimizers.MultiOptimizer(
        optimizers.OptimizerMap(
            optimizers.SGD(0.1, momentum=0.9, use_ema=True, ema_overwrite_frequency=4),
            {".*/kernel": optimizers.Adam(schedule(), clipnorm=0.1)},
        )
    ),
    "all_at_once": lambda: optimizers.AdamW(
        optimizers.schedules.ExponentialDecay(0.05, 4, 0.5),
        weight_decay=0.05,
        clipnorm=0.1,
        use_ema=True,
        ema_momentum=0.9,
        ema_overwrite_frequency=2,
        gradient_accumulation_steps=2,
    ),
}


@pytest.mark.few(5)
@pytest.mark.thin
@pytest.mark.parametrize("engine", twin.ENGINES)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer(name, engine):
    strategy = tf_dsgd.DownpourStrategy(twin.ENGINES[engine]())
    model, _ = twin.assert_same_as_plain(twin.mlp(OPTIMIZERS[name]), strategy, *twin.data())
    assert int(model.optimizer.iterations) == strategy.steps == strategy.updates == twin.STEPS


@pytest.mark.few(6)
@pytest.mark.thin
@pytest.mark.parametrize("engine", twin.ENGINES)
@pytest.mark.parametrize("name", OPTIONS)
def test_option(name, engine):
    strategy = tf_dsgd.DownpourStrategy(twin.ENGINES[engine]())
    twin.assert_same_as_plain(twin.mlp(OPTIONS[name]), strategy, *twin.data())
    assert strategy.steps == twin.STEPS


@pytest.mark.few(2)
@pytest.mark.parametrize("name", OTHERS)
def test_other_optimizer(name):
    strategy = tf_dsgd.DownpourStrategy(helpers.workers(1))
    twin.assert_same_as_plain(twin.mlp(OTHERS[name]), strategy, *twin.data())


@pytest.mark.few(3)
@pytest.mark.thin
@pytest.mark.parametrize("engine", twin.ENGINES)
@pytest.mark.parametrize(
    "constraint",
    [
        keras.constraints.NonNeg(),
        keras.constraints.MaxNorm(0.4),
        keras.constraints.UnitNorm(),
    ],
    ids=["non_negative", "max_norm", "unit_norm"],
)
def test_constraint(constraint, engine):
    strategy = tf_dsgd.DownpourStrategy(twin.ENGINES[engine]())
    make = twin.mlp(OPTIMIZERS["momentum"], kernel_constraint=constraint)
    model, _ = twin.assert_same_as_plain(make, strategy, *twin.data())
    kernel = model.layers[0].kernel
    assert abs(constraint(kernel) - kernel).numpy().max() < 1e-6


@pytest.mark.few(1)
@pytest.mark.parametrize("engine", twin.ENGINES)
def test_float16_with_overflow(engine):
    """The first steps overflow, are left out, and halve the scale, as in plain Keras."""
    keras.config.set_dtype_policy("mixed_float16")
    strategy = tf_dsgd.DownpourStrategy(twin.ENGINES[engine]())
    x, y = twin.data()
    make = twin.mlp(OPTIMIZERS["momentum"])
    model, plain = twin.assert_same_as_plain(make, strategy, x, 100.0 * y)
    scale = float(plain.optimizer.dynamic_scale)
    assert scale < 2.0**15, "nothing overflowed, so the test shows nothing"
    assert int(plain.optimizer.iterations) < twin.STEPS
    assert float(model.optimizer.dynamic_scale) == scale


def test_a_loss_scale_whose_inverse_is_no_normal_number():
    """1 / 2 ** 127 is zero where subnormal numbers are; so the gradients are divided."""
    strategy = tf_dsgd.DownpourStrategy(twin.ENGINES["local"]())
    x, y = twin.data()

    def optimizer():
        return optimizers.LossScaleOptimizer(optimizers.SGD(0.05), initial_scale=2.0**127)

    model, plain = twin.assert_same_as_plain(twin.mlp(optimizer), strategy, x, 0.01 * y)
    assert float(plain.optimizer.dynamic_scale) == float(model.optimizer.dynamic_scale) == 2.0**127
    assert int(plain.optimizer.iterations) == twin.STEPS


@pytest.mark.few(1)
@pytest.mark.parametrize("engine", twin.ENGINES)
def test_second_fit_goes_on_with_the_state(engine):
    """Two fits of one epoch leave what one fit of two leaves."""
    strategy = tf_dsgd.DownpourStrategy(twin.ENGINES[engine]())
    x, y = twin.data()
    plain, _, _ = twin.fit(twin.mlp(OPTIMIZERS["adam"]), x, y)
    with strategy.scope():
        model, _, _ = twin.fit(twin.mlp(OPTIMIZERS["adam"]), x, y, epochs=1)
        model.fit(x, y, batch_size=twin.BATCH, shuffle=False, verbose=0)
    for got, want in zip(
        twin.state(model.weights) + twin.state(model.optimizer.variables),
        twin.state(plain.weights) + twin.state(plain.optimizer.variables),
        strict=True,
    ):
        assert abs(got - want).max() <= 1e-6
