"""Training in which a strategy was meant to take part, and does not: said, or refused."""

import contextlib
import gc

import keras
import pytest
import tensorflow as tf

import tf_dsgd
from tests import helpers
from tf_dsgd.strategies import unused


def strategy():
    return tf_dsgd.DownpourStrategy(tf_dsgd.LocalCluster(2))


def fit(model):
    model.fit(*helpers.ones(8), batch_size=2, verbose=0)


def plain():
    return helpers.constant_gradient_model(keras.optimizers.SGD(1.0))


@pytest.fixture(autouse=True)
def _none_of_other_tests():
    gc.collect()
    unused._unused.clear()


def test_a_model_made_outside_the_scope_is_told_of_once(capsys):
    made = strategy()
    model = plain()
    for _ in range(2):
        fit(model)
    said = capsys.readouterr().err
    assert said.count("DownpourStrategy was made") == 1
    assert "inside `with strategy.scope():`" in said
    assert made.steps == 0


def halves(made, case):
    """One part of a model is in the scope: what is made, what is compiled, or the training."""

    def scope(part):
        return made.scope() if part == case else contextlib.nullcontext()

    with scope("made"):
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)], name="mine")
    with scope("compiled"):
        model.compile(keras.optimizers.Adam(name="theirs"), "mse")
    with scope("trained"):
        fit(model)


@pytest.mark.parametrize(
    ("case", "what"),
    [
        ("compiled", "made outside the strategy's scope, and compiled"),
        ("trained", "made outside the strategy's scope, and compiled"),
        ("made", "made in a strategy's scope, and its optimizer 'theirs' was not"),
    ],
)
def test_half_a_model_made_outside_the_scope_is_refused_by_its_name(case, what):
    made = strategy()
    with pytest.raises(
        ValueError, match="and its optimizer, and compile, inside the same"
    ) as caught:
        halves(made, case)
    assert f"The model 'mine' was {what}" in str(caught.value)
    assert "'theirs'" in str(caught.value)
    assert made.steps == 0


def test_evaluating_a_plain_model_says_nothing(capsys):
    made = strategy()
    model = plain()
    model.evaluate(*helpers.ones(8), verbose=0)
    model.predict(helpers.ones(8)[0], verbose=0)
    assert "was made" not in capsys.readouterr().err
    fit(model)  # it is still said where it matters
    assert "was made" in capsys.readouterr().err
    assert made.steps == 0


def test_a_plain_model_beside_one_of_the_strategys_says_nothing(capsys):
    made = strategy()
    with made.scope():
        model = plain()
    fit(plain())
    fit(model)
    assert "was made" not in capsys.readouterr().err
    assert made.steps == 4


def test_a_strategy_that_is_gone_says_nothing(capsys):
    strategy()
    gc.collect()
    fit(plain())
    assert "was made" not in capsys.readouterr().err


@pytest.mark.parametrize("traced", [False, True])
def test_a_loop_over_data_that_are_not_distributed_is_refused(traced):
    made = strategy()
    with made.scope():
        model = plain()
    dataset = tf.data.Dataset.from_tensor_slices(helpers.ones(8)).batch(2)

    def step(batch):
        x, y = batch
        with tf.GradientTape() as tape:
            loss = model.compute_loss(x, y, model(x, training=True))
        gradients = tape.gradient(loss, model.trainable_variables)
        model.optimizer.apply(gradients, model.trainable_variables)

    def run(batch):
        made.run(step, args=(batch,))

    before = model.get_weights()
    batch = next(iter(dataset))
    with pytest.raises(ValueError, match="experimental_distribute_dataset"):
        (tf.function(run) if traced else run)(batch)
    for one, other in zip(model.get_weights(), before, strict=True):
        assert (one == other).all()
    for batch in made.experimental_distribute_dataset(dataset):
        run(batch)
    made.settle()
    assert made.steps == 4


def test_running_what_does_not_train_is_not_refused():
    made = strategy()
    with made.scope():
        model = plain()
    x, _ = helpers.ones(8)
    made.run(lambda batch: model(batch, training=False), args=(tf.constant(x),))


def test_assignments_that_are_no_optimizers_are_not_refused():
    made = strategy()
    with made.scope():
        model = plain()
    rate, weight = model.optimizer.learning_rate, model.trainable_variables[0]
    made.run(lambda value: rate.assign(value), args=(tf.constant(0.25),))
    made.run(lambda value: weight.assign(value * tf.ones_like(weight)), args=(tf.constant(2.0),))
    assert float(rate) == 0.25 and (model.get_weights()[0] == 2.0).all()
