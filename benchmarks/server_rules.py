"""What an update costs on a shard, by rule: microseconds per million parameters.

Times the function that applies a message to one dense weight, and the one by which a worker
fetches, of two local workers, in one process. The rules take turns, so that a slow moment of the
machine hits all alike; ratios are taken within a turn. The limit is TensorFlow's own gradient
descent on a variable of that size, which a bare function applies and another reads.
"""

import argparse
import os
import time
from collections.abc import Callable

import keras
import numpy as np
import runs
import tensorflow as tf
from server_rules_table import BARE, BASELINE, table

import tf_dsgd
from tf_dsgd import optimizers
from tf_dsgd.engine.state import INCARNATION, SEQUENCE

RULES: dict[str, Callable[[], keras.optimizers.Optimizer]] = {
    "SGD": lambda: keras.optimizers.SGD(0.01),
    BASELINE: lambda: keras.optimizers.Adagrad(0.01, initial_accumulator_value=1.0),
    "Adam": lambda: keras.optimizers.Adam(0.001),
    "AdaptiveRevision": lambda: optimizers.AdaptiveRevision(0.01),
    "DelayCompensatedSGD": lambda: optimizers.DelayCompensatedSGD(0.01),
    "DelayCompensatedSGD, adaptive": lambda: optimizers.DelayCompensatedSGD(
        0.01, lam=2.0, mean_square_decay=0.95
    ),
    "FASGD": lambda: optimizers.FASGD(0.005),
}


class Shard:
    """A shard with one weight of so many parameters, under one rule."""

    def __init__(self, rule: str, parameters: int):
        self.strategy = tf_dsgd.DownpourStrategy(tf_dsgd.LocalCluster(2))
        with self.strategy.scope():
            model = keras.Sequential(
                [
                    keras.Input((parameters // 100,)),
                    keras.layers.Dense(100, use_bias=False, kernel_initializer="zeros"),
                ]
            )
            model.compile(RULES[rule](), loss="mse")
        model.fit(np.zeros((2, parameters // 100)), np.zeros((2, 100)), batch_size=1, verbose=0)
        self.program = self.strategy.engine.program
        self.deliver = self.program.deliver
        self.gradient = tf.random.normal(model.weights[0].shape, stddev=0.01)
        self.clock = self.strategy.engine.store.clock.of(0).numpy()

    def update(self) -> None:
        self.clock[SEQUENCE] += 1
        version = self.strategy.updates - 1  # another worker's message came first
        header = [0, self.clock[INCARNATION], self.clock[SEQUENCE], version, 1]
        applied = self.deliver(tf.constant(header, tf.int64), [self.gradient])
        if not bool(applied):
            raise RuntimeError(f"The message {header} was refused.")

    def fetch(self) -> None:
        int(self.program.fetch[1]())


class Bare:
    """As many parameters, without Keras and this package."""

    def __init__(self, parameters: int):
        self.weight = tf.Variable(tf.zeros((parameters // 100, 100)))
        self.gradient = tf.random.normal(self.weight.shape, stddev=0.01)
        self.copy = tf.Variable(self.weight)
        self._update = tf.function(self._descend, autograph=False)
        self._fetch = tf.function(self._read, autograph=False)

    def _descend(self, gradient: tf.Tensor) -> None:
        tf.raw_ops.ResourceApplyGradientDescent(var=self.weight.handle, alpha=0.01, delta=gradient)

    def _read(self) -> None:
        self.copy.assign(self.weight.read_value(), read_value=False)

    def update(self) -> None:
        self._update(self.gradient)

    def fetch(self) -> None:
        self._fetch()


def seconds(function: Callable[[], None], calls: int) -> float:
    """Of one call, the mean of several."""
    start = time.perf_counter()
    for _ in range(calls):
        function()
    return (time.perf_counter() - start) / calls


def measure(parameters: int, repetitions: int, calls: int) -> dict[str, dict[str, list[float]]]:
    """Microseconds per million parameters: by rule, of updates and of fetches."""
    shards: dict[str, Shard | Bare] = {rule: Shard(rule, parameters) for rule in RULES}
    shards[BARE] = Bare(parameters)
    results: dict[str, dict[str, list[float]]] = {
        rule: {"update": [], "fetch": []} for rule in shards
    }
    for repetition in range(repetitions + 1):
        for rule, shard in shards.items():
            shard.fetch()
            for what, times in results[rule].items():
                micro = 1e6 * seconds(getattr(shard, what), calls) / (parameters / 1e6)
                if repetition:  # the first one warms up
                    times.append(micro)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parameters", default="1000000,10000000", help="sizes of the weight")
    parser.add_argument("--repetitions", type=int, default=15)
    parser.add_argument("--calls", type=int, default=10, help="updates timed together")
    parser.add_argument("--json", help="where to write every single figure")
    arguments = parser.parse_args()
    origin = runs.provenance(os.environ)
    print(runs.heading(origin))
    groups = []
    for parameters in map(int, arguments.parameters.split(",")):
        results = measure(parameters, arguments.repetitions, arguments.calls)
        groups.append({"parameters": parameters, "results": results})
        print(f"\n{parameters:,} parameters; microseconds per million parameters:\n")
        print(table(results))
    runs.write_json(arguments.json, {**origin, "groups": groups})


if __name__ == "__main__":
    main()
