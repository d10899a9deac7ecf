"""What all contenders of recommender.py train, and how each is measured.

Two tables of `rows` x 32 and a small network on what they give for a user and an item; mini-batches
of 1,024. Which ids occur is drawn from Zipf's law, and scattered over the table by a hash.

Nothing of Keras or TensorFlow is imported: a contender brings its own.
"""

import dataclasses
import os
import time
from typing import Any

import memory
import numpy as np
import processor_time
import traffic

BATCH, WIDTH = 1024, 32
RATES = {"sgd": 0.05, "adagrad": 0.05, "adam": 0.001}
ACCUMULATOR, EPSILON = 0.1, 1e-7
BETAS = 0.9, 0.999


UNTIMED = 4
"""Epochs. One of our workers begins each, by functions which TensorFlow prepares at their first use
on that worker; which of the two it is, is chance."""


@dataclasses.dataclass(frozen=True)
class Spec:
    """What to run."""

    kind: str = "split"
    """`split`, `unsplit`, `half`, `unread`: ours; `plain`: Keras's `fit`; `bare`: TensorFlow alone;
    `parameter_server`: tf_keras."""
    optimizer: str = "adagrad"
    rows: int = 10_000
    live: int = 0
    """So many of the rows occur; 0: all of them may."""
    period: int = 1
    """`push_every` and `fetch_every`, or `average_every`; and `steps_per_execution`, of ours and of
    all others."""
    steps: int = 200
    """Mini-batches of an epoch."""
    seconds: float = 5.0
    """After epochs that are not timed, as many are as take so long; at least one."""
    workers: int = 2


def zipf(random: np.random.Generator, rows: int, live: int, count: int) -> np.ndarray:
    """Ids of probability 1/rank, by the inverse of its (continuous) distribution."""
    ranks = np.exp(random.random(count) * np.log(live or rows)).astype(np.int64) - 1
    return ranks * 2654435761 % rows  # a prime: no two ranks have one id


def make_data(spec: Spec) -> tuple[dict[str, np.ndarray], np.ndarray]:
    random = np.random.default_rng(0)
    user, item = (zipf(random, spec.rows, spec.live, BATCH * spec.steps) for _ in range(2))
    return {"user": user, "item": item}, ((user * 31 + item * 17) % 7 < 3).astype(np.float32)


def rows_per_step(spec: Spec) -> float:
    """Different rows of both tables that a mini-batch names, on average."""
    x, _ = make_data(spec)
    batches = [batch for ids in x.values() for batch in ids.reshape(-1, BATCH)]
    return float(np.mean([len(np.unique(batch)) for batch in batches]) * len(x))


def build_model(keras: Any, spec: Spec) -> Any:
    """The compiled model, of Keras 3 or of tf_keras."""
    layers, optimizers = keras.layers, keras.optimizers
    inputs = {name: keras.Input((), dtype="int64", name=name) for name in ("user", "item")}
    user, item = (
        layers.Embedding(spec.rows, WIDTH, name=f"{name}s")(ids) for name, ids in inputs.items()
    )
    hidden = layers.Concatenate()([user, item, layers.Multiply()([user, item])])
    model = keras.Model(inputs, layers.Dense(1)(layers.Dense(64, "relu")(hidden)))
    made = {"sgd": optimizers.SGD, "adagrad": optimizers.Adagrad, "adam": optimizers.Adam}
    model.compile(
        optimizer=made[spec.optimizer](RATES[spec.optimizer]),
        loss=keras.losses.BinaryCrossentropy(from_logits=True),
        steps_per_execution=spec.period,
    )
    return model


class Meter:
    """Seconds, processor time, bytes and memory of processes, from `start` to `stop`."""

    def __init__(self, pids: processor_time.Pids | None = None):
        self._pids = pids
        self.started = 0.0

    def start(self) -> None:
        if self._pids is None:
            self._pids = {processor_time.CHIEF: [os.getpid()]}
        self._bytes = traffic.counted()
        self._cpu = processor_time.read(self._pids)
        self.started = time.perf_counter()

    def stop(self) -> None:
        self.seconds = time.perf_counter() - self.started
        self._cpu = processor_time.spent(self._cpu, processor_time.read(self._pids))
        after = traffic.counted()
        self._bytes = None if after is None or self._bytes is None else after - self._bytes

    def result(self, steps: int) -> dict:
        """What was measured over so many mini-batches."""
        found = {
            "steps": steps,
            "seconds": self.seconds,
            "steps_per_second": steps / self.seconds,
            "examples_per_second": BATCH * steps / self.seconds,
            "cpu_seconds": self._cpu,
            "peak_bytes": {
                role: max(memory.peak_of(pid) for pid in own) for role, own in self._pids.items()
            },
        }
        # Within one process nothing is sent.
        if self._bytes is not None and len(self._pids) > 1:
            found["sent_bytes"] = self._bytes
        return found


def timer(keras: Any, meter: Meter, seconds: float) -> Any:
    """A callback that starts the meter after some epochs and ends `fit` after as long.

    When an epoch ends all workers are at rest: its logs have been computed.
    """

    class Timer(keras.callbacks.Callback):
        timed = 0

        def on_epoch_end(self, epoch, logs=None):
            self.timed = max(0, epoch + 1 - UNTIMED)
            if not self.timed:
                if epoch + 1 == UNTIMED:
                    meter.start()
                return
            if time.perf_counter() - meter.started >= seconds:
                meter.stop()
                self.model.stop_training = True

    return Timer()


EPOCHS = 100_000
"""Of a fit that `timer` ends."""
