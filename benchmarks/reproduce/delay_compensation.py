"""DC-ASGD against asynchronous and sequential SGD.

    python benchmarks/reproduce/delay_compensation.py --plot docs/images/delay_compensation.png

Zheng et al. (ICML 2017) train a ResNet-20 on CIFAR-10 with M = 4 workers: asynchronous SGD ends at
an error of 9.27 %, sequential SGD at 8.65, DC-ASGD with an adaptive lambda at 8.19. Here a network
32-64-10 (relu) learns what a random network 32-16-10 (tanh) says of standard normal inputs: the
class of its largest output, and with probability 0.1 any class. 20,000 examples, 10,000 held out,
of each seed's own network; mini-batches of 32; the rate falls to a tenth at half and at three
quarters of the updates, as the paper's falls twice. Simulated workers of one mean speed, whose
mini-batches take an exponentially distributed time.

Rate and lambda are chosen by the mean held-out error over the first seeds, and judged on the
others, so that a method with more settings to choose from gains nothing by that alone.
"""

import setting  # isort: skip (finds the package and `runs`)

import keras
import numpy as np
import runs
import side_by_side
import teacher

import tf_dsgd
from tf_dsgd.simulation.study import timetable

BATCH, TRAINED = 32, teacher.TRAINED
RATES = (-5, 1)  # powers of 2, from and to
DECAY = 0.95  # of the mean square
METHODS = {
    "SGD": (None, (0.0,)),
    "DC-ASGD-c": (None, (1.0, 10.0, 100.0)),
    "DC-ASGD-a": (DECAY, (0.3, 1.0, 3.0, 10.0)),
}


def measure(
    method: str, lam: float, workers: int, updates: int, data: list[tuple], seeds: list[int]
) -> dict:
    """Held-out errors in per cent and losses in training, `[rates, seeds]`."""
    decay = METHODS[method][0]
    rates = [2.0**k for k in range(RATES[0], RATES[1] + 1)]
    strategy = tf_dsgd.DownpourStrategy(local_rule="none")
    x, y = (np.stack(part, 1) for part in zip(*data, strict=True))

    def optimizer(given: side_by_side.Rates) -> keras.optimizers.Optimizer:
        rate = teacher.Falling(given.rates, updates)
        if method == "SGD":
            return keras.optimizers.SGD(rate)
        return tf_dsgd.optimizers.DelayCompensatedSGD(rate, lam, decay)

    study = side_by_side.Runs(
        strategy,
        workers,
        optimizer,
        rates,
        seeds,
        lambda rates, seeds: [
            side_by_side.Dense(rates, seeds, teacher.STUDENT, "relu"),
            side_by_side.Dense(rates, seeds, teacher.CLASSES),
        ],
        x[:TRAINED],
        y[:TRAINED],
        BATCH,
    )
    cluster = tf_dsgd.SimulatedCluster(workers, compute_seconds=tf_dsgd.Exponential(1.0), seed=1)
    loss = study.train(timetable(cluster, strategy.algorithm.exchange, updates))
    logits = study.logits(x[TRAINED:])
    wrong = logits.argmax(-1) != y[TRAINED:].T
    wrong |= ~np.isfinite(logits).all(-1)
    return {
        "method": method,
        "lambda": lam,
        "workers": workers,
        "updates": study.study.strategy.updates,
        "mean_staleness": study.study.strategy.staleness().mean,
        "rates": rates,
        "error": (100.0 * wrong.mean(-1)).tolist(),
        "loss": loss.tolist(),
    }


def choose(found: list[dict], tuning: int) -> dict:
    """The setting with the least error over the first seeds; the errors of the others."""
    best = min(
        ((np.mean(e[:tuning]), r, k) for r in found for k, e in enumerate(r["error"])),
        key=lambda choice: choice[0],
    )
    _, result, k = best
    lams = [r["lambda"] for r in found]
    edges = [k in (0, len(result["rates"]) - 1)]
    if len(lams) > 1:
        edges.append(result["lambda"] == max(lams))
    return {
        "rate": result["rates"][k],
        "lambda": result["lambda"],
        "errors": np.array(result["error"][k][tuning:]),
        "staleness": result["mean_staleness"],
        "at_the_edge": any(edges),
    }


