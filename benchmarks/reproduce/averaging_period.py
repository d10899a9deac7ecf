"""Accuracy and time against the period of averaging.

    python benchmarks/reproduce/averaging_period.py --plot docs/images/averaging_period.png

Su and Chen (2015) average the parameters of workers that train speech models with SGD: a period of
10 to 20 mini-batches is acceptable, and with longer ones accuracy falls. Here the task of
teacher.py, SGD, 8 simulated workers, and the same number of mini-batches for every period: what is
compared is what was learnt from equally many examples. Then the time of an epoch on this machine
(contenders.py's MLP 784-512-512-10, batch 64, two local workers), of each period beside plain
`fit`.
"""

import setting  # isort: skip (finds the package and `runs`)

import contextlib
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

import contenders
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


class Contender:
    """A model that is trained on this machine, an epoch at a time; `period` 0 is plain Keras."""

    def __init__(self, period: int, data: dict):
        self.period, self.data = period, data
        self.seconds: list[float] = []
        self.cpu_seconds: list[float] = []
        scope: Any = contextlib.nullcontext()
        if period:
            cluster = tf_dsgd.LocalCluster(2)
            scope = tf_dsgd.PeriodicAveragingStrategy(cluster, average_every=period).scope()
        with scope:
            self.model = contenders.build_model(contenders.Spec())
        self.epoch()  # traces
        self.seconds.clear(), self.cpu_seconds.clear()

    def epoch(self) -> None:
        """One epoch, until a weight has been read, by which all updates are made."""
        start, cpu = time.perf_counter(), time.process_time()
        self.model.fit(**self.data, batch_size=64, verbose=0)
        self.model.trainable_variables[-1].numpy()
        self.seconds.append(time.perf_counter() - start)
        self.cpu_seconds.append(time.process_time() - cpu)


def clock(options, periods: list[int]) -> list[dict]:
    """All in this process, in turn: a slow minute of the machine hits all alike."""
    x, y = contenders.make_data(contenders.Spec(examples=options.examples))
    found = [Contender(period, {"x": x, "y": y}) for period in [0, *periods]]
    for _ in range(options.repetitions):
        for contender in found:
            contender.epoch()
    plain = found[0]
    return [
        {
            "part": "time",
            "period": c.period,
            "seconds": c.seconds,
            "cpu_seconds": c.cpu_seconds,
            "beside_plain": np.divide(c.seconds, plain.seconds).tolist(),
            "cpu_beside_plain": np.divide(c.cpu_seconds, plain.cpu_seconds).tolist(),
            "load": os.getloadavg()[0],
        }
        for c in found
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
    measures = {
        "seconds of an epoch": "seconds",
        "beside plain fit": "beside_plain",
        "CPU seconds": "cpu_seconds",
        "CPU beside plain fit": "cpu_beside_plain",
    }
    rows = [
        [
            str(period) if period else "plain fit",
            *(runs.spread(result[name], 2) for name in measures.values()),
        ]
        for period, result in timed.items()
    ]
    load = next(iter(timed.values()))["load"]
    table = runs.table(["average_every", *measures], rows)
    return f"Load of the machine at the end: {load:.1f}\n\n{table}"


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
        seconds = {p: statistics.median(r["cpu_seconds"]) for p, r in timed.items()}
        axes[1].plot(periods, [seconds[p] for p in periods], "ko-", label="two workers")
        axes[1].axhline(seconds[0], color="0.6", linestyle=":", label="plain fit")
        axes[1].set_ylim(0)
        axes[1].set_ylabel("CPU seconds of an epoch")
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
    parser.add_argument("--repetitions", type=int, default=5, help="epochs that are timed")
    parser.add_argument("--examples", type=int, default=32_768, help="of an epoch that is timed")
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
