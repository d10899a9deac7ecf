"""A chief that used TensorFlow before it made a strategy: what it made stays usable."""

import gc
import json
import tempfile
import weakref

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
table = tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer([1, 2], [3.0, 5.0]), -1.0)
mutable = tf.lookup.experimental.MutableHashTable(tf.string, tf.int64, -1)
mutable.insert(tf.constant(["a"]), tf.constant([7], tf.int64))
words = keras.layers.TextVectorization(output_sequence_length=2, vocabulary=["b", "c"])
looked_up = tf.data.Dataset.from_tensors(["c b", "b"]).map(words)
writers = tf.summary.create_file_writer(tempfile.mkdtemp()), tf.summary.create_noop_writer()
plain = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, kernel_initializer="ones")])
scale_of = {name: tf.Variable(value) for name, value in (("scalar", 2.0), ("vector", [1.0, 2.0]))}


def baseline():
    """Plain Keras with moving statistics, which are assigned, and slots; the same each time."""
    keras.utils.set_random_seed(3)
    layers = [keras.layers.Dense(2), keras.layers.BatchNormalization(), keras.layers.Dense(1)]
    made = keras.Sequential([keras.Input((1,)), *layers])
    made.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
    return made


def trained(made):
    """What two fits in succession show, and leave."""
    made.optimizer.learning_rate = 0.02
    made.fit(x, 6.0 * x, batch_size=8, verbose=0, shuffle=False)
    history = made.fit(x, 6.0 * x, batch_size=8, verbose=0, shuffle=False).history
    return [*history["loss"], *history["mae"], *made.evaluate(x, 6.0 * x, verbose=0)]


@tf.function
def assigning(value):
    scale_of["scalar"].assign(value)


wanted = trained(baseline())
unused, used = baseline(), baseline()
used.fit(x, 6.0 * x, batch_size=8, verbose=0, shuffle=False)  # is traced
begun = used.get_weights()
checkpoint = tf.train.Checkpoint(of=scale_of["vector"])
assigning(tf.constant(4.0))
freed = tf.Variable(1.0)
local = tf_dsgd.DownpourStrategy(tf_dsgd.SimulatedCluster(2))
with local.scope():
    under_local = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    under_local.compile("sgd", "mse")
under_local.fit(x, x, verbose=0)
first = float(plain.predict(x[-1:], verbose=0)[0, 0])

strategy = tf_dsgd.DownpourStrategy(tf_dsgd.TFCluster())
with strategy.scope():
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, kernel_initializer="ones")])
    model.compile(keras.optimizers.SGD(0.1), "mse")  # far from where late gradients oscillate
loss = model.fit(data, epochs=20, verbose=0).history["loss"]
model.fit(x, 6.0 * x, batch_size=4, verbose=0)

try:
    under_local.fit(x, x, verbose=0)
    refused = ""
except RuntimeError as error:
    refused = str(error)
freed = weakref.ref(freed)
gc.collect()
scale.assign_add(1.0)
scale_of["scalar"].assign(5.0)
scale_of["vector"].assign([5.0, 6.0])
assigned = [scale_of["scalar"].numpy().tolist(), scale_of["vector"].numpy().tolist()]
with tempfile.TemporaryDirectory() as folder:
    saved = checkpoint.save(f"{folder}/checkpoint")
    scale_of["vector"].assign_add([1.0, 1.0])
    checkpoint.restore(saved).assert_consumed()
used.set_weights(begun)
again = baseline()
again.fit(x, 6.0 * x, batch_size=8, verbose=0, shuffle=False)
np.testing.assert_allclose(trained(used), trained(again), rtol=1e-6)
np.testing.assert_allclose(trained(unused), wanted, rtol=1e-6)
print(
    "RESULT",
    json.dumps(
        {
            "learns": loss[-1] < 0.5 * loss[0],
            "steps": strategy.steps,
            "variable": float(scale),
            "function": float(doubled(constant)[0, 0]),
            "constant": float(tf.matmul(constant, constant)[0, 0]),
            "table": [float(v) for v in table.lookup(tf.constant([2, 9]))],
            "mutable": [int(v) for v in mutable.lookup(tf.constant(["a", "b"]))],
            "words": next(iter(looked_up)).numpy().tolist(),
            "layer": words(np.array(["c x"])).numpy().tolist(),
            "dataset": [float(value) for value in pinned],
            "model": float(plain.predict(x[-1:], verbose=0)[0, 0]) == first,
            "weights": scale.device,
            "assigned": assigned,
            "refused": refused[:65],
            "freed": freed() is None,
            "restored": scale_of["vector"].numpy().tolist(),
        }
    ),
    flush=True,
)
