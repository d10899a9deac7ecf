"""The distribution of staleness under n-softsync.

    python benchmarks/reproduce/softsync_staleness.py --plot docs/images/softsync_staleness.png

Zhang et al. (IJCAI 2016) measured on 30 learners that the mean staleness of n-softsync is about n,
that it is above 2n with a probability below 1e-4, and that 1-softsync sees 0, 1 and 2 only. Here on
simulated workers through `fit`, whose mini-batches all take a second and whose messages take an
exponentially distributed time of 0.05 s on average; and, since the claim depends on learners of one
speed, also with mini-batches of an exponentially distributed time.
"""

import setting  # isort: skip (finds the package and `runs`)

import keras
import numpy as np
import runs

import tf_dsgd

SPEEDS = {"one second": 1.0, "exponential, mean 1 s": tf_dsgd.Exponential(1.0)}


def measure(n: int, speed: str, messages: int) -> dict:
    strategy = setting.softsync(n, setting.workers(SPEEDS[speed]), None)
    with strategy.scope():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False)])
        model.compile(keras.optimizers.SGD(0.0), "mse")
    x = np.ones((messages, 1), "float32")
    model.fit(x, x, batch_size=1, verbose=0)
    counts = strategy.state()["staleness"]
    counts = counts[: np.flatnonzero(counts)[-1] + 1]
    staleness = strategy.staleness()
    return {
        "n": n,
        "speed": speed,
        "messages": staleness.count,
        "mean": staleness.mean,
        "max": staleness.max,
        "above_2n": float(counts[2 * n + 1 :].sum() / counts.sum()),
        "counts": counts.tolist(),
    }


def report(results: list[dict]) -> str:
    rows = [
        [
            f"{r['n']}-softsync",
            r["speed"],
            str(r["messages"]),
            f"{r['mean']:.2f}",
            f"{r['max']:g}",
            f"{r['above_2n']:.1e}",
        ]
        for r in results
    ]
    return runs.table(["", "mini-batch", "messages", "mean", "largest", "P(tau > 2n)"], rows)


def plot(results: list[dict], path: str) -> None:
    pyplot = setting.pyplot()
    ns = list(dict.fromkeys(r["n"] for r in results))
    figure, axes = pyplot.subplots(1, len(ns), figsize=(3.2 * len(ns), 3))
    for axis, n in zip(np.atleast_1d(axes), ns, strict=True):
        for r in (r for r in results if r["n"] == n):
            shares = np.array(r["counts"]) / sum(r["counts"])
            axis.step(range(len(shares)), shares, where="mid", label=r["speed"])
        axis.set_xlim(-0.5, 4 * n + 0.5)
        axis.axvline(n, color="0.6", linestyle=":")
        axis.set_title(f"{n}-softsync")
        axis.set_xlabel("staleness")
    np.atleast_1d(axes)[0].set_ylabel("share of messages")
    np.atleast_1d(axes)[0].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=90)


def main() -> None:
    parser = setting.softsync_arguments(__doc__)
    parser.add_argument("--messages", type=int, default=40_000)
    options = parser.parse_args()
    results = []
    for speed in SPEEDS:
        for n in (int(n) for n in options.n.split(",")):
            results.append(measure(n, speed, options.messages))
            print({k: v for k, v in results[-1].items() if k != "counts"}, flush=True)
    setting.finish(options, results, report, plot)


if __name__ == "__main__":
    main()
