"""Accuracy and time against the period of averaging.

    python benchmarks/reproduce/averaging_period.py --plot docs/images/averaging_period.png

Su and Chen (2015) average the parameters of workers that train speech models with SGD: a period of
10 to 20 mini-batches is acceptable, and with longer ones accuracy falls. Here the task of
teacher.py, SGD, 8 simulated workers, and the same number of mini-batches for every period: what is
compared is what was learnt from equally many examples. Then the time of an epoch on this machine
(contenders.py: an MLP 784-512-512-10, two local workers), of each period beside plain `fit`.
"""

import setting  # isort: skip (finds the package and `runs`)

import json
import statistics
from pathlib import Path

import keras
import numpy as np
import runs
import teacher

import tf_dsgd

PERIODS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
RATES = teacher.powers(-5, 1)
ALONE = "one worker"


def learn(options, periods: list[int]) -> list[dict]:
    task = teacher.Task(setting.numbers(options.seeds))
    results = []
    for period in [0, *periods]:
        strategy = None
        if period:
            cluster = teacher.simulated(options.workers)
            strategy = tf_dsgd.PeriodicAveragingStrategy(cluster, average_every=period)
        result = teacher.train(
            strategy, keras.optimizers.SGD, RATES, task, options.batch_size, options.steps
        )
        results.append({"part": "accuracy", "period": period, **result})
        print(period, np.mean(result["error"], 1).round(2).tolist(), flush=True)
    return results


def clock(options, periods: list[int]) -> list[dict]:
    common = {"examples": options.examples, "epochs": options.epochs}
    specs = {"plain fit": {"kind": "keras", **common}}
    for period in periods:
        specs[str(period)] = {"kind": "averaging", "period": period, **common}
    found = runs.interleaved("contenders.py", specs, options.repetitions)
    ratios = {name: runs.ratios(found, name, "plain fit") for name in specs}
    return [
        {
            "part": "time",
            "period": 0 if name == "plain fit" else int(name),
            "seconds": [o["seconds"] / options.epochs for o in outcomes],
            "speed": ratios[name],
        }
        for name, outcomes in found.items()
    ]


def of(results: list[dict], part: str) -> dict[int, dict]:
    return {r["period"]: r for r in results if r["part"] == part}


def report(results: list[dict]) -> str:
    learnt, timed = of(results, "accuracy"), of(results, "time")
    parts = [part for part in (accuracy_table(learnt), time_table(timed)) if part]
    return "\n\n".join(parts)


def accuracy_table(learnt: dict[int, dict]) -> str:
    if not learnt:
        return ""
    shared = teacher.best(np.array(learnt[1]["error"])) if 1 in learnt else None
    header = ["average_every", "averages", "rate", "held-out error, %", "less that of one worker"]
    header += ["less that of 1", "at the rate of 1"]
    rows = []
    alone = teacher.chosen(learnt[0]["error"])
    for period, result in learnt.items():
        errors = teacher.chosen(result["error"])
        row = [str(period) if period else ALONE, str(result["updates"]) if period else ""]
        row += [teacher.rate_of(result), teacher.spread(errors)]
        row += [teacher.spread(errors - alone) if period else ""]
        if shared is not None:
            joint = teacher.chosen(learnt[1]["error"])
            row += [teacher.spread(errors - joint) if period > 1 else ""]
            row += [teacher.spread(np.array(result["error"][shared])) if period else ""]
        rows.append(row)
    return runs.table(header if shared is not None else header[:-2], rows)


def time_table(timed: dict[int, dict]) -> str:
    if not timed:
        return ""
    rows = [
        [
            str(period) if period else "plain fit",
            runs.spread(result["seconds"], 2),
            runs.spread(result["speed"], 2),
        ]
        for period, result in timed.items()
    ]
    return runs.table(["average_every", "seconds of an epoch", "speed beside plain fit"], rows)


def plot(results: list[dict], path: str) -> None:
    learnt, timed = of(results, "accuracy"), of(results, "time")
    pyplot = setting.pyplot()
    figure, axes = pyplot.subplots(1, 2, figsize=(8, 3.2))
    periods = [period for period in learnt if period]
    if learnt:
        alone = teacher.chosen(learnt[0]["error"])
        own = [teacher.chosen(learnt[p]["error"]) - alone for p in periods]
        teacher.curve(axes[0], periods, own, "ko-", "at its own best rate")
    if 1 in learnt:
        place = teacher.best(np.array(learnt[1]["error"]))
        kept = [np.array(learnt[p]["error"][place]) - alone for p in periods]
        teacher.curve(axes[0], periods, kept, "C0s--", "at the best rate of 1")
    axes[0].axhline(0, color="0.6", linestyle=":")
    axes[0].set_ylabel("error above one worker, points")
    axes[0].legend(fontsize=7)
    periods = [period for period in timed if period]
    if timed:
        seconds = {p: statistics.median(r["seconds"]) for p, r in timed.items()}
        axes[1].plot(periods, [seconds[p] for p in periods], "ko-", label="two workers")
        axes[1].axhline(seconds[0], color="0.6", linestyle=":", label="plain fit")
        axes[1].set_ylim(0)
        axes[1].set_ylabel("seconds of an epoch")
        axes[1].legend(fontsize=7)
    for axis in axes:
        axis.set_xscale("log", base=2)
        axis.set_xlabel("average_every")
    figure.tight_layout()
    figure.savefig(path, dpi=90)


def main() -> None:
    parser = teacher.arguments(__doc__, steps=16_384, seeds=8)
    parser.add_argument("--periods", default=",".join(str(period) for period in PERIODS))
    parser.add_argument("--workers", type=int, default=8, help="simulated ones")
    parser.add_argument("--parts", default="accuracy,time")
    parser.add_argument("--repetitions", type=int, default=3, help="of the time")
    parser.add_argument("--examples", type=int, default=65_536, help="of an epoch that is timed")
    parser.add_argument("--epochs", type=int, default=1, help="timed, after one that is not")
    parser.add_argument("--beside", help="a --json of the other part, for tables and plot")
    options = parser.parse_args()
    periods, parts = setting.numbers(options.periods), options.parts.split(",")
    results = learn(options, periods) if "accuracy" in parts else []
    results += clock(options, periods) if "time" in parts else []
    if options.beside:
        results = json.loads(Path(options.beside).read_text())["results"] + results
    setting.finish(options, results, report, plot)


if __name__ == "__main__":
    main()
