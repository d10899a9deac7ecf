"""Bytes of compressed messages of a network of 14.6 M parameters.

    python benchmarks/reproduce/strom_large.py

Strom (Interspeech 2015) trains a network of 14.6 M parameters: 58.4 MB a message dense, 0.21 MB at
tau = 2, 4.5 KB at tau = 15; entropy coding is a further 3 times less. Here two workers train a
network of as many (429 inputs, five hidden layers of 1,633, 2,000 classes that a random network
gives) for `--messages` mini-batches; the second half of the messages is counted. `emitted` is the
share of elements in per cent, `uncoded` what they take at 32 bits each, all in KB.
"""

import driver  # isort: skip (finds the package)

import keras
import numpy as np
from strom import BATCH, counted, threshold

import tf_dsgd
from tf_dsgd.engine import traffic

TAUS = (0.002, 0.004, 0.0055, 0.008, 0.016, 0.032)


def train(tau: float, seed: int, messages: int) -> dict[str, float]:
    """Bytes of a large network's messages."""
    keras.utils.clear_session()
    keras.utils.set_random_seed(seed)
    random = np.random.default_rng(seed)
    count = messages * BATCH
    x = random.standard_normal((count, 429)).astype("float32")
    hidden = np.tanh(x @ random.standard_normal((429, 64)) / 429**0.5 * 2)
    y = np.argmax(hidden @ random.standard_normal((64, 2000)), 1)
    strategy = tf_dsgd.DownpourStrategy(
        tf_dsgd.SimulatedCluster(2, compute_seconds=[1.0, 1.1]), compression=threshold(tau)
    )
    with strategy.scope():
        layers = [keras.layers.Dense(1633, "relu") for _ in range(5)]
        model = keras.Sequential([keras.Input((429,)), *layers, keras.layers.Dense(2000)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.1), loss)
    half = count // 2
    model.fit(x[:half], y[:half], batch_size=BATCH, verbose=0)
    before = counted(strategy)
    model.fit(x[half:], y[half:], batch_size=BATCH, verbose=0)
    counts = counted(strategy) - before
    emitted = counts[traffic.EMITTED] / counts[traffic.ELEMENTS]
    dense = counts[traffic.DENSE] / counts[traffic.MESSAGES]
    coded = counts[traffic.BYTES] / counts[traffic.MESSAGES]
    uncoded = 4.0 * emitted * model.count_params()
    found = {
        "emitted": 100.0 * emitted,
        "dense": dense / 1e3,
        "uncoded": uncoded / 1e3,
        "coded": coded / 1e3,
        "times_less": dense / uncoded,
        "further": uncoded / coded,
    }
    return {name: float(value) for name, value in found.items()}


def run(condition, seeds, rates, options) -> dict:
    found = [train(condition["tau"], seed, options.messages) for seed in seeds]
    return {name: [[each[name] for each in found]] for name in found[0]}


STUDY = driver.Study(
    name="strom_large",
    conditions=[{"tau": tau} for tau in TAUS],
    grid=lambda condition: (0, 0),
    run=run,
    options={"messages": (40, 4)},
    seeds=5,
    chosen_by="coded",
)

if __name__ == "__main__":
    driver.main(STUDY, __doc__)
