"""The same script on a simulated cluster: what do more workers, and slower networks, cost?

    python examples/simulated_cluster.py

Trains one linear model for as many mini-batches on clusters of different sizes. The clock is
virtual: a mini-batch takes 100 ms and a message 20 ms, whatever this machine does. The first
cluster is run twice, to show that a run repeats bit for bit.
"""

import argparse
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np

import tf_dsgd


def train(num_workers: int, epochs: int, seed: int):
    """Gives the weights found, the last loss and the strategy's staleness."""
    keras.utils.set_random_seed(0)
    random = np.random.default_rng(0)
    x = random.normal(size=(2048, 8)).astype("float32")
    y = x @ np.arange(1.0, 9.0, dtype="float32").reshape(8, 1)

    cluster = tf_dsgd.SimulatedCluster(
        num_workers, compute_seconds=0.1, network_seconds=0.02, seed=seed
    )
    strategy = tf_dsgd.DownpourStrategy(cluster)
    with strategy.scope():
        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
        model.compile(optimizer=keras.optimizers.SGD(0.01), loss="mse")
    history = model.fit(x, y, batch_size=16, epochs=epochs, shuffle=False, verbose=0)
    return model.get_weights()[0], history.history["loss"][-1], strategy.staleness()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", default="2,8,32", help="cluster sizes, by commas")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    sizes = [int(size) for size in options.workers.split(",")]

    print("workers  last loss  mean staleness  largest")
    for size in sizes:
        _, loss, staleness = train(size, options.epochs, options.seed)
        print(f"{size:7d}  {loss:9.4f}  {staleness.mean:14.2f}  {staleness.max:7g}")
    first, _, _ = train(sizes[0], options.epochs, options.seed)
    again, _, _ = train(sizes[0], options.epochs, options.seed)
    print("the same run twice gives the same weights:", bool((first == again).all()))


if __name__ == "__main__":
    main()
