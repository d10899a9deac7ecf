"""FASGD against staleness-scaled SGD, from 1 to 4,000 workers.

    python benchmarks/reproduce/fasgd.py --plot docs/images/fasgd.png

Odena (2016) trains a network 784-200-10 on MNIST, in a simulation of M clients of which a random
one finishes next: FASGD always reaches a lower cost than SGD with alpha_0 / tau, and the gap grows
with M. Here a network 64-200-10 (relu) on scikit-learn's handwritten digits, on simulated workers
whose mini-batches take an exponentially distributed time, which is the same: each is as likely to
be next. SGD at a fixed rate stands beside the two.

All settings make the same number of updates. The cost is the cross-entropy of the held-out images,
at the end of training and averaged over training (at the ends of twenty equal parts of it); each
method has the best of its grid of rates at each setting, by the cost averaged over training.
"""

import setting  # isort: skip (finds the package and `runs`)

import keras
import numpy as np
import runs
import side_by_side

import tf_dsgd
from tf_dsgd.simulation.study import timetable

# M:batch. Three keep M times batch at 128, as the paper does; then M grows.
SETTINGS = "1:128,32:4,4:32,400:32,4000:32"
# The optimizer, what scales its step, and the grid: powers of 2, from and to.
METHODS = {
    "SGD": (keras.optimizers.SGD, None, (-9, 0)),
    "SGD, alpha_0 / tau": (keras.optimizers.SGD, "inverse", (-5, 4)),
    "FASGD": (tf_dsgd.optimizers.FASGD, None, (-13, -4)),
}
PARTS = 20
# Copies of the weights of all workers, in floats, up to which seeds are trained together.
TOGETHER = 7e8


def layers(rates: int, seeds: list[int]) -> list[keras.layers.Layer]:
    return [
        side_by_side.Dense(rates, seeds, 200, "relu"),
        side_by_side.Dense(rates, seeds, 10),
    ]


def measure(
    name: str, workers: int, batch: int, updates: int, seeds: list[int], grid: tuple | None = None
) -> dict:
    """One method in one setting, for all its rates and all seeds."""
    low, high = grid or METHODS[name][2]
    rates = [2.0**k for k in range(low, high + 1)]
    size = workers * len(rates) * (64 * 200 + 200 + 200 * 10 + 10)
    together = max(1, int(TOGETHER // size))
    costs = [
        curves(name, workers, batch, updates, seeds[k : k + together], rates)
        for k in range(0, len(seeds), together)
    ]
    cost = np.concatenate([c for c, _ in costs], axis=2)  # [parts, rates, seeds]
    average = cost.mean(0)
    chosen = int(np.argmin(average.mean(1)))
    return {
        "method": name,
        "workers": workers,
        "batch": batch,
        "updates": updates,
        "mean_staleness": costs[0][1],
        "rates": rates,
        "best": chosen,
        "at_the_edge": chosen in (0, len(rates) - 1),
        "averaged": average.tolist(),
        "final": cost[-1].tolist(),
    }


def curves(
    name: str, workers: int, batch: int, updates: int, seeds: list[int], rates: list[float]
) -> tuple[np.ndarray, float]:
    """The held-out cost at the end of each part, and the mean staleness."""
    optimizer, scaling, _ = METHODS[name]
    strategy = tf_dsgd.DownpourStrategy(local_rule="none", staleness_scaling=scaling)
    cluster = tf_dsgd.SimulatedCluster(
        workers, compute_seconds=tf_dsgd.Exponential(1.0), seed=seeds[0]
    )
    x, y, x_held, y_held = side_by_side.digits(seeds, epochs=20)
    study = side_by_side.Runs(strategy, workers, optimizer, rates, seeds, layers, x, y, batch)
    schedule = side_by_side.joined(timetable(cluster, strategy.algorithm.exchange, updates))
    cost = []
    for part in side_by_side.pieces(schedule, PARTS):
        study.train(part)
        cost.append(np.array(side_by_side.cross_entropy(y_held, study.logits(x_held))))
    # What diverged counts as a cost above that of knowing nothing.
    return np.nan_to_num(np.stack(cost), nan=100.0, posinf=100.0), (
        study.study.strategy.staleness().mean
    )


def spread(values: np.ndarray) -> str:
    """Mean and, of several, its standard error."""
    if len(values) == 1:
        return f"{values[0]:.3f}"
    return f"{values.mean():.3f} ± {values.std(ddof=1) / len(values) ** 0.5:.3f}"


def cell(result: dict, what: str) -> str:
    rate = f"2^{int(np.log2(result['rates'][result['best']]))}"
    edge = ", edge of the grid" if result["at_the_edge"] else ""
    return f"{spread(np.array(result[what][result['best']]))} ({rate}{edge})"


def report(results: list[dict]) -> str:
    methods = list(dict.fromkeys(r["method"] for r in results))
    tables = []
    for what, title in {"averaged": "averaged over training", "final": "at the end"}.items():
        rows = []
        for key in dict.fromkeys((r["workers"], r["batch"]) for r in results):
            found = [r for r in results if (r["workers"], r["batch"]) == key]
            staleness = f"{found[0]['mean_staleness']:.1f}"
            rows.append([*map(str, key), staleness, *(cell(r, what) for r in found)])
        header = ["M", "batch", "mean staleness", *(f"{m}, {title}" for m in methods)]
        tables.append(runs.table(header, rows))
    return "\n\n".join(tables)


def plot(results: list[dict], path: str) -> None:
    pyplot = setting.pyplot()
    figure, axes = pyplot.subplots(1, 2, figsize=(8, 3.2))
    largest = max(r["workers"] for r in results)
    common = sorted((r for r in results if r["batch"] == 32), key=lambda r: r["workers"])
    for name in dict.fromkeys(r["method"] for r in results):
        found = [r for r in common if r["method"] == name]
        means = [np.mean(r["averaged"][r["best"]]) for r in found]
        axes[0].plot([r["workers"] for r in found], means, "o-", label=name)
        for r in (r for r in found if r["workers"] == largest):
            means = np.mean(r["averaged"], 1)
            axes[1].plot(r["rates"], means, "o-", label=name, markersize=4)
    axes[0].set_xscale("log")
    axes[0].set_xlabel("M, workers (batch 32)")
    axes[0].set_ylabel("held-out cost, averaged over training")
    axes[1].set_title(f"M = {largest}")
    axes[1].set_xscale("log", base=2)
    axes[1].set_xlabel("rate")
    for axis in axes:
        axis.set_yscale("log")
        axis.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=90)


def main() -> None:
    parser = setting.arguments(__doc__)
    parser.add_argument("--settings", default=SETTINGS, help="M:batch, by commas")
    parser.add_argument("--methods", default="|".join(METHODS), help="by |")
    parser.add_argument("--updates", type=int, default=6000)
    parser.add_argument("--seeds", default="1")
    options = parser.parse_args()
    seeds = setting.numbers(options.seeds)
    results = []
    for pair in options.settings.split(","):
        workers, batch = (int(part) for part in pair.split(":"))
        for name in options.methods.split("|"):
            results.append(measure(name, workers, batch, options.updates, seeds))
            print(pair, name, cell(results[-1], "averaged"), flush=True)
    setting.finish(options, results, report, plot)


if __name__ == "__main__":
    main()
