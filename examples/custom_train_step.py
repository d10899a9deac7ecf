"""A model with a `train_step` of its own, trained by two asynchronous workers.

    python examples/custom_train_step.py

The step adds a penalty on the size of the outputs to the loss, and reports the means of both.
Nothing in the class knows of the strategy.
"""

import argparse
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
import tensorflow as tf

import tf_dsgd


class Penalised(keras.Model):
    """A linear model whose loss is mean squared error + 0.001 * mean(output ** 2)."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.dense = keras.layers.Dense(1)
        self.objective = keras.metrics.Mean(name="loss")
        self.penalty = keras.metrics.Mean(name="penalty")

    @property
    def metrics(self):
        return [self.objective, self.penalty]

    def call(self, inputs):
        return self.dense(inputs)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            outputs = self(x, training=True)
            penalty = 0.001 * tf.reduce_mean(outputs**2)
            loss = self.compute_loss(x, y, outputs) + penalty
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        self.objective.update_state(loss)
        self.penalty.update_state(penalty)
        return {metric.name: metric.result() for metric in self.metrics}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=5)
    options = parser.parse_args()

    keras.utils.set_random_seed(3)
    random = np.random.default_rng(0)
    x = random.normal(size=(4096, 8)).astype("float32")
    true_weights = np.arange(1.0, 9.0, dtype="float32").reshape(8, 1)
    y = x @ true_weights

    strategy = tf_dsgd.DownpourStrategy(tf_dsgd.LocalCluster(num_workers=2))
    with strategy.scope():
        model = Penalised()
        model.compile(optimizer=keras.optimizers.SGD(0.05), loss="mse")
    model.fit(x, y, batch_size=64, epochs=options.epochs, verbose=2)

    kernel = model.dense.kernel.numpy().ravel()
    error = float(np.max(np.abs(kernel - true_weights.ravel())))
    print("weights found ", np.array2string(kernel, precision=3))
    print(f"largest error {error:.4f}; {strategy.staleness()}")


if __name__ == "__main__":
    main()
