"""Two workers, each with its replica over two devices, and mini-batches in pieces.

    python examples/model_parallel.py

Trains scikit-learn's handwritten digits on a network whose first layers are on one device and whose
last are on another, and shows what is where, and what travels. Then one worker trains once more on
two devices and on one, from the same weights: the difference is rounding.
"""

import argparse
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import tf_dsgd


def network() -> keras.Model:
    """Two halves, known by their names."""
    relu = "relu"
    lower = [keras.layers.Dense(96, relu), keras.layers.Dense(96, relu)]
    upper = [keras.layers.Dense(64, relu), keras.layers.Dense(10)]
    model = keras.Sequential(
        [
            keras.Input((64,)),
            keras.Sequential(lower, name="lower"),
            keras.Sequential(upper, name="upper"),
        ]
    )
    model.compile(
        optimizer=keras.optimizers.Adagrad(0.05),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


def train(data, workers: int, devices: int, options: argparse.Namespace):
    """Gives the model and the strategy."""
    keras.utils.set_random_seed(1)
    laid = tf_dsgd.ModelParallel(
        {"lower/.*": 0, "upper/.*": devices - 1}, microbatches=options.microbatches
    )
    strategy = tf_dsgd.DownpourStrategy(
        tf_dsgd.LocalCluster(workers, devices_per_worker=devices), model_parallel=laid
    )
    with strategy.scope():
        model = network()
    x, _, y, _ = data
    model.fit(x, y, batch_size=32, epochs=options.epochs, shuffle=False, verbose=0)
    return model, strategy


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--epochs", type=int, default=10)
    options = parser.parse_args()
    x, y = load_digits(return_X_y=True)
    x = (x / 16.0).astype("float32")
    data = train_test_split(x, y, test_size=360, random_state=0, stratify=y)

    # First, since TensorFlow makes its devices once.
    model, strategy = train(data, 2, 2, options)
    print(strategy.placement())
    _, accuracy = model.evaluate(data[1], data[3], verbose=0)
    print(f"two workers: held-out accuracy {accuracy:.3f}, mini-batches {strategy.steps}")

    one, _ = train(data, 1, 1, options)
    two, _ = train(data, 1, 2, options)
    difference = max(
        float(np.abs(a - b).max())
        for a, b in zip(one.get_weights(), two.get_weights(), strict=True)
    )
    print(f"one worker on two devices and on one: largest difference {difference:.1e}")


if __name__ == "__main__":
    main()
