"""What becomes of the optimizer's state at an average: averaged, each worker's own, or reset.

    python benchmarks/reproduce/averaging_policies.py --plot docs/images/averaging_policies.png

The three policies of `PeriodicAveragingStrategy`, with SGD of momentum 0.9 and with Adam, at short
and long periods; the task of teacher.py, 8 simulated workers. No paper's claim is tested: users of
other libraries report that optimizers' states drift apart where only weights are averaged.
"""

import setting  # isort: skip (finds the package and `runs`)

from functools import partial

import keras
import numpy as np
import runs
import teacher

import tf_dsgd

POLICIES = ("average", "local", "reset")
OPTIMIZERS = {
    "SGD, momentum 0.9": (partial(keras.optimizers.SGD, momentum=0.9), teacher.powers(-7, -1)),
    "Adam": (keras.optimizers.Adam, teacher.powers(-10, -3)),
}


def measure(options, name: str, period: int, policy: str, task: teacher.Task) -> dict:
    optimizer, rates = OPTIMIZERS[name]
    strategy = None
    if period:
        strategy = tf_dsgd.PeriodicAveragingStrategy(
            teacher.simulated(options.workers), average_every=period, optimizer_state=policy
        )
    result = teacher.train(strategy, optimizer, rates, task, options.batch_size, options.steps)
    print(name, period, policy, np.mean(result["error"], 1).round(2).tolist(), flush=True)
    return {"optimizer": name, "period": period, "policy": policy, **result}


def find(results: list[dict], name: str, period: int, policy: str) -> dict:
    wanted = (name, period, policy)
    return next(r for r in results if (r["optimizer"], r["period"], r["policy"]) == wanted)


def cells(results: list[dict]) -> list[tuple[str, int]]:
    """(optimizer, period), without those of one worker."""
    found = dict.fromkeys((r["optimizer"], r["period"]) for r in results)
    return [(name, period) for name, period in found if period]


def report(results: list[dict]) -> str:
    rows = []
    for name, period in cells(results):
        alone = teacher.chosen(find(results, name, 0, "")["error"])
        base = teacher.chosen(find(results, name, period, "average")["error"])
        for policy in POLICIES:
            result = find(results, name, period, policy)
            errors = teacher.chosen(result["error"])
            less = "" if policy == "average" else teacher.spread(errors - base)
            rows.append([name, str(period), policy, teacher.rate_of(result)])
            rows[-1] += [teacher.spread(errors), less, teacher.spread(errors - alone)]
    header = ["", "average_every", "optimizer_state", "rate", "held-out error, %"]
    return runs.table([*header, 'less that of "average"', "less that of one worker"], rows)


def plot(results: list[dict], path: str) -> None:
    pyplot = setting.pyplot()
    names = list(dict.fromkeys(name for name, _ in cells(results)))
    figure, axes = pyplot.subplots(1, len(names), figsize=(4 * len(names), 3.2), squeeze=False)
    for axis, name in zip(axes[0], names, strict=True):
        periods = [period for other, period in cells(results) if other == name]
        alone = teacher.chosen(find(results, name, 0, "")["error"])
        for place, policy in enumerate(POLICIES):
            errors = [
                teacher.chosen(find(results, name, period, policy)["error"]) - alone
                for period in periods
            ]
            shifted = [period * 1.04 ** (place - 1) for period in periods]
            style = ("ko-", "C0s--", "C1^:")[place]
            teacher.curve(axis, shifted, errors, style, policy)
        axis.axhline(0, color="0.6", linestyle=":")
        axis.set_xscale("log", base=2)
        axis.set_xlabel("average_every")
        axis.set_title(name)
    axes[0, 0].set_ylabel("error above one worker, points")
    axes[0, 0].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=90)


def main() -> None:
    parser = teacher.arguments(__doc__, steps=8192, seeds=8)
    parser.add_argument("--periods", default="4,16,64")
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--optimizers", default="|".join(OPTIMIZERS), help="by |")
    options = parser.parse_args()
    task = teacher.Task(setting.numbers(options.seeds))
    results = []
    for name in options.optimizers.split("|"):
        results.append(measure(options, name, 0, "", task))
        for period in setting.numbers(options.periods):
            results += [measure(options, name, period, policy, task) for policy in POLICIES]
    setting.finish(options, results, report, plot)


if __name__ == "__main__":
    main()
