"""Thirty workers, and what their staleness does: a fixed rate against alpha_0 / tau.

    python examples/softsync.py

Trains scikit-learn's handwritten digits by n-softsync on simulated workers, with n from nearly
synchronous (1) to an update for every gradient (30), at one learning rate. With the rate fixed
the stale gradients of a large n undo each other; divided by their staleness they do not.
"""

import argparse
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import tensorflow as tf
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import tf_dsgd


def train(data, num_workers: int, n: int, scaling: str | None, options: argparse.Namespace):
    """Gives the error on held-out images and the strategy."""
    x, x_held, y, y_held = data
    keras.utils.set_random_seed(1)
    cluster = tf_dsgd.SimulatedCluster(
        num_workers, compute_seconds=1.0, network_seconds=tf_dsgd.Exponential(0.05), seed=1
    )
    strategy = tf_dsgd.SoftsyncStrategy(
        cluster, gradients_per_update=num_workers // n, staleness_scaling=scaling
    )
    with strategy.scope():
        model = keras.Sequential(
            [keras.Input((64,)), keras.layers.Dense(64, "relu"), keras.layers.Dense(10)]
        )
        model.compile(
            optimizer=keras.optimizers.SGD(options.rate, momentum=0.9),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
    # One long epoch: at the end of each all workers come to rest, and begin with no staleness.
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(len(x), seed=1)
    model.fit(dataset.repeat(options.epochs).batch(4), shuffle=False, verbose=0)
    _, accuracy = model.evaluate(x_held, y_held, verbose=0)
    return 1.0 - accuracy, strategy


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=30)
    parser.add_argument("--n", default="1,30", help="the paper's n, by commas")
    parser.add_argument("--rate", type=float, default=0.1, help="alpha_0")
    parser.add_argument("--epochs", type=int, default=2)
    options = parser.parse_args()
    x, y = load_digits(return_X_y=True)
    x = (x / 16.0).astype("float32")
    data = train_test_split(x, y, test_size=360, random_state=0, stratify=y)

    print(" n  rate           held-out error  updates  mean staleness")
    for n in (int(n) for n in options.n.split(",")):
        for name, scaling in (("fixed", None), ("alpha_0 / tau", "inverse")):
            error, strategy = train(data, options.workers, n, scaling, options)
            staleness = strategy.staleness().mean
            print(f"{n:2d}  {name:13s} {error:14.1%} {strategy.updates:8d} {staleness:14.2f}")


if __name__ == "__main__":
    main()
