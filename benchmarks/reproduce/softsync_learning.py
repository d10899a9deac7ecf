"""n-softsync with a fixed rate and with alpha_0 / tau: no learning against learning.

    python benchmarks/reproduce/softsync_learning.py --plot docs/images/softsync_learning.png

Zhang et al. (IJCAI 2016) train CIFAR-10 on 30 learners with mini-batches of 4 and a momentum of
0.9: with a fixed rate 15- and 30-softsync stay at an error of 90 % (chance), with alpha_0 / tau
every n reaches about 18 %. Here: scikit-learn's handwritten digits (1,437 images to train on, 360
held out, 10 classes), a network 64-64-10, otherwise the same setting, on simulated workers through
`fit`. The paper asks what happens at the rate of synchronous training; the table has several rates.
"""

import setting  # isort: skip (finds the package and `runs`)

import keras
import numpy as np
import runs
import tensorflow as tf
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

BATCH, MOMENTUM = 4, 0.9
RATES = (0.01, 0.03, 0.1, 0.3)
RULES = {"fixed": None, "alpha_0 / tau": "inverse"}


def digits():
    x, y = load_digits(return_X_y=True)
    x = (x / 16.0).astype("float32")
    return train_test_split(x, y, test_size=360, random_state=0, stratify=y)


def train(n: int, scaling: str | None, rate: float, epochs: int, seed: int) -> dict:
    """One run; errors in per cent. One drain only, at the end, as the paper's have."""
    x, x_held, y, y_held = digits()
    keras.utils.set_random_seed(seed)
    strategy = setting.softsync(n, setting.workers(seed=seed), scaling)
    with strategy.scope():
        model = keras.Sequential(
            [keras.Input((64,)), keras.layers.Dense(64, "relu"), keras.layers.Dense(10)]
        )
        model.compile(
            keras.optimizers.SGD(rate, momentum=MOMENTUM),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
    data = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(len(x), seed=seed)
    model.fit(data.repeat(epochs).batch(BATCH), shuffle=False, verbose=0)
    _, accuracy = model.evaluate(x_held, y_held, verbose=0)
    staleness = strategy.staleness()
    return {
        "n": n,
        "scaling": scaling,
        "rate": rate,
        "seed": seed,
        "error": 100.0 * (1.0 - accuracy),
        "steps": strategy.steps,
        "updates": strategy.updates,
        "mean_staleness": staleness.mean,
        "max_staleness": staleness.max,
    }


def report(results: list[dict], ns: list[int], rates: list[float]) -> str:
    rows = []
    for n in ns:
        for name, scaling in RULES.items():
            errors = [mean_error(results, n, scaling, rate) for rate in rates]
            rows.append([f"{n}-softsync", name, *(f"{error:.1f}" for error in errors)])
    return runs.table(["held-out error, %", "rate", *(f"alpha_0 = {r}" for r in rates)], rows)


def mean_error(results: list[dict], n: int, scaling: str | None, rate: float) -> float:
    found = [r["error"] for r in results if (r["n"], r["scaling"], r["rate"]) == (n, scaling, rate)]
    return float(np.mean(found))


def plot(results: list[dict], ns: list[int], rates: list[float], path: str) -> None:
    pyplot = setting.pyplot()
    figure, axes = pyplot.subplots(1, len(ns), figsize=(3.2 * len(ns), 3), sharey=True)
    for axis, n in zip(np.atleast_1d(axes), ns, strict=True):
        for (name, scaling), style in zip(RULES.items(), ("o--", "s-"), strict=True):
            errors = [mean_error(results, n, scaling, rate) for rate in rates]
            axis.plot(rates, errors, style, label=name)
        axis.set_xscale("log")
        axis.set_title(f"{n}-softsync")
        axis.set_xlabel("alpha_0")
        axis.axhline(90, color="0.8", linewidth=0.8)
    np.atleast_1d(axes)[0].set_ylabel("held-out error, %")
    np.atleast_1d(axes)[0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=90)


def main() -> None:
    parser = setting.softsync_arguments(__doc__)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--rates", default=",".join(str(rate) for rate in RATES))
    parser.add_argument("--seeds", default="1")
    options = parser.parse_args()
    ns = [int(n) for n in options.n.split(",")]
    rates = [float(rate) for rate in options.rates.split(",")]
    results = []
    for seed in (int(seed) for seed in options.seeds.split(",")):
        for n in ns:
            for scaling in RULES.values():
                for rate in rates:
                    results.append(train(n, scaling, rate, options.epochs, seed))
                    print(results[-1], flush=True)
    setting.finish(options, results, report, plot, ns, rates)


if __name__ == "__main__":
    main()
