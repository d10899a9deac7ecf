"""Workers that train by themselves and meet: local SGD, BMUF, DiLoCo, and elastic averaging.

    python examples/averaging.py

Trains scikit-learn's handwritten digits with simulated workers. All of them see the same number of
mini-batches; what differs is what becomes of the workers' weights when they meet.
"""

import argparse
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import tf_dsgd

SGD = keras.optimizers.SGD


def contenders(every: int) -> dict:
    """Name -> (a function from a cluster to a strategy, the optimizer to compile)."""

    def averaging(**options):
        return lambda cluster: tf_dsgd.PeriodicAveragingStrategy(
            cluster, average_every=every, **options
        )

    diloco = SGD(0.7, momentum=0.9, nesterov=True)
    return {
        "the mean": (averaging(), SGD(0.05, momentum=0.9)),
        "BMUF": (
            averaging(optimizer_state="reset", outer_optimizer=tf_dsgd.optimizers.BlockMomentum()),
            SGD(0.05, momentum=0.9),
        ),
        "DiLoCo": (
            averaging(optimizer_state="local", outer_optimizer=diloco),
            keras.optimizers.AdamW(0.002),
        ),
        "elastic (EAMSGD)": (
            lambda cluster: tf_dsgd.ElasticAveragingStrategy(cluster, average_every=every),
            SGD(0.05, momentum=0.9, nesterov=True),
        ),
    }


def train(data, make, optimizer, options):
    """Gives the error on held-out images and the strategy."""
    x, x_held, y, y_held = data
    keras.utils.set_random_seed(1)
    cluster = tf_dsgd.SimulatedCluster(
        options.workers, compute_seconds=tf_dsgd.LogNormal(1.0, 0.3), seed=1
    )
    strategy = make(cluster)
    with strategy.scope():
        model = keras.Sequential(
            [keras.Input((64,)), keras.layers.Dense(64, "relu"), keras.layers.Dense(10)]
        )
        model.compile(
            optimizer=type(optimizer).from_config(optimizer.get_config()),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
    model.fit(x, y, batch_size=4, epochs=options.epochs, verbose=0)
    _, accuracy = model.evaluate(x_held, y_held, verbose=0)
    return 1.0 - accuracy, strategy


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--every", type=int, default=8, help="mini-batches between meetings")
    parser.add_argument("--epochs", type=int, default=4)
    options = parser.parse_args()
    x, y = load_digits(return_X_y=True)
    x = (x / 16.0).astype("float32")
    data = train_test_split(x, y, test_size=360, random_state=0, stratify=y)

    print("what becomes of the weights  held-out error  mini-batches  updates")
    for name, (make, optimizer) in contenders(options.every).items():
        error, strategy = train(data, make, optimizer, options)
        print(f"{name:27s} {error:15.1%} {strategy.steps:13d} {strategy.updates:8d}")


if __name__ == "__main__":
    main()
