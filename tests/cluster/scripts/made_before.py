"""A chief that used TensorFlow before it made a strategy: what it made stays usable."""

import json

import keras
import numpy as np
import tensorflow as tf

import tf_dsgd

x = np.arange(40.0, dtype="float32")[:, None] / 40.0
scale = tf.Variable(2.0)
constant = tf.constant([[3.0]])
data = tf.data.Dataset.from_tensor_slices((x, 6.0 * x)).batch(4)
pinned = tf.data.Dataset.range(3).map(lambda n: tf.cast(n, tf.float32) * scale)
doubled = tf.function(lambda value: scale * value)
assert float(doubled(constant)[0, 0]) == 6.0
plain = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, kernel_initializer="ones")])
first = float(plain.predict(x[-1:], verbose=0)[0, 0])

strategy = tf_dsgd.DownpourStrategy(tf_dsgd.TFCluster())
with strategy.scope():
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, kernel_initializer="ones")])
    model.compile(keras.optimizers.SGD(0.1), "mse")  # far from where late gradients oscillate
loss = model.fit(data, epochs=20, verbose=0).history["loss"]
model.fit(x, 6.0 * x, batch_size=4, verbose=0)

scale.assign_add(1.0)
print(
    "RESULT",
    json.dumps(
        {
            "learns": loss[-1] < 0.5 * loss[0],
            "steps": strategy.steps,
            "variable": float(scale),
            "function": float(doubled(constant)[0, 0]),
            "constant": float(tf.matmul(constant, constant)[0, 0]),
            "dataset": [float(value) for value in pinned],
            "model": float(plain.predict(x[-1:], verbose=0)[0, 0]) == first,
            "weights": scale.device,
        }
    ),
    flush=True,
)
