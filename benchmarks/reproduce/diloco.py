"""DiLoCo between synchronous training and plain averaging.

    python benchmarks/reproduce/diloco.py --plot docs/images/diloco.png

Douillard et al. (2023) train language models on 8 workers that meet every 500 steps: AdamW inside,
SGD with Nesterov momentum (rate 0.7, momentum 0.9) on the mean difference outside. That does as
well as synchronous training with 8 times the mini-batch, and better than plain averaging. Here the
task of teacher.py, at a very small scale: AdamW, 8 simulated workers, the same examples for all.
Synchronous training is plain Keras on the joint mini-batch; "one worker" is plain Keras on the
mini-batches of one of the 8, an eighth of the examples.
"""

import setting  # isort: skip (finds the package and `runs`)

import keras
import numpy as np
import runs
import teacher

import tf_dsgd

RATES = teacher.powers(-10, -3)
SYNCHRONOUS, ALONE = "synchronous", "one worker"


def diloco():
    return keras.optimizers.SGD(0.7, momentum=0.9, nesterov=True)


# (optimizer_state, outer optimizer)
METHODS = {
    "DiLoCo": ("local", diloco),
    "plain averaging, local state": ("local", lambda: None),
    "plain averaging, state averaged": ("average", lambda: None),
}
STYLES = ("ko-", "C0s--", "C1^:")


def measure(options, method: str, period: int, task: teacher.Task) -> dict:
    strategy, batch_size, steps = None, options.batch_size, options.steps
    if method in METHODS:
        state, outer = METHODS[method]
        strategy = tf_dsgd.PeriodicAveragingStrategy(
            teacher.simulated(options.workers),
            average_every=period,
            optimizer_state=state,
            outer_optimizer=outer(),
        )
    else:
        steps //= options.workers
        batch_size *= options.workers if method == SYNCHRONOUS else 1
    result = teacher.train(strategy, keras.optimizers.AdamW, RATES, task, batch_size, steps)
    print(method, period, np.mean(result["loss"], 1).round(4).tolist(), flush=True)
    return {"method": method, "period": period, **result}


def find(results: list[dict], method: str, period: int) -> dict:
    return next(r for r in results if (r["method"], r["period"]) == (method, period))


def losses(results: list[dict], method: str, period: int = 0) -> np.ndarray:
    return teacher.chosen(find(results, method, period)["loss"])


def report(results: list[dict]) -> str:
    base = losses(results, SYNCHRONOUS)
    rows = []
    for result in results:
        method, period = result["method"], result["period"]
        loss = losses(results, method, period)
        rows.append([method, str(period or ""), str(result["updates"])])
        rows[-1] += [teacher.rate_of(result, "loss"), teacher.spread(loss, 4)]
        rows[-1] += ["" if method == SYNCHRONOUS else teacher.spread(loss - base, 4)]
        better = method == "DiLoCo"
        plain = losses(results, "plain averaging, local state", period) if better else None
        rows[-1] += [teacher.spread(loss - plain, 4) if better else ""]
        rows[-1] += [teacher.spread(teacher.chosen(result["error"]))]
    header = ["", "average_every", "updates or averages", "rate", "held-out loss"]
    header += ["less synchronous training's", "less plain averaging's", "held-out error, %"]
    return runs.table(header, rows)


def plot(results: list[dict], path: str) -> None:
    pyplot = setting.pyplot()
    periods = sorted({r["period"] for r in results} - {0})
    size = (2.9 * len(periods) + 0.5, 3.2)
    figure, axes = pyplot.subplots(1, len(periods), figsize=size, sharey=True)
    for axis, period in zip(np.atleast_1d(axes), periods, strict=True):
        for method, style in zip(METHODS, STYLES, strict=True):
            result = find(results, method, period)
            axis.plot(result["rates"], np.mean(result["loss"], 1), style, label=method)
        for method, style in ((SYNCHRONOUS, "-"), (ALONE, ":")):
            result = find(results, method, 0)
            means = np.mean(result["loss"], 1)
            axis.plot(result["rates"], means, style, color="0.6", label=method)
        axis.set_xscale("log", base=2)
        axis.set_xlabel("first rate of AdamW")
        axis.set_title(f"average_every={period}", fontsize=9)
    least = min(np.mean(r["loss"], 1).min() for r in results)
    np.atleast_1d(axes)[0].set_ylim(least - 0.02, least + 0.5)
    np.atleast_1d(axes)[0].set_ylabel("held-out loss")
    np.atleast_1d(axes)[0].legend(fontsize=6)
    figure.tight_layout()
    figure.savefig(path, dpi=90)


def main() -> None:
    parser = teacher.arguments(__doc__, steps=16_384, seeds=6)
    parser.add_argument("--periods", default="4,16,64,256")
    parser.add_argument("--workers", type=int, default=8)
    options = parser.parse_args()
    task = teacher.Task(setting.numbers(options.seeds))
    results = [measure(options, method, 0, task) for method in (SYNCHRONOUS, ALONE)]
    for period in setting.numbers(options.periods):
        results += [measure(options, method, period, task) for method in METHODS]
    setting.finish(options, results, report, plot)


if __name__ == "__main__":
    main()