def spread(values: np.ndarray) -> str:
    """Mean and its standard error."""
    error = values.std(ddof=1) / len(values) ** 0.5 if len(values) > 1 else float("nan")
    return f"{values.mean():.2f} ± {error:.2f}"


def chosen(results: list[dict], tuning: int) -> list[tuple[str, int, dict]]:
    """What each method chose at each number of workers."""
    keys = dict.fromkeys((r["workers"], r["method"]) for r in results)
    return [
        (
            method,
            workers,
            choose(
                [r for r in results if (r["workers"], r["method"]) == (workers, method)], tuning
            ),
        )
        for workers, method in keys
    ]


def name_of(method: str, workers: int) -> str:
    if method != "SGD":
        return method
    return "sequential SGD" if workers == 1 else "asynchronous SGD"


def report(results: list[dict], tuning: int) -> str:
    rows = []
    plain: dict[int, np.ndarray] = {}
    for method, workers, choice in chosen(results, tuning):
        if method == "SGD":
            plain[workers] = choice["errors"]
        rows.append(
            [
                str(workers),
                name_of(method, workers),
                f"{choice['staleness']:.1f}",
                f"{choice['rate']:g}",
                "" if method == "SGD" else f"{choice['lambda']:g}",
                spread(choice["errors"]),
                spread(choice["errors"] - plain[workers]) if method != "SGD" else "",
                spread(choice["errors"] - plain[1]) if workers > 1 and 1 in plain else "",
                "yes" if choice["at_the_edge"] else "",
            ]
        )
    header = ["M", "", "mean staleness", "rate", "lambda", "held-out error, %"]
    header += ["less asynchronous SGD's", "less sequential SGD's", "edge of the grid"]
    return runs.table(header, rows)


def plot(results: list[dict], tuning: int, path: str) -> None:
    pyplot = setting.pyplot()
    counts = [w for w in dict.fromkeys(r["workers"] for r in results) if w > 1]
    figure, axes = pyplot.subplots(1, len(counts), figsize=(4 * len(counts), 3.2), sharey=True)
    for axis, workers in zip(np.atleast_1d(axes), counts, strict=True):
        for r in (r for r in results if r["workers"] in (1, workers)):
            errors = np.array(r["error"])[:, tuning:]
            means = errors.mean(1)
            style = {"SGD": "-", "DC-ASGD-c": ":", "DC-ASGD-a": "--"}[r["method"]]
            color = {"SGD": "0.6" if r["workers"] == 1 else "black"}.get(r["method"])
            label = name_of(r["method"], r["workers"])
            label += "" if r["method"] == "SGD" else f", {r['lambda']:g}"
            axis.plot(r["rates"], means, style, color=color, label=label, marker=".")
        axis.set_xscale("log", base=2)
        axis.set_title(f"M = {workers}")
        axis.set_xlabel("first rate")
    least = min(np.mean(r["error"], 1).min() for r in results)
    np.atleast_1d(axes)[0].set_ylim(least - 0.5, least + 7)
    np.atleast_1d(axes)[0].set_ylabel("held-out error, %")
    np.atleast_1d(axes)[-1].legend(fontsize=6)
    figure.tight_layout()
    figure.savefig(path, dpi=90)


def main() -> None:
    parser = setting.arguments(__doc__)
    parser.add_argument("--workers", default="4,16", help="besides 1")
    parser.add_argument("--lam", help="by commas, in place of both grids")
    parser.add_argument("--updates", type=int, default=6000)
    parser.add_argument("--seeds", default=",".join(str(seed) for seed in range(1, 13)))
    parser.add_argument("--tuning", type=int, default=4, help="seeds that choose; judge: the rest")
    options = parser.parse_args()
    seeds = setting.numbers(options.seeds)
    data = [teacher.taught(seed) for seed in seeds]
    results = []
    for workers in [1, *setting.numbers(options.workers)]:
        for method, (_, lams) in METHODS.items():
            if workers == 1 and method != "SGD":
                continue
            if options.lam and method != "SGD":
                lams = setting.numbers(options.lam, float)
            for lam in lams:
                results.append(measure(method, lam, workers, options.updates, data, seeds))
                means = np.mean(results[-1]["error"], 1).round(2).tolist()
                print(workers, method, lam, means, flush=True)
    setting.finish(options, results, report, plot, options.tuning)


if __name__ == "__main__":
    main()
