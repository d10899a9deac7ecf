"""The chief of faults.py: trains one strategy, and writes down how it gets on.

    python -m tf_dsgd.launch --workers 3 --ps 2 benchmarks/faulty_chief.py '{"folder": "/tmp/x"}'

In `folder` it writes `progress.jsonl`, a line whenever a worker's messages or presence changed, and
`epochs.jsonl`, a line for each epoch with the counts of the witness and of the ledger. It trains
until there is a file `stop` there, to the end of that epoch. It prints RESULT lines.

The witness is a layer that counts, for each example, how often it was trained on, in what the
shards applied: integers, which the ledger knows nothing of.
"""

import dataclasses
import gc
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import tensorflow as tf

import tf_dsgd

BATCH_SIZE = 16
HIDDEN = (256, 256)
SAMPLE_SECONDS = 0.02


@dataclasses.dataclass(frozen=True)
class Spec:
    """What to train."""

    folder: str
    """Where to write to, and where `stop` is looked for."""
    strategy: str = "Downpour"
    worker_timeout_seconds: float = 5.0
    late_after_seconds: float = 10.0
    copies: int = 8
    """How often each of the 1437 examples is there, each time with other noise."""
    undisturbed: bool = True
    """Whether a second run of as many epochs follows, in which nobody is to strike."""


def _downpour(**options) -> Callable:
    return lambda cluster: tf_dsgd.DownpourStrategy(cluster, **options)


def _averaging(outer: Callable = lambda: None, **options) -> Callable:
    return lambda cluster: tf_dsgd.PeriodicAveragingStrategy(
        cluster, outer_optimizer=outer(), **options
    )


def _momentum() -> keras.optimizers.Optimizer:
    return keras.optimizers.SGD(0.02, momentum=0.9)


# A name to (the strategy of a cluster, what the model is compiled with).
STRATEGIES: dict[str, tuple[Callable, Callable]] = {
    "Downpour": (_downpour(), lambda: keras.optimizers.SGD(0.1)),
    "Downpour, pushes under way": (
        _downpour(push_every=2, fetch_every=6),
        lambda: keras.optimizers.Adagrad(0.02),
    ),
    "update-based": (
        _downpour(push_every=4, fetch_every=4, local_rule="optimizer"),
        lambda: keras.optimizers.Adam(0.0005),
    ),
    "bounded staleness": (_downpour(max_staleness=2), lambda: keras.optimizers.SGD(0.1)),
    "bounded staleness, two fetches a push": (
        _downpour(push_every=4, fetch_every=2, max_staleness=1),
        lambda: keras.optimizers.SGD(0.05),
    ),
    "softsync": (
        lambda cluster: tf_dsgd.SoftsyncStrategy(cluster, gradients_per_update=3),
        lambda: keras.optimizers.SGD(0.2),
    ),
    "AdaptiveRevision": (_downpour(), lambda: tf_dsgd.optimizers.AdaptiveRevision(0.05)),
    "DelayCompensatedSGD": (_downpour(), lambda: tf_dsgd.optimizers.DelayCompensatedSGD(0.1)),
    "FASGD": (_downpour(), lambda: tf_dsgd.optimizers.FASGD(0.001)),
    "averaging, state averaged": (_averaging(average_every=8), _momentum),
    "averaging, state local": (_averaging(average_every=8, optimizer_state="local"), _momentum),
    "averaging, state reset": (_averaging(average_every=8, optimizer_state="reset"), _momentum),
    "BMUF": (
        _averaging(tf_dsgd.optimizers.BlockMomentum, average_every=8, optimizer_state="reset"),
        _momentum,
    ),
    "DiLoCo": (
        _averaging(
            lambda: keras.optimizers.SGD(0.7, momentum=0.9, nesterov=True),
            average_every=8,
            optimizer_state="local",
        ),
        lambda: keras.optimizers.AdamW(0.001),
    ),
    "elastic averaging": (
        lambda cluster: tf_dsgd.ElasticAveragingStrategy(cluster, average_every=8),
        _momentum,
    ),
}


class Witness(keras.layers.Layer):
    """Counts how often each example, whose number is the first column, was trained on."""

    def __init__(self, examples: int, **options):
        super().__init__(**options)
        self.examples = examples

    def build(self, _):
        self.times = self.add_weight(
            name="times",
            shape=(self.examples,),
            dtype="int32",
            initializer="zeros",
            trainable=False,
        )

    def call(self, x, training=False):
        if training:
            numbers = tf.cast(x[:, :1], tf.int32)
            ones = tf.ones_like(numbers[:, 0])
            self.times.assign_add(tf.scatter_nd(numbers, ones, [self.examples]))
        return x[:, 1:]


