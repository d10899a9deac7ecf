"""Strom's compressed SGD, with a server between the workers and without one.

    python examples/strom.py

Trains scikit-learn's handwritten digits on simulated workers. Each sends, of its changes, only what
has grown to tau: to a shard (Downpour SGD), or to all other workers, who have models of their own.
The optimizer is Adagrad: with several asynchronous workers there is momentum enough.
"""

import argparse
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import tf_dsgd


def train(strategy, data, epochs: int) -> float:
    """Gives the accuracy on held-out images."""
    x, x_held, y, y_held = data
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = keras.Sequential(
            [keras.Input((64,)), keras.layers.Dense(64, "relu"), keras.layers.Dense(10)]
        )
        model.compile(
            optimizer=keras.optimizers.Adagrad(0.05),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
    model.fit(x, y, batch_size=16, epochs=epochs, verbose=0)
    return model.evaluate(x_held, y_held, verbose=0)[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--tau", type=float, default=0.01, help="in units of a weight's change")
    parser.add_argument("--epochs", type=int, default=10)
    options = parser.parse_args()
    x, y = load_digits(return_X_y=True)
    x = (x / 16.0).astype("float32")
    data = train_test_split(x, y, test_size=360, random_state=0, stratify=y)
    codec = tf_dsgd.compression.Threshold(options.tau, entropy=True)

    def cluster():
        return tf_dsgd.SimulatedCluster(
            options.workers,
            compute_seconds=tf_dsgd.LogNormal(1.0, 0.3),
            network_seconds=tf_dsgd.Exponential(0.1),
            seed=1,
        )

    strategies = {
        "Downpour": tf_dsgd.DownpourStrategy(cluster(), local_rule="optimizer", compression=codec),
        "peers": tf_dsgd.CompressedAsyncStrategy(cluster(), compression=codec),
    }
    print("             accuracy  updates  mean staleness  largest residual")
    for name, strategy in strategies.items():
        accuracy = train(strategy, data, options.epochs)
        staleness, residual = strategy.staleness().mean, max(strategy.residual())
        print(
            f"{name:12s} {accuracy * 100:6.1f} % {strategy.updates:8d} {staleness:15.2f} "
            f"{residual:17.3f}"
        )


if __name__ == "__main__":
    main()
