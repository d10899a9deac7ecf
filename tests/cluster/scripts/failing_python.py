"""Python code in a pipeline fails, in several calls at once, by two errors: one is the cause."""

import sys

import keras
import tensorflow as tf

import tf_dsgd


class BadRowError(Exception):
    """A user's own, which TensorFlow knows no status for."""


def read(k):
    try:
        return {n: n for n in range(20)}[int(k)]
    except KeyError as error:
        raise BadRowError(f"no row {k}\n\nof the file") from error  # the line that is named


def rows():
    yield from (float(read(k)) for k in range(40))


strategy = tf_dsgd.DownpourStrategy()
with strategy.scope():
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
if sys.argv[1] == "generator":
    dataset = tf.data.Dataset.from_generator(rows, output_signature=tf.TensorSpec([]))
else:
    call = tf.numpy_function if sys.argv[1] == "numpy_function" else tf.py_function
    dataset = tf.data.Dataset.range(40).map(lambda k: call(read, [k], tf.int64), 4)
dataset = dataset.map(lambda x: (tf.reshape(tf.cast(x, tf.float32), [1]), 0.0)).batch(4)
print("READY", flush=True)
model.fit(dataset, shuffle=False, verbose=0)
