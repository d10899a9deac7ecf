"""What compressed messages cost in accuracy, and what they save in bytes and in time.

    python benchmarks/reproduce/strom.py

Four simulated workers train a network 32-256-256-10 (76,810 parameters, relu). The classes are
given by a network 32-16-10 (tanh), of which each seed has its own, and a tenth of the labels are
wrong; no example comes twice. Downpour, SGD at a rate that falls along a cosine from a first one,
which is chosen for each codec. A worker pushes after every mini-batch and fetches after every
fourth, but where it says otherwise. Every mini-batch takes 10 ms (log-normal, sigma 0.2), a message
or a fetch 1 ms and its bytes over a link of so many Mbit/s. What a codec computes takes no virtual
time. A run in which a codec finds what it cannot send, since it is not finite, counts as one of an
error of 90 %. All workers meet ten times. Links of 10 Mbit/s are there for the seconds, at one rate
for all.

All make the same number of mini-batches; `error` is then that of 10,000 held-out examples, whose
labels are right, and `seconds` are the virtual ones that it took. `bytes` are those of a message,
which workers count as they encode; `uncoded` are a threshold's without entropy coding, 4 for each
element that it emits. The time of real links is slow_link.py's, and the bytes of a network of the
paper's size strom_large.py's.
"""

import driver  # isort: skip (finds the package)

import dataclasses
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tf_dsgd
from tf_dsgd import compression
from tf_dsgd.algorithm import Codec
from tf_dsgd.engine import traffic

WORKERS, BATCH, HELD_OUT, MEETINGS = 4, 32, 10_000, 10
WORST = 90.0  # the error of one class for all
TAUS = (0.016, 0.064, 0.25, 1.0, 4.0)


def threshold(tau: float) -> Codec:
    return compression.Threshold(tau, entropy=True)


@dataclasses.dataclass(frozen=True)
class Case:
    """What is sent, and how often."""

    codec: Codec = dataclasses.field(default_factory=Codec)
    push_every: int = 1
    fetch_every: int = 4


CODECS = {
    "none": Case(),
    "none, pushes every 4": Case(push_every=4),
    "none, both every 20": Case(push_every=20, fetch_every=20),
    "Cast, bfloat16": Case(compression.Cast("bfloat16")),
    "QSGD, 64 levels": Case(compression.QSGD(64)),
    "QSGD, 4 levels": Case(compression.QSGD(4)),
    "OneBit": Case(compression.OneBit()),
    "EFSign": Case(compression.EFSign()),
    "PowerSGD, rank 4": Case(compression.PowerSGD(4)),
    "PowerSGD, rank 1": Case(compression.PowerSGD(1)),
    "TopK, 1 %": Case(compression.TopK(0.01)),
    "TopK, 0.1 %": Case(compression.TopK(0.001)),
    **{f"Threshold {tau:g}": Case(threshold(tau)) for tau in TAUS},
}


def taught(seed: int, steps: int) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and classes; those held out, 10,000 at the end, are without noise."""
    random = np.random.default_rng(seed)
    first = random.standard_normal((32, 16)) / 32**0.5
    second = random.standard_normal((16, 10))
    x = random.standard_normal((steps * BATCH + HELD_OUT, 32)).astype("float32")
    y = np.argmax(np.tanh(2 * x @ first) @ second, 1)
    wrong = random.random(len(y)) < 0.1
    wrong[-HELD_OUT:] = False
    return x, np.where(wrong, random.integers(0, 10, len(y)), y)


def counted(strategy: Any) -> np.ndarray:
    """All workers' counts, together."""
    return np.sum(list(strategy.engine.store.traffic.read().values()), 0)


def train(case: Case, megabits: int, seed: int, rate: float, steps: int) -> dict[str, float]:
    """One run."""
    keras.utils.clear_session()
    keras.utils.set_random_seed(seed)
    x, y = taught(seed, steps)
    cluster = tf_dsgd.SimulatedCluster(
        WORKERS,
        compute_seconds=tf_dsgd.LogNormal(0.01, sigma=0.2),
        network_seconds=0.001,
        network_bytes_per_second=megabits * 1e6 / 8,
        seed=seed,
    )
    strategy = tf_dsgd.DownpourStrategy(
        cluster,
        push_every=case.push_every,
        fetch_every=case.fetch_every,
        compression=case.codec,
    )
    with strategy.scope():
        layers = [keras.layers.Dense(256, "relu"), keras.layers.Dense(256, "relu")]
        model = keras.Sequential([keras.Input((32,)), *layers, keras.layers.Dense(10)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        falling = keras.optimizers.schedules.CosineDecay(rate, steps)
        model.compile(keras.optimizers.SGD(falling), loss)
    data = tf.data.Dataset.from_tensor_slices((x[:-HELD_OUT], y[:-HELD_OUT])).batch(BATCH)
    each = steps // MEETINGS
    dense = 4.0 * model.count_params()
    found = {"bytes": dense, "uncoded": dense}
    try:
        model.fit(data, epochs=MEETINGS, steps_per_epoch=each, shuffle=False, verbose=0)
    except tf.errors.InvalidArgumentError as error:
        if "is not finite" not in str(error):
            raise
        # The rate is too large for this codec, which refuses to send that.
        return {"error": WORST, "seconds": float(strategy.engine.clock()), **found}
    seconds = float(strategy.engine.clock())
    answers = np.argmax(model.predict(x[-HELD_OUT:], batch_size=5000, verbose=0), 1)
    if type(case.codec) is not Codec:
        counts = counted(strategy)
        found["bytes"] = found["uncoded"] = counts[traffic.BYTES] / counts[traffic.MESSAGES]
        if isinstance(case.codec, compression.Threshold):
            found["uncoded"] = dense * counts[traffic.EMITTED] / counts[traffic.ELEMENTS]
    error = 100.0 * float(np.mean(answers != y[-HELD_OUT:]))
    return {"error": error, "seconds": seconds, **found}


def run(condition, seeds, rates, options) -> dict:
    case = CODECS[condition["codec"]]
    found = [
        [train(case, condition["link"], seed, rate, options.steps) for seed in seeds]
        for rate in rates
    ]
    return {name: [[each[name] for each in row] for row in found] for name in found[0][0]}


SLOW = ("none", "none, pushes every 4", "none, both every 20", "Cast, bfloat16", "Threshold 0.064")
STUDY = driver.Study(
    name="strom",
    conditions=[
        *({"codec": name, "link": 100} for name in CODECS),
        *({"codec": name, "link": 10} for name in SLOW),
    ],
    grid=lambda condition: (-3, -1) if condition["link"] == 100 else (-2, -2),
    run=run,
    options={"steps": (4_000, 40)},
    seeds=5,
)

if __name__ == "__main__":
    driver.main(STUDY, __doc__)
