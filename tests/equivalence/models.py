"""Models of every shape, each a function that returns a compiled model, with the data it takes."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers, optimizers

from tests.equivalence import twin


def _vectors():
    return twin.data()


def _tokens():
    rng = np.random.default_rng(5)
    x = rng.integers(0, 40, (twin.EXAMPLES, 6)).astype("int32")
    return x, (x.sum(1, keepdims=True) / 100.0).astype("float32")


def _sequences():
    rng = np.random.default_rng(6)
    x = rng.standard_normal((twin.EXAMPLES, 5, 3)).astype("float32")
    return x, np.sin(x.sum((1, 2)))[:, None].astype("float32")


def _images():
    rng = np.random.default_rng(8)
    x = rng.standard_normal((twin.EXAMPLES, 6, 6, 1)).astype("float32")
    return x, (x.mean((1, 2, 3)) > 0).astype("int32")


def _sequential(*stack, shape=(5,), dtype="float32", loss="mse", optimizer=None, last=1):
    def make():
        model = keras.Sequential([keras.Input(shape, dtype=dtype)])
        for make_layer in stack:
            model.add(make_layer())
        model.add(layers.Dense(last))
        model.compile(optimizer() if optimizer else optimizers.Adam(0.01), loss)
        return model

    return make


def _two_inputs():
    a, b = keras.Input((5,), name="a"), keras.Input((5,), name="b")
    hidden = layers.concatenate([layers.Dense(4, "tanh")(a), layers.Dense(3, "tanh")(b)])
    model = keras.Model({"a": a, "b": b}, layers.Dense(1)(hidden))
    model.compile(optimizers.Adam(0.01), "mse")
    return model


def _two_outputs():
    x = keras.Input((5,))
    hidden = layers.Dense(6, "tanh")(x)
    outputs = {
        "value": layers.Dense(1, name="value")(hidden),
        "sign": layers.Dense(1, activation="sigmoid", name="sign")(hidden),
    }
    model = keras.Model(x, outputs)
    model.compile(
        optimizers.Adam(0.01),
        {"value": "mse", "sign": "binary_crossentropy"},
        loss_weights={"value": 1.0, "sign": 0.5},
        metrics={"value": ["mae"], "sign": ["accuracy"]},
    )
    return model


class Subclassed(keras.Model):
    """Builds its weights at its first call, and adds a loss of its own."""

    def __init__(self):
        super().__init__()
        self.hidden = layers.Dense(6, "tanh")
        self.out = layers.Dense(1)

    def call(self, inputs):
        hidden = self.hidden(inputs)
        self.add_loss(0.01 * keras.ops.mean(keras.ops.square(hidden)))
        return self.out(hidden)


class OwnTrainStep(keras.Model):
    """A `train_step` written by hand, with a metric of its own."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.distance = keras.metrics.Mean(name="distance")

    @property
    def metrics(self):
        return [self.distance]

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = keras.ops.mean(keras.ops.abs(self(x, training=True) - y))
        weights = self.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        self.distance.update_state(loss)
        return {"distance": self.distance.result()}


class StatelessLogs(keras.Model):
    """A `train_step` whose logs are plain tensors: the epoch's logs are those of its last batch."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = keras.ops.mean(keras.ops.square(self(x, training=True) - y))
        weights = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return {"batch_loss": loss, "batch_max": keras.ops.max(y)}


def _functional(kind):
    def make():
        x = keras.Input((5,))
        model = kind(x, layers.Dense(1)(layers.Dense(6, "tanh")(x)))
        model.compile(optimizers.Adam(0.01), "mse")
        return model

    return make


def _subclassed():
    model = Subclassed()
    model.compile(optimizers.Adam(0.01), "mse")
    return model


def _unbuilt():
    model = keras.Sequential([layers.Dense(6, "tanh"), layers.Dense(1)])
    model.compile(optimizers.Adam(0.01), "mse")
    return model


def _frozen_layer():
    model = keras.Sequential(
        [keras.Input((5,)), layers.Dense(6, "tanh"), layers.BatchNormalization(), layers.Dense(1)]
    )
    model.layers[0].trainable = False
    model.layers[1].trainable = False
    model.compile(optimizers.Adam(0.01), "mse")
    return model


def _named(data):
    def make():
        x, y = data()
        return {"a": x, "b": -2.0 * x}, y

    return make


def _two_targets():
    x, y = twin.data()
    return x, {"value": y, "sign": (y > 0).astype("float32")}


MODELS = {
    "dropout": (
        _sequential(lambda: layers.Dense(8, "relu"), lambda: layers.Dropout(0.4, seed=11)),
        _vectors,
    ),
    "dropout_without_seed": (
        _sequential(lambda: layers.Dense(8, "relu"), lambda: layers.Dropout(0.4)),
        _vectors,
    ),
    "gaussian_noise": (_sequential(lambda: layers.GaussianNoise(0.3, seed=2)), _vectors),
    "batch_norm": (
        _sequential(lambda: layers.Dense(8), lambda: layers.BatchNormalization(momentum=0.8)),
        _vectors,
    ),
    "embedding": (
        _sequential(
            lambda: layers.Embedding(40, 3),
            layers.Flatten,
            shape=(6,),
            dtype="int32",
            optimizer=lambda: optimizers.SGD(0.5),
        ),
        _tokens,
    ),
    "embedding_adagrad": (
        _sequential(
            lambda: layers.Embedding(40, 3),
            layers.GlobalAveragePooling1D,
            shape=(6,),
            dtype="int32",
            optimizer=lambda: optimizers.Adagrad(0.1),
        ),
        _tokens,
    ),
    "embedding_adam": (
        _sequential(lambda: layers.Embedding(40, 3), layers.Flatten, shape=(6,), dtype="int32"),
        _tokens,
    ),
    "lstm": (_sequential(lambda: layers.LSTM(4), shape=(5, 3)), _sequences),
    "gru_dropout": (
        _sequential(lambda: layers.GRU(4, dropout=0.3, seed=4), shape=(5, 3)),
        _sequences,
    ),
    "convolution": (
        _sequential(
            lambda: layers.Conv2D(3, 3, activation="relu"),
            layers.MaxPooling2D,
            layers.Flatten,
            shape=(6, 6, 1),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            last=2,
        ),
        _images,
    ),
    "regularised": (
        _sequential(lambda: layers.Dense(6, "tanh", kernel_regularizer="l2")),
        _vectors,
    ),
    "two_inputs": (_two_inputs, _named(twin.data)),
    "two_outputs": (_two_outputs, _two_targets),
    "subclassed": (_subclassed, _vectors),
    "unbuilt": (_unbuilt, _vectors),
    "own_train_step": (_functional(OwnTrainStep), _vectors),
    "stateless_logs": (_functional(StatelessLogs), _vectors),
    "frozen_layer": (_frozen_layer, _vectors),
}
