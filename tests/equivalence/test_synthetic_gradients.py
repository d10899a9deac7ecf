"""examples/synthetic_gradients.py: its step beside the usual one and NumPy, and what it needs."""

import importlib.util

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests import helpers
from tests.packaging.repository import ROOT

spec = importlib.util.spec_from_file_location(
    "synthetic_gradients", ROOT / "examples" / "synthetic_gradients.py"
)
example = importlib.util.module_from_spec(spec)
spec.loader.exec_module(example)

INPUTS, VALUES = 5, 4
RATE = 0.5


def parts(seed=3):
    """A lower and an upper part."""
    keras.utils.set_random_seed(seed)
    dense = keras.layers.Dense
    lower = keras.Sequential([keras.Input((INPUTS,)), dense(VALUES, "tanh")])
    return lower, keras.Sequential([keras.Input((VALUES,)), dense(example.CLASSES)])


def compiled(model, **options):
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(RATE), loss, **options)
    return model


def data(examples=12):
    random = np.random.default_rng(0)
    x = random.standard_normal((examples, INPUTS)).astype("float32")
    return x, random.integers(0, example.CLASSES, examples)


def linear_predictor():
    """Of the label alone; begins with zeros."""
    given, label = keras.Input((VALUES,)), keras.Input((example.CLASSES,))
    out = keras.layers.Dense(VALUES, use_bias=False, kernel_initializer="zeros")(label)
    return keras.Model([given, label], out)


class Foresees(example.Decoupled):
    """Predicts the gradient, for it computes it."""

    def predicted(self, given, labels):
        with tf.GradientTape() as tape:
            tape.watch(given)
            logits = self.upper(given)
            losses = keras.losses.sparse_categorical_crossentropy(labels, logits, from_logits=True)
        return tape.gradient(losses, given), []


@pytest.mark.parametrize("examples", [12, 11])
def test_with_a_right_prediction_it_is_the_usual_step(examples):
    """The last mini-batch of an epoch may be smaller: the loss is a mean over its examples."""
    x, y = data(examples)
    # Not as a graph: without a strategy TensorFlow's graph optimizer drops the order of a read of
    # the upper part's weights and their update: 2 to 10 of 25 runs gave other weights.
    usual = compiled(keras.Sequential(parts()), run_eagerly=True)
    decoupled = compiled(Foresees(*parts(), None), run_eagerly=True)
    for model in (usual, decoupled):
        model.fit(x, y, batch_size=4, epochs=3, shuffle=False, verbose=0)
    helpers.assert_close(decoupled.get_weights(), usual.get_weights(), 1e-6)


def test_the_predictor_steps_towards_the_gradient_that_came_back():
    """In NumPy: the gradient of half its squared distance from its prediction, which is 0."""
    x, y = data()
    lower, upper = parts()
    kernel, bias = upper.get_weights()
    given = np.asarray(lower(x), np.float64)
    logits = given @ kernel + bias
    shares = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    labels = np.eye(example.CLASSES)[y]
    back = (shares - labels) @ kernel.T
    model = compiled(example.Decoupled(lower, upper, linear_predictor()))
    first = lower.get_weights()
    model.fit(x, y, batch_size=12, verbose=0)
    (found,) = model.predictor.get_weights()
    np.testing.assert_allclose(found, RATE * labels.T @ back / len(x), atol=1e-6)
    helpers.assert_close(lower.get_weights(), first, 0)  # it was told 0


def test_the_lower_part_waits_for_nothing_of_the_upper_one():
    """Whatever the upper part computes, the lower one's step is the same; later ones are not."""
    x, y = data()
    found = []
    for broken in (False, True):
        lower, upper = parts()
        predictor = linear_predictor()
        predictor.set_weights([np.full((example.CLASSES, VALUES), 0.1)])
        first = lower.get_weights()
        if broken:
            upper.set_weights([np.full_like(w, np.nan) for w in upper.get_weights()])
        model = compiled(example.Decoupled(lower, upper, predictor))
        model.fit(x, y, batch_size=12, verbose=0)
        assert np.isnan(predictor.get_weights()[0]).any() == broken
        found.append(lower.get_weights())
        assert any((a != b).any() for a, b in zip(found[-1], first, strict=True))
    helpers.assert_close(found[0], found[1], 0)
