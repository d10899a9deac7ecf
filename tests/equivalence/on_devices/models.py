"""Models whose layers have names, the data they take, and where each is split."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers, optimizers

from tests.equivalence import twin


def compiled(model, optimizer=None, loss="mse", **options):
    model.compile(optimizer or optimizers.SGD(0.1, momentum=0.5), loss, **options)
    return model


def skip():
    """`a` feeds `b` and, past it, the sum."""
    x = keras.Input((5,))
    a = layers.Dense(6, "tanh", name="a")(x)
    total = layers.Add(name="sum")([a, layers.Dense(6, "tanh", name="b")(a)])
    return compiled(keras.Model(x, layers.Dense(1, name="c")(total)), metrics=["mae"])


def operators():
    """What is between layers is no layer: operations of Keras."""
    x = keras.Input((5,))
    a = layers.Dense(6, name="a")(x)
    b = layers.Dense(6, "tanh", name="b")(keras.ops.tanh(a) * 2.0)
    return compiled(keras.Model(x, layers.Dense(1, name="c")(b - 0.5 * a)))


def shared():
    """`a` is used before and after `b`, which is on another part: back and forth."""
    x = keras.Input((5,))
    a = layers.Dense(5, "tanh", name="a")
    b = layers.Dense(5, "tanh", name="b")
    return compiled(keras.Model(x, layers.Dense(1, name="c")(a(b(a(x))))))


def several():
    """Two inputs, two outputs, a nested model, weights for both losses."""
    x, z = keras.Input((5,), name="x"), keras.Input((5,), name="z")
    inside = keras.Input((5,))
    encoder = keras.Model(
        inside,
        layers.Dense(4, "tanh", name="deep")(layers.Dense(6, name="first")(inside)),
        name="e",
    )
    both = layers.concatenate([encoder(x), layers.Dense(3, "tanh", name="a")(z)])
    outputs = {
        "value": layers.Dense(1, name="value")(both),
        "sign": layers.Dense(1, activation="sigmoid", name="sign")(both),
    }
    return compiled(
        keras.Model({"x": x, "z": z}, outputs),
        loss={"value": "mse", "sign": "binary_crossentropy"},
        loss_weights={"value": 1.0, "sign": 0.5},
        metrics={"value": ["mae"], "sign": ["accuracy"]},
    )


class Block(layers.Layer):
    """A layer of layers, with a weight and an operation of its own."""

    def __init__(self, units, name):
        super().__init__(name=name)
        self.inner = layers.Dense(units, "tanh", name="inner")
        self.outer = layers.Dense(units, name="outer")

    def build(self, shape):
        self.scale = self.add_weight(shape=(), initializer="ones", name="scale")
        self.inner.build(shape)
        self.outer.build((shape[0], self.inner.units))

    def call(self, inputs):
        return self.outer(self.inner(inputs)) * self.scale


class Subclassed(keras.Model):
    """Calls its layers in a method, and adds a loss of its own."""

    def __init__(self):
        super().__init__()
        self.first = Block(4, name="first")
        self.second = Block(3, name="second")
        self.last = layers.Dense(1, name="last")

    def call(self, inputs):
        hidden = self.first(inputs)
        self.add_loss(0.01 * keras.ops.mean(keras.ops.square(hidden)))
        return self.last(keras.ops.tanh(hidden)[:, :3] + self.second(inputs))


def subclassed():
    return compiled(Subclassed(), optimizers.Adagrad(0.1))


class Winding(keras.Model):
    """Runs a layer in a branch or in a loop, and others before and after it."""

    def __init__(self, way):
        super().__init__()
        self.way = way
        self.a, self.b = (layers.Dense(4, "tanh", name=name) for name in "ab")
        self.c = layers.Dense(1, name="c")

    def call(self, x):
        hidden = self.a(x)
        if self.way == "branch":
            hidden = tf.cond(tf.reduce_mean(x) > 0.0, lambda: self.b(hidden), lambda: hidden)
        else:
            again = lambda n, h: (n + 1, self.b(h))  # noqa: E731
            _, hidden = tf.while_loop(lambda n, _: n < 3, again, (0, hidden))
        return self.c(hidden)


def winding(way):
    def make():
        model = Winding(way)
        model(np.zeros((1, 5), "float32"))
        return compiled(model)

    return make


def embedding():
    """Gradients of rows, on another part than what they come from; masks."""
    ids = keras.Input((6,), dtype="int32")
    table = layers.Embedding(40, 3, mask_zero=True, name="table")(ids)
    pooled = layers.GlobalAveragePooling1D(name="pool")(table)
    return compiled(keras.Model(ids, layers.Dense(1, name="c")(pooled)), optimizers.SGD(0.5))


def recurrent():
    """Loops in both parts, one of them in both directions."""
    return compiled(
        keras.Sequential(
            [
                keras.Input((5, 3)),
                layers.Bidirectional(layers.GRU(3, return_sequences=True), name="a"),
                layers.LSTM(4, name="b"),
                layers.Dense(1, name="c"),
            ]
        ),
    )


def normal():
    """What is drawn at random, and what is kept of each mini-batch, on the second part."""
    return compiled(
        keras.Sequential(
            [
                keras.Input((5,)),
                layers.Dense(8, "relu", name="a"),
                layers.BatchNormalization(momentum=0.8, name="norm"),
                layers.Dropout(0.3, seed=4, name="drop"),
                layers.Dense(1, kernel_regularizer="l2", name="c"),
            ]
        )
    )


def vectors():
    return twin.data()


def named():
    x, y = twin.data()
    return {"x": x, "z": -2.0 * x}, {"value": y, "sign": (y > 0).astype("float32")}


def tokens():
    x = np.random.default_rng(5).integers(0, 40, (twin.EXAMPLES, 6)).astype("int32")
    return x, (x.sum(1, keepdims=True) / 100.0).astype("float32")


def sequences():
    x = np.random.default_rng(6).standard_normal((twin.EXAMPLES, 5, 3)).astype("float32")
    return x, np.sin(x.sum((1, 2)))[:, None].astype("float32")


SPLITS = {
    "skip": (skip, vectors, {"a": 0, "b|sum|c": 1}),
    "skip backwards": (skip, vectors, {"a": 1, ".*": 0}),
    "operators": (operators, vectors, {"a": 0, "b|c": 1}),
    "shared": (shared, vectors, {"a": 0, "b": 1, "c": 1}),
    "several": (several, named, {"e/first": 0, "e/.*": 1, "a": 0, "value": 1, "sign": 0}),
    "subclassed": (subclassed, vectors, {"first/.*": 0, "second": 1, "second/outer": 0, "last": 1}),
    "branch": (winding("branch"), vectors, {"a|c": 0, "b": 1}),
    "loop": (winding("loop"), vectors, {"a|c": 0, "b": 1}),
    "branch backwards": (winding("branch"), vectors, {"a|c": 1, "b": 0}),
    "embedding": (embedding, tokens, {"table": 1, "c": 0}),
    "recurrent": (recurrent, sequences, {"a/.*": 0, "b|c": 1}),
    "normal": (normal, vectors, {"a": 0, "norm|drop|c": 1}),
    "auto": (normal, vectors, "auto"),
}
"""A model, its data, and the parts of its layers."""
