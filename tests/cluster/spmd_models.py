"""Models and data of the tests with equal processes: made alike in these and in the test."""

import keras
import numpy as np
import tensorflow as tf

BATCH, FEATURES = 4, 3


def data(worker, examples, seed=0):
    """A worker's own part; all parts together are its rows of the joint data."""
    random = np.random.default_rng(100 * seed + worker)
    x = random.standard_normal((examples, FEATURES)).astype("float32")
    noise = random.standard_normal((examples, 1))
    return x, (x @ np.array([[1.0], [-2.0], [0.5]]) + 0.3 * noise + worker).astype("float32")


def joint(parts):
    """The joint mini-batches: each is the workers' mini-batches one after the other."""
    arrays = []
    for kind in zip(*parts, strict=True):
        batches = [array.reshape(-1, BATCH, *array.shape[1:]) for array in kind]
        arrays.append(np.stack(batches, 1).reshape(-1, *kind[0].shape[1:]))
    return arrays


def linear(optimizer, seed=0):
    """One layer, whose gradient a test computes by hand."""
    keras.utils.set_random_seed(seed)
    model = keras.Sequential([keras.Input((FEATURES,)), keras.layers.Dense(1)])
    model.compile(optimizer, "mse", metrics=["mae"])
    return model


class Targets(keras.metrics.Metric):
    """How many there are, and their mean: a result that is a dict."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.total = self.add_variable((), "zeros", name="total")
        self.number = self.add_variable((), "zeros", name="number")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.total.assign_add(keras.ops.sum(y_true))
        self.number.assign_add(keras.ops.cast(keras.ops.size(y_true), "float32"))

    def result(self):
        return {"examples": self.number, "mean_target": self.total / self.number}


def curved(optimizer, seed=0):
    """Two layers."""
    keras.utils.set_random_seed(seed)
    layers = [keras.layers.Dense(5, "tanh"), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((FEATURES,)), *layers])
    model.compile(optimizer, "mse", metrics=["mae", keras.metrics.R2Score()])
    return model


class Counted(keras.layers.Layer):
    """Counts its calls in training, in an integer, and keeps what it was told in a bool."""

    def __init__(self, start, **kwargs):
        super().__init__(**kwargs)
        self.calls = self.add_weight(
            shape=(2,), dtype="int32", trainable=False, initializer=keras.initializers.Zeros()
        )
        self.calls.assign([start, 0])
        self.told = self.add_weight(dtype="bool", trainable=False, initializer="zeros")
        self.told.assign(start == 0)

    def call(self, inputs, training=False):
        if training:
            self.calls.assign_add([1, 1])
        return inputs


def normalised(worker, seed=0):
    """With moving statistics, dropout, and weights that have no mean."""
    keras.utils.set_random_seed(seed)
    layers = [
        keras.layers.BatchNormalization(momentum=0.5),
        Counted(10 * worker),
        keras.layers.Dense(1),
        keras.layers.Dropout(1e-9),
    ]
    model = keras.Sequential([keras.Input((FEATURES,)), *layers])
    model.compile(keras.optimizers.SGD(0.05), "mse")
    return model


def adapted(worker):
    """Whose first layer has seen the worker's data before, and stands in a model in the model."""
    keras.utils.set_random_seed(0)
    normalization = keras.layers.Normalization()
    normalization.adapt(data(worker, 28)[0] * (1 + worker) + worker)
    inner = keras.Sequential([keras.Input((FEATURES,)), normalization])
    model = keras.Sequential([keras.Input((FEATURES,)), inner, keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.05), "mse")
    return model


class TwoParts(keras.Model):
    """Each part has an optimizer; the second one's makes its first step at the fifth mini-batch."""

    def __init__(self):
        super().__init__()
        self.parts = [keras.layers.Dense(4, "tanh"), keras.layers.Dense(1)]
        momentum = keras.optimizers.SGD(0.05, momentum=0.9)
        self.optimizers = {"parts": [keras.optimizers.Adam(0.05), momentum]}
        self.steps = 0

    def call(self, inputs):
        return self.parts[1](self.parts[0](inputs))

    def train_step(self, data):
        inputs, targets, *_ = data
        with tf.GradientTape(persistent=True) as tape:
            loss = tf.reduce_mean((self(inputs) - targets) ** 2)
        self.steps += 1
        for part, optimizer in zip(self.parts, self.optimizers["parts"], strict=True):
            if part is self.parts[0] or self.steps >= 5:
                weights = part.trainable_weights
                optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        return {"loss": loss}


def two_parts():
    keras.utils.set_random_seed(0)
    model = TwoParts()
    model(np.zeros((1, FEATURES)))
    model.compile(run_eagerly=True)
    return model


def slots_of(model):
    """Those of both optimizers, without iterations and rates."""
    parts = model.optimizers["parts"]
    return [v for optimizer in parts for v in optimizer.variables[2:]]


def halving():
    """A schedule that shows whether it went on: the rate is halved after 5 steps, and after 10."""
    return keras.optimizers.schedules.PiecewiseConstantDecay([4, 9], [0.2, 0.1, 0.05])


def adam():
    return keras.optimizers.Adam(halving(), epsilon=1e-3)


def ema():
    """Overwrites the weights by their average at every fourth step, and at the end."""
    return keras.optimizers.Adam(0.02, use_ema=True, ema_momentum=0.9, ema_overwrite_frequency=4)


def adagrad():
    return keras.optimizers.Adagrad(0.3)


OPTIMIZERS = {"adam": adam, "adagrad": adagrad}
