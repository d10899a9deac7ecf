"""BatchNorm's moving statistics with many workers, against a serial pass at the same weights.

    python benchmarks/reproduce/batch_norm.py

A convolutional network with BatchNorm (momentum 0.9) learns scikit-learn's digits for 16 epochs of
45 mini-batches, which take an exponentially distributed time. The cross-entropy of held-out images
is taken twice: `own`, with the moving statistics that training left, and `serial`, at the same
final weights, with those of a plain Keras model after as many epochs at a rate of 0. `lag` is the
per cent that the first is above the second. Every seed has its own split, order, first weights and
delays; rates are given, for each method and number of workers one at which it learns.

The rate falls to zero along a cosine: statistics belong to the weights of the last dozens of
mini-batches, and while these still move, as they do under a large rate and the more the staler
gradients are, they are not the final ones', whoever takes them. That is what Adagrad on each
worker shows, at a constant rate, after one more epoch at a rate of 0, and at one that falls.
`moved` is how far the last epoch moved the weights, in per cent of their norm.
"""

import driver  # isort: skip (finds the package)

import contextlib
import dataclasses
import math
from collections.abc import Callable

import keras
import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import tf_dsgd

BATCH, HELD_OUT, EVERY = 32, 360, 5
STEPS = math.ceil((1797 - HELD_OUT) / BATCH)
"""Of an epoch."""
MANY = 16


@dataclasses.dataclass(frozen=True)
class Way:
    """How workers meet, and at what rate."""

    strategy: Callable[[tf_dsgd.SimulatedCluster], tf_dsgd.DownpourStrategy]
    exponent: Callable[[int], int]
    """From the number of workers to that of the first rate, a power of 2."""
    optimizer: type = keras.optimizers.SGD
    falls: bool = True
    still: bool = False
    """Whether an epoch at a rate of 0 follows."""


def softsync(cluster: tf_dsgd.SimulatedCluster) -> tf_dsgd.DownpourStrategy:
    return tf_dsgd.SoftsyncStrategy(cluster, gradients_per_update=cluster.num_workers)


def each_adagrad(**more: bool) -> Way:
    return Way(
        lambda cluster: tf_dsgd.DownpourStrategy(cluster, local_rule="optimizer"),
        lambda workers: -6,
        keras.optimizers.Adagrad,
        **more,
    )


WAYS = {
    "Downpour, period 1": Way(tf_dsgd.DownpourStrategy, lambda workers: -4),
    "Downpour, period 5": Way(
        lambda cluster: tf_dsgd.DownpourStrategy(cluster, push_every=EVERY, fetch_every=EVERY),
        lambda workers: -4,
    ),
    "softsync, c = M": Way(softsync, lambda workers: {4: -3, 16: -1}[workers]),
    "averaging every 5": Way(
        lambda cluster: tf_dsgd.PeriodicAveragingStrategy(cluster, average_every=EVERY),
        lambda workers: {4: -3, 16: -2}[workers],
    ),
    "elastic averaging every 5": Way(
        lambda cluster: tf_dsgd.ElasticAveragingStrategy(cluster, average_every=EVERY),
        lambda workers: {4: -3, 16: -2}[workers],
    ),
    "Adagrad on each, constant": each_adagrad(falls=False),
    "Adagrad on each, constant, then 0": each_adagrad(falls=False, still=True),
    "Adagrad on each": each_adagrad(),
}
PLAIN = "plain fit"


def build(way: Way, rate: float, epochs: int) -> keras.Model:
    layers = keras.layers
    model = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(16, 3, padding="same", use_bias=False),
            layers.BatchNormalization(momentum=0.9),
            layers.ReLU(),
            layers.MaxPooling2D(),
            layers.Conv2D(32, 3, padding="same", use_bias=False),
            layers.BatchNormalization(momentum=0.9),
            layers.ReLU(),
            layers.GlobalAveragePooling2D(),
            layers.Dense(10),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    falling = keras.optimizers.schedules.CosineDecay(rate, epochs * STEPS)
    model.compile(way.optimizer(falling if way.falls else rate), loss)
    return model


class Moved(keras.callbacks.Callback):
    """How far the last epoch moved the weights, in per cent of their norm."""

    per_cent = 0.0

    def _weights(self) -> np.ndarray:
        return np.concatenate([v.numpy().ravel() for v in self.model.trainable_variables])

    def on_epoch_begin(self, epoch: int, logs: dict | None = None) -> None:
        self._before = self._weights()

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        moved = np.linalg.norm(self._weights() - self._before)
        self.per_cent = 100.0 * float(moved / np.linalg.norm(self._before))


def with_serial_statistics(model: keras.Model, x, y, epochs: int) -> keras.Model:
    """A plain model of the same weights, whose statistics are those of one pass after another."""
    serial = build(Way(tf_dsgd.DownpourStrategy, lambda workers: 0, falls=False), 0.0, epochs)
    for mine, first in zip(model.trainable_variables, serial.trainable_variables, strict=True):
        first.assign(mine.numpy())
    serial.fit(x, y, batch_size=BATCH, epochs=epochs, shuffle=False, verbose=0)
    return serial


def train(condition: dict, seed: int, rate: float, epochs: int) -> dict[str, float]:
    """One run."""
    keras.utils.clear_session()
    keras.utils.set_random_seed(seed)
    x, y = load_digits(return_X_y=True)
    x = (x / 16.0).astype("float32").reshape(-1, 8, 8, 1)
    x, held_x, y, held_y = train_test_split(x, y, test_size=HELD_OUT, random_state=seed, stratify=y)
    plain = condition["way"] == PLAIN
    way = WAYS["Downpour, period 1" if plain else condition["way"]]
    cluster = tf_dsgd.SimulatedCluster(
        condition["workers"],
        compute_seconds=tf_dsgd.Exponential(1.0),
        network_seconds=0.05,
        seed=seed,
    )
    with contextlib.nullcontext() if plain else way.strategy(cluster).scope():
        model = build(way, rate, epochs)
    moved = Moved()
    given = {"batch_size": BATCH, "shuffle": False, "verbose": 0, "callbacks": [moved]}
    model.fit(x, y, epochs=epochs, **given)
    if way.still:
        model.optimizer.learning_rate = 0.0
        model.fit(x, y, epochs=1, **given)
    own, serial = (
        float(found.evaluate(held_x, held_y, batch_size=HELD_OUT, verbose=0))
        for found in (model, with_serial_statistics(model, x, y, epochs))
    )
    lag = 100.0 * (own / serial - 1.0)
    return {"lag": lag, "own": own, "serial": serial, "moved": moved.per_cent}


def run(condition, seeds, rates, options) -> dict:
    found = [[train(condition, seed, rate, options.epochs) for seed in seeds] for rate in rates]
    return {name: [[each[name] for each in row] for row in found] for name in found[0][0]}


def exponent(condition: dict) -> int:
    way = WAYS["Downpour, period 1" if condition["way"] == PLAIN else condition["way"]]
    return way.exponent(condition["workers"])


STUDY = driver.Study(
    name="batch_norm",
    conditions=[
        {"way": PLAIN, "workers": 1},
        {"way": "Adagrad on each, constant", "workers": 1},
        *({"way": way, "workers": 4} for way in list(WAYS)[:5]),
        *({"way": way, "workers": MANY} for way in WAYS),
    ],
    grid=lambda condition: (exponent(condition),) * 2,
    run=run,
    options={"epochs": (16, 1)},
    seeds=8,
    chosen_by="lag",
)

if __name__ == "__main__":
    driver.main(STUDY, __doc__)
