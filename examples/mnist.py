"""MNIST with Downpour SGD on the workers of this machine.

    python examples/mnist.py                        # downloads through keras.datasets
    python examples/mnist.py --data_path mnist.npz  # the file that keras.datasets downloads

The file holds the arrays x_train, y_train, x_test and y_test.
"""

import argparse
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np

import tf_dsgd


def load_data(path: str | None) -> tuple[tuple, tuple]:
    """Gives (x_train, y_train), (x_test, y_test), from a local file or from keras.datasets."""
    if path is None:
        train, test = keras.datasets.mnist.load_data()
    else:
        with np.load(path) as arrays:
            train = arrays["x_train"], arrays["y_train"]
            test = arrays["x_test"], arrays["y_test"]
    return tuple((scaled(x), y.astype("int32")) for x, y in (train, test))


def scaled(images: np.ndarray) -> np.ndarray:
    return images.reshape(len(images), 784).astype("float32") / 255.0


def build_model(optimizer: keras.optimizers.Optimizer) -> keras.Model:
    model = keras.Sequential(
        [
            keras.Input((784,)),
            keras.layers.Dense(512, "relu"),
            keras.layers.Dropout(0.2),
            keras.layers.Dense(512, "relu"),
            keras.layers.Dropout(0.2),
            keras.layers.Dense(10),
        ]
    )
    model.compile(
        optimizer=optimizer,
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data_path", help="a local mnist.npz, instead of keras.datasets")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch_size", type=int, default=64, help="of each worker")
    parser.add_argument("--num_workers", type=int, help="default: one per GPU, else per core")
    parser.add_argument("--push_every", type=int, default=10, help="mini-batches")
    parser.add_argument("--fetch_every", type=int, default=10, help="mini-batches")
    parser.add_argument("--learning_rate", type=float, default=0.01, help="of Adagrad")
    options = parser.parse_args()

    (x_train, y_train), (x_test, y_test) = load_data(options.data_path)
    strategy = tf_dsgd.DownpourStrategy(
        tf_dsgd.LocalCluster(options.num_workers),
        push_every=options.push_every,
        fetch_every=options.fetch_every,
    )
    with strategy.scope():
        model = build_model(keras.optimizers.Adagrad(options.learning_rate))
    model.fit(
        x_train,
        y_train,
        batch_size=options.batch_size,
        epochs=options.epochs,
        validation_data=(x_test, y_test),
        verbose=2,
    )
    _, accuracy = model.evaluate(x_test, y_test, verbose=0)
    print(f"held-out accuracy {accuracy:.4f}")
    print(f"mini-batches {strategy.steps}, updates {strategy.updates}, {strategy.staleness()}")


if __name__ == "__main__":
    main()
