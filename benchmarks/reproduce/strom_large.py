"""Bytes of compressed messages of a network of 14.6 M parameters.

    python benchmarks/reproduce/strom_large.py --json strom_large.json

Strom (Interspeech 2015) trains a network of 14.6 M parameters: 58.4 MB a message dense, 0.21 MB at
tau = 2, 4.5 KB at tau = 15; entropy coding is a further 3 times less. Here two workers train a
network of as many (429 inputs, five hidden layers of 1,633, 2,000 classes that a random network
gives) for `--messages` mini-batches; the second half of the messages is counted.
"""

import setting  # isort: skip (finds the package and `runs`)

import keras
import numpy as np
import runs
from strom import BATCH, counted, threshold

import tf_dsgd
from tf_dsgd.engine import traffic

TAUS = (0.002, 0.004, 0.0055, 0.008, 0.016, 0.032)


def train(tau: float, options) -> dict:
    """Bytes of a large network's messages."""
    keras.utils.clear_session()
    keras.utils.set_random_seed(1)
    random = np.random.default_rng(1)
    count = options.messages * BATCH
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
    size = float(counts[traffic.BYTES] / counts[traffic.MESSAGES])
    emitted = float(counts[traffic.EMITTED] / counts[traffic.ELEMENTS])
    return {
        "tau": tau,
        "parameters": model.count_params(),
        "messages": int(counts[traffic.MESSAGES]),
        "dense": float(counts[traffic.DENSE] / counts[traffic.MESSAGES]),
        "emitted": emitted,
        "uncoded": 4 * emitted * model.count_params(),
        "bytes": size,
    }


def report(results: list[dict]) -> str:
    rows = [
        [
            f"{r['tau']:g}",
            f"{r['dense'] / 1e6:.1f} MB",
            f"{100 * r['emitted']:.4f} %",
            f"{r['uncoded'] / 1e3:,.1f} KB",
            f"{r['dense'] / r['uncoded']:,.0f}",
            f"{r['bytes'] / 1e3:,.1f} KB",
            f"{r['uncoded'] / r['bytes']:.2f}",
        ]
        for r in results
    ]
    heads = ["tau", "dense", "emitted", "32 bits each", "times less", "entropy coded"]
    return runs.table([*heads, "a further times less"], rows)


def main() -> None:
    parser = setting.arguments(__doc__)
    parser.add_argument("--messages", type=int, default=40)
    options = parser.parse_args()
    results = []
    for tau in TAUS:
        results.append(train(tau, options))
        print(results[-1], flush=True)
    setting.finish(options, results, report, lambda results, path: None)


if __name__ == "__main__":
    main()