def make_data(copies: int) -> tuple[np.ndarray, ...]:
    """scikit-learn's digits: (x, y) to train on, with the example's number first; x, y to test."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    x, y = (digits.data / 16.0).astype("float32"), digits.target
    order = np.random.default_rng(0).permutation(len(x))
    train, test = order[360:], order[:360]
    noise = np.random.default_rng(1).normal(0.0, 0.2, (copies, len(train), x.shape[1]))
    many = (x[train] + noise.astype("float32")).reshape(-1, x.shape[1])
    numbers = np.arange(len(many), dtype="float32")[:, None]
    return np.concatenate([numbers, many], 1), np.tile(y[train], copies), x[test], y[test]


def make_model(examples: int, optimizer: keras.optimizers.Optimizer) -> keras.Model:
    layers = [keras.layers.Dense(width, "relu") for width in HIDDEN]
    witness = Witness(examples, name="witness")
    model = keras.Sequential([keras.Input((65,)), witness, *layers, keras.layers.Dense(10)])
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def accuracy(model: keras.Model, x: np.ndarray, y: np.ndarray) -> float:
    """Computed here, from the weights as they are read: `evaluate` would ask the workers."""
    dense = [w.numpy() for w in model.trainable_variables]
    for kernel, bias in zip(dense[0::2], dense[1::2], strict=True):
        x = np.maximum(x, 0.0) if x.shape[1] != 64 else x
        x = x @ kernel + bias
    return float((x.argmax(1) == y).mean())


class Progress(threading.Thread):
    """Writes a line whenever messages or the presence of workers changed.

    A line is (seconds of the machine's monotonic clock, for each worker the messages known to be
    applied, whether it is there, its incarnation). It asks no other process.
    """

    def __init__(self, strategy: Any, path: Path):
        super().__init__(name="progress", daemon=True)
        self.engine, self.path = strategy.engine, path
        self.ended = threading.Event()

    def run(self):
        last = None
        with self.path.open("a", buffering=1) as file:
            while not self.ended.wait(SAMPLE_SECONDS):
                store = self.engine.store
                now = [self.engine.numbers(), list(store.present), list(store.incarnations)]
                now.append(self.engine.rounds.members.connection.changes)
                if now != last:
                    file.write(json.dumps([time.monotonic(), *now]) + "\n")
                    last = now


class Epochs(keras.callbacks.Callback):
    """Writes what the witness and the ledger have counted after each epoch; ends when told to."""

    def __init__(self, strategy: Any, folder: Path):
        super().__init__()
        self.strategy, self.folder = strategy, folder
        self.counts: dict[str, Any] = {}

    def on_epoch_end(self, epoch, logs=None):
        self.counts = counted(self.strategy, self.model, epoch + 1, self.params["steps"])
        with (self.folder / "epochs.jsonl").open("a") as file:
            file.write(json.dumps({"at": time.monotonic(), **self.counts}) + "\n")
        if (self.folder / "stop").exists():
            self.model.stop_training = True


def counted(strategy: Any, model: keras.Model, epochs: int, steps: int) -> dict[str, Any]:
    """By the witness, and by the shards: sums over all of them."""
    times = model.get_layer("witness").times.numpy().astype(int)
    ledger = strategy.ledger()
    return {
        "epochs": epochs,
        "expected": epochs * steps,
        "doubled": int(np.maximum(times - epochs, 0).sum()),
        "lost": int(np.maximum(epochs - times, 0).sum()),
        "steps": strategy.steps,
        "sent": sum(shard.sent for shard in ledger.shards),
        "applied": sum(shard.applied for shard in ledger.shards),
        "refused": sum(shard.refused for shard in ledger.shards),
        "unaccounted": sum(
            shard.in_flight + shard.sent - shard.applied - sum(shard.reasons.values())
            for shard in ledger.shards
        )
        + ledger.cut_off,
        "objects": len(gc.get_objects()),
    }


def train(spec: Spec, folder: Path, epochs: int) -> dict[str, Any]:
    """One fit; what was counted at its end."""
    make_strategy, make_optimizer = STRATEGIES[spec.strategy]
    cluster = tf_dsgd.TFCluster(
        worker_timeout_seconds=spec.worker_timeout_seconds,
        late_after_seconds=spec.late_after_seconds,
    )
    strategy = make_strategy(cluster)
    keras.utils.set_random_seed(1)
    x, y, test_x, test_y = make_data(spec.copies)
    with strategy.scope():
        model = make_model(len(x), make_optimizer())
    progress, ends = Progress(strategy, folder / "progress.jsonl"), Epochs(strategy, folder)
    progress.start()
    start = time.monotonic()
    model.fit(x, y, batch_size=BATCH_SIZE, epochs=epochs, verbose=0, callbacks=[ends])
    seconds = time.monotonic() - start
    progress.ended.set()
    progress.join()
    return {**ends.counts, "seconds": seconds, "accuracy": accuracy(model, test_x, test_y)}


def main() -> None:
    spec = Spec(**json.loads(sys.argv[1]))
    folder = Path(spec.folder)
    result = train(spec, folder, 1_000_000)
    print("RESULT", json.dumps(result), flush=True)
    if spec.undisturbed:
        other = folder / "undisturbed"
        other.mkdir()
        print("RESULT", json.dumps(train(spec, other, result["epochs"])), flush=True)


if __name__ == "__main__":
    main()
