"""Elastic averaging against Downpour, as the period grows.

    python benchmarks/reproduce/elastic.py --plot docs/images/elastic.png

Zhang, Choromanska and LeCun (NIPS 2015) train convolutional networks with 4, 8 and 16 workers and
periods of 1, 4, 16 and 64: Downpour becomes unstable as the period grows, EASGD stays stable, and
EAMSGD, with Nesterov momentum on the workers, is best. Here the task of teacher.py, mini-batches
that take an exponentially distributed time, the same number of mini-batches in all settings.
elasticity is the paper's 0.9 / M. Downpour is that of the same paper: workers make SGD steps and
push their sum, which the shard adds (local_rule="optimizer").
"""

import setting  # isort: skip (finds the package and `runs`)

from collections.abc import Callable
from functools import partial

import keras
import numpy as np
import runs
import teacher

import tf_dsgd

ALONE = "one worker"
nesterov = partial(keras.optimizers.SGD, momentum=0.9, nesterov=True)
SGD_RATES = teacher.powers(-8, 0)


def downpour(cluster: tf_dsgd.SimulatedCluster, period: int) -> tf_dsgd.DownpourStrategy:
    return tf_dsgd.DownpourStrategy(
        cluster, push_every=period, fetch_every=period, local_rule="optimizer"
    )


def elastic(cluster: tf_dsgd.SimulatedCluster, period: int) -> tf_dsgd.ElasticAveragingStrategy:
    return tf_dsgd.ElasticAveragingStrategy(cluster, average_every=period)


METHODS = {
    "Downpour": (downpour, keras.optimizers.SGD, SGD_RATES),
    "EASGD": (elastic, keras.optimizers.SGD, SGD_RATES),
    "EAMSGD": (elastic, nesterov, teacher.powers(-8, -1)),
}
STYLES = ("ko-", "C0s--", "C1^:")


def measure(options, method: str, workers: int, period: int, task: teacher.Task) -> dict:
    make, optimizer, rates = METHODS.get(method, (None, keras.optimizers.SGD, SGD_RATES))
    strategy = None
    if make is not None:
        strategy = make(teacher.simulated(workers, tf_dsgd.Exponential(1.0)), period)
    result = teacher.train(strategy, optimizer, rates, task, options.batch_size, options.steps)
    if strategy is not None:
        result["mean_staleness"] = strategy.staleness().mean
    print(method, workers, period, np.mean(result["error"], 1).round(2).tolist(), flush=True)
    return {"method": method, "period": period, **result}


def find(results: list[dict], method: str, workers: int, period: int) -> dict:
    wanted = (method, workers, period)
    return next(r for r in results if (r["method"], r["workers"], r["period"]) == wanted)


def cells(results: list[dict]) -> list[tuple[int, int]]:
    """(workers, period)."""
    found = ((r["workers"], r["period"]) for r in results if r["method"] != ALONE)
    return list(dict.fromkeys(found))


def stable(result: dict, limit: float) -> float:
    """The largest rate up to which, from the best one on, the error stays below `limit`."""
    means = np.mean(result["error"], 1)
    last = teacher.best(np.array(result["error"]))
    while last + 1 < len(means) and means[last + 1] < limit:
        last += 1
    return result["rates"][last]


def report(results: list[dict], *, factor: float = 1.25) -> str:
    """The errors at each one's best rate, and up to which rate they stay near one worker's."""
    lone = find(results, ALONE, 1, 0)
    alone = teacher.chosen(lone["error"])
    limit = factor * float(np.mean(alone))

    def table(cell: Callable[[dict], str]) -> str:
        rows = [
            [str(m), str(period), *(cell(find(results, method, m, period)) for method in METHODS)]
            for m, period in cells(results)
        ]
        return runs.table(["M", "period", *METHODS], rows)

    def error(result: dict) -> str:
        return f"{teacher.spread(teacher.chosen(result['error']))} ({teacher.rate_of(result)})"

    def last(result: dict) -> str:
        rate = stable(result, limit)
        means = np.mean(result["error"], 1)
        if means.min() >= limit:
            return "none"
        edge = ", edge" if rate == result["rates"][-1] else ""
        return teacher.power(rate) + edge

    return "\n\n".join(
        [
            f"Held-out error, % (rate); one worker: {error(lone)}",
            table(error),
            f"The largest rate with an error below {limit:.1f} %, {factor} times one worker's:",
            table(last),
        ]
    )


def plot(results: list[dict], path: str) -> None:
    pyplot = setting.pyplot()
    counts = list(dict.fromkeys(m for m, _ in cells(results)))
    figure, axes = pyplot.subplots(
        1, len(counts), figsize=(3.2 * len(counts) + 0.5, 3.2), sharey=True, squeeze=False
    )
    alone = teacher.chosen(find(results, ALONE, 1, 0)["error"])
    for axis, m in zip(axes[0], counts, strict=True):
        periods = [period for other, period in cells(results) if other == m]
        for method, style in zip(METHODS, STYLES, strict=True):
            errors = [teacher.chosen(find(results, method, m, p)["error"]) - alone for p in periods]
            teacher.curve(axis, periods, errors, style, method)
        axis.axhline(0, color="0.6", linestyle=":")
        axis.set_xscale("log", base=2)
        axis.set_xlabel("period")
        axis.set_title(f"M = {m}", fontsize=9)
    axes[0, 0].set_ylabel("error above one worker, points")
    axes[0, 0].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=90)


def main() -> None:
    parser = teacher.arguments(__doc__, steps=8192, seeds=6)
    parser.add_argument("--periods", default="1,4,16,64")
    parser.add_argument("--workers", default="4,8,16")
    options = parser.parse_args()
    task = teacher.Task(setting.numbers(options.seeds))
    results = [measure(options, ALONE, 1, 0, task)]
    for workers in setting.numbers(options.workers):
        for period in setting.numbers(options.periods):
            for method in METHODS:
                results.append(measure(options, method, workers, period, task))
    setting.finish(options, results, report, plot)


if __name__ == "__main__":
    main()
