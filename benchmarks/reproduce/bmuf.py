"""Blockwise model-update filtering against plain averaging, as workers become more.

    python benchmarks/reproduce/bmuf.py --plot docs/images/bmuf.png

Chen and Huo (ICASSP 2016) train speech models: with plain averaging accuracy falls as workers
become more, BMUF keeps that of one. Here the task of teacher.py, SGD on the workers, the same
number of mini-batches in all for every number of workers. BMUF has eta = 1 - 1/M and zeta = 1,
once in the paper's classical and once in its Nesterov form.
"""

import setting  # isort: skip (finds the package and `runs`)

import functools

import keras
import numpy as np
import runs
import teacher

import tf_dsgd

RATES, MOMENTUM_RATES = teacher.powers(-5, 1), teacher.powers(-8, -2)
ALONE = "one worker"
METHODS = {
    "plain averaging": lambda: None,
    "BMUF": lambda: tf_dsgd.optimizers.BlockMomentum(nesterov=False),
    "BMUF, Nesterov": lambda: tf_dsgd.optimizers.BlockMomentum(),
}
STYLES = ("ko-", "C0s--", "C1^:")


def measure(options, method: str, workers: int, task: teacher.Task) -> dict:
    strategy = None
    if method != ALONE:
        strategy = tf_dsgd.PeriodicAveragingStrategy(
            teacher.simulated(workers),
            average_every=options.period,
            optimizer_state=options.optimizer_state,
            outer_optimizer=METHODS[method](),
        )
    optimizer = functools.partial(keras.optimizers.SGD, momentum=options.momentum)
    rates = MOMENTUM_RATES if options.momentum else RATES
    result = teacher.train(strategy, optimizer, rates, task, options.batch_size, options.steps)
    print(method, workers, np.mean(result["error"], 1).round(2).tolist(), flush=True)
    return {"method": method, **result}


def find(results: list[dict], method: str, workers: int) -> dict:
    return next(r for r in results if (r["method"], r["workers"]) == (method, workers))


def counts(results: list[dict]) -> list[int]:
    return sorted({r["workers"] for r in results if r["method"] != ALONE})


def report(results: list[dict]) -> str:
    """At each one's best rate, and at that of one worker."""
    lone = find(results, ALONE, 1)
    alone = teacher.chosen(lone["error"])
    place = teacher.best(np.array(lone["error"]))
    rows = [["1", ALONE, "", teacher.rate_of(lone), teacher.spread(alone), "", ""]]
    rows[0] += [teacher.spread(np.array(lone["error"][place]))]
    for workers in counts(results):
        plain = teacher.chosen(find(results, "plain averaging", workers)["error"])
        for method in METHODS:
            result = find(results, method, workers)
            errors = teacher.chosen(result["error"])
            less = "" if method == "plain averaging" else teacher.spread(errors - plain)
            rows.append([str(workers), method, str(result["updates"]), teacher.rate_of(result)])
            rows[-1] += [teacher.spread(errors), teacher.spread(errors - alone), less]
            rows[-1] += [teacher.spread(np.array(result["error"][place]))]
    header = ["M", "", "averages", "rate", "held-out error, %", "less that of one worker"]
    return runs.table([*header, "less plain averaging's", "at the rate of one worker"], rows)


def plot(results: list[dict], path: str) -> None:
    pyplot = setting.pyplot()
    figure, axes = pyplot.subplots(1, 2, figsize=(8, 3.2), sharey=True)
    lone = find(results, ALONE, 1)
    place = teacher.best(np.array(lone["error"]))
    workers = counts(results)
    for axis, judged, title in (
        (axes[0], lambda r: teacher.chosen(r["error"]), "each at its best rate"),
        (axes[1], lambda r: np.array(r["error"][place]), "all at the best rate of one worker"),
    ):
        for method, style in zip(METHODS, STYLES, strict=True):
            errors = [judged(find(results, method, m)) - judged(lone) for m in workers]
            teacher.curve(axis, workers, errors, style, method)
        axis.axhline(0, color="0.6", linestyle=":")
        axis.set_xscale("log", base=2)
        axis.set_xlabel("workers")
        axis.set_title(title, fontsize=9)
    axes[0].set_ylabel("error above one worker, points")
    axes[0].set_ylim(-0.7, 9)  # what is worse is in the table
    axes[0].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=90)


def main() -> None:
    parser = teacher.arguments(__doc__, steps=16_384, seeds=6)
    parser.add_argument("--period", type=int, default=8)
    parser.add_argument("--workers", default="2,4,8,16,32")
    parser.add_argument("--momentum", type=float, default=0.0, help="of the workers' SGD")
    parser.add_argument("--optimizer_state", default="average", help="matters with momentum")
    options = parser.parse_args()
    task = teacher.Task(setting.numbers(options.seeds))
    results = [measure(options, ALONE, 1, task)]
    for workers in setting.numbers(options.workers):
        results += [measure(options, method, workers, task) for method in METHODS]
    setting.finish(options, results, report, plot)


if __name__ == "__main__":
    main()
