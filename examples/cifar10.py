"""CIFAR-10 with Downpour SGD and a small convolutional network.

    python examples/cifar10.py                                    # through keras.datasets
    python examples/cifar10.py --data_path cifar-10-batches-py    # the folder ...
    python examples/cifar10.py --data_path cifar-10-python.tar.gz # ... or the archive it comes in

The files are Python pickles, as CIFAR-10 is distributed. Unpickling can run code: give only a file
that you trust.
"""

import argparse
import os
import pickle
import tarfile
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np

import tf_dsgd

TRAIN_FILES = [f"data_batch_{number}" for number in range(1, 6)]
TEST_FILES = ["test_batch"]


def read_folder(path: Path, names: list[str]) -> list[bytes]:
    return [(path / name).read_bytes() for name in names]


def read_archive(path: Path, names: list[str]) -> list[bytes]:
    with tarfile.open(path) as archive:
        members = {Path(member.name).name: member for member in archive if member.isfile()}
        return [archive.extractfile(members[name]).read() for name in names]


def decode(files: list[bytes]) -> tuple[np.ndarray, np.ndarray]:
    """Gives images [n, 32, 32, 3] and labels [n] of pickled batches."""
    batches = [pickle.loads(content, encoding="bytes") for content in files]
    images = np.concatenate([batch[b"data"] for batch in batches]).reshape(-1, 3, 32, 32)
    labels = np.concatenate([batch[b"labels"] for batch in batches])
    return images.transpose(0, 2, 3, 1), labels


def load_data(path: str | None) -> tuple[tuple, tuple]:
    """Gives (x_train, y_train), (x_test, y_test), from a local path or from keras.datasets."""
    if path is None:
        train, test = keras.datasets.cifar10.load_data()
    else:
        location = Path(path)
        read = read_folder if location.is_dir() else read_archive
        train, test = decode(read(location, TRAIN_FILES)), decode(read(location, TEST_FILES))
    return tuple(
        (x.astype("float32") / 255.0, y.reshape(-1).astype("int32")) for x, y in (train, test)
    )


def build_model(optimizer: keras.optimizers.Optimizer) -> keras.Model:
    layers = [keras.Input((32, 32, 3))]
    for filters in (32, 64, 128):
        layers += [
            keras.layers.Conv2D(filters, 3, padding="same", use_bias=False),
            keras.layers.BatchNormalization(),
            keras.layers.ReLU(),
            keras.layers.MaxPooling2D(),
        ]
    layers += [keras.layers.GlobalAveragePooling2D(), keras.layers.Dense(10)]
    model = keras.Sequential(layers)
    model.compile(
        optimizer=optimizer,
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data_path", help="cifar-10-batches-py or cifar-10-python.tar.gz")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch_size", type=int, default=64, help="of each worker")
    parser.add_argument("--num_workers", type=int, help="default: one per GPU, else per core")
    parser.add_argument("--push_every", type=int, default=5, help="mini-batches")
    parser.add_argument("--fetch_every", type=int, default=5, help="mini-batches")
    parser.add_argument("--learning_rate", type=float, default=0.02, help="of Adagrad")
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
