"""Trains handwritten digits with two local workers, and says how well, how fast and how stale.

    python examples/quickstart.py

The data comes with scikit-learn: 1,797 images of 8 x 8 pixels, a fifth of them held out. The same
model is trained on the same data for as many mini-batches by plain Keras `fit`, before ours and in
a process of its own, so that neither run shares threads or caches with the other. Both are timed
from their second `fit` on: the first one, of one epoch, traces the graphs. Ours is run with
`steps_per_execution=20`, plain `fit` with 1 and with 20, of which the faster one is shown.
"""

import argparse
import os
import subprocess
import sys
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import tf_dsgd

BATCH_SIZE = 32
STEPS_PER_EXECUTION = 20


def load_data() -> list[np.ndarray]:
    """Gives x_train, x_test, y_train, y_test."""
    x, y = load_digits(return_X_y=True)
    x = (x / 16.0).astype("float32")
    return train_test_split(x, y, test_size=0.2, random_state=0, stratify=y)


def build_model(steps_per_execution: int = STEPS_PER_EXECUTION) -> keras.Model:
    model = keras.Sequential(
        [
            keras.Input((64,)),
            keras.layers.Dense(256, "relu"),
            keras.layers.Dense(256, "relu"),
            keras.layers.Dense(10),
        ]
    )
    model.compile(
        optimizer=keras.optimizers.Adagrad(0.02),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        steps_per_execution=steps_per_execution,
    )
    return model


def timed_fit(model: keras.Model, x: np.ndarray, y: np.ndarray, epochs: int) -> float:
    """Trains for `epochs`, and gives mini-batches per second of all but the first one."""
    model.fit(x, y, batch_size=BATCH_SIZE, verbose=0)
    start = time.perf_counter()
    model.fit(x, y, batch_size=BATCH_SIZE, epochs=epochs, initial_epoch=1, verbose=0)
    model.get_weights()  # waits for whatever is still under way
    return (epochs - 1) * -(-len(x) // BATCH_SIZE) / (time.perf_counter() - start)


def run_plain(epochs: int) -> None:
    x_train, x_test, y_train, y_test = load_data()
    speeds = []
    for steps_per_execution in (1, STEPS_PER_EXECUTION):
        keras.utils.set_random_seed(1)
        model = build_model(steps_per_execution)
        speeds.append(timed_fit(model, x_train, y_train, epochs))
    _, accuracy = model.evaluate(x_test, y_test, verbose=0)
    print(accuracy, max(speeds))


def plain_in_its_own_process(epochs: int) -> tuple[float, float]:
    command = [sys.executable, __file__, "--plain", "--epochs", str(epochs)]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    accuracy, steps_per_second = map(float, output.split()[-2:])
    return accuracy, steps_per_second


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=30, help="at least 2")
    parser.add_argument("--plain", action="store_true", help="only plain Keras fit")
    options = parser.parse_args()
    if options.plain:
        run_plain(options.epochs)
        return

    print("Plain Keras fit, in a process of its own ...", flush=True)
    plain_accuracy, plain_speed = plain_in_its_own_process(options.epochs)

    print("The same model, two asynchronous workers ...", flush=True)
    strategy = tf_dsgd.DownpourStrategy(
        tf_dsgd.LocalCluster(num_workers=2), push_every=5, fetch_every=5
    )
    keras.utils.set_random_seed(1)
    x_train, x_test, y_train, y_test = load_data()
    with strategy.scope():
        model = build_model()
    speed = timed_fit(model, x_train, y_train, options.epochs)
    _, accuracy = model.evaluate(x_test, y_test, verbose=0)
    staleness = strategy.staleness()

    print()
    print(f"Trained a 64-256-256-10 network on {len(x_train)} images, {options.epochs} epochs,")
    print(
        f"{strategy.steps} mini-batches of {BATCH_SIZE} by two workers, {strategy.updates} updates."
    )
    print(f"held-out accuracy  {accuracy:.4f}   plain fit {plain_accuracy:.4f}")
    print(f"mini-batches/s     {speed:.0f}   plain fit {plain_speed:.0f}", end="")
    print(f"   ratio {speed / plain_speed:.2f}")
    print(
        f"staleness          mean {staleness.mean:.2f}, p50 {staleness.p50:g}, "
        f"p99 {staleness.p99:g}, max {staleness.max:g} updates"
    )


if __name__ == "__main__":
    main()
