"""A plain Keras script, run by one process and by two whose models are averaged.

    python examples/spmd_averaging.py

Without TF_CONFIG it trains by itself, then starts itself in two processes by `tf_dsgd.launch`. Each
of these reads half of the data, so that both see as many images in all. `train` is the script that
a user would have; it knows of other processes by one callback alone.
"""

import argparse
import os
import subprocess
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import tf_dsgd


def train(options: argparse.Namespace) -> None:
    averaging = tf_dsgd.callbacks.PeriodicAveraging(options.average_every)
    keras.utils.set_random_seed(1 + averaging.worker_index)
    x, y = load_digits(return_X_y=True)
    x, x_held, y, y_held = train_test_split(
        (x / 16.0).astype("float32"), y, test_size=0.2, random_state=0, stratify=y
    )
    # Parts of the same size: all processes make as many steps.
    examples = len(x) // averaging.num_workers
    first = averaging.worker_index * examples
    mine = slice(first, first + examples)

    model = keras.Sequential(
        [keras.Input((64,)), keras.layers.Dense(64, "relu"), keras.layers.Dense(10)]
    )
    model.compile(
        optimizer=keras.optimizers.Adam(0.003),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    history = model.fit(
        x[mine],
        y[mine],
        batch_size=32,
        epochs=options.epochs,
        validation_data=(x_held, y_held),
        callbacks=[averaging],
        verbose=0,
    ).history
    if averaging.worker_index == 0:
        print(
            f"{averaging.num_workers} process(es): {int(model.optimizer.iterations)} steps each, "
            f"{averaging.averages} averages, training loss {history['loss'][-1]:.4f}, "
            f"held-out accuracy {history['val_accuracy'][-1]:.4f}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--average_every", type=int, default=8)
    options = parser.parse_args()
    train(options)
    if not os.environ.get("TF_CONFIG"):
        launch = ["-m", "tf_dsgd.launch", "--spmd", "--workers", "2"]
        sys.exit(subprocess.run([sys.executable, *launch, *sys.argv], check=False).returncode)


if __name__ == "__main__":
    main()
