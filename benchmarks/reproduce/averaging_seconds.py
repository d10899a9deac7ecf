"""Seconds of an epoch on this machine against the period of averaging.

    python benchmarks/reproduce/averaging_seconds.py --json FILE --plot FILE.png

contenders.py's MLP 784-512-512-10, batch 64, two local workers, each period beside plain `fit`; all
in one process, in turn. What longer periods cost in accuracy is averaging_period.py's.
"""

import setting  # isort: skip (finds the package and `runs`)

import contextlib
import os
import statistics
import time
from typing import Any

import contenders
import numpy as np
import runs

import tf_dsgd

PERIODS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


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
            "period": c.period,
            "seconds": c.seconds,
            "cpu_seconds": c.cpu_seconds,
            "beside_plain": np.divide(c.seconds, plain.seconds).tolist(),
            "cpu_beside_plain": np.divide(c.cpu_seconds, plain.cpu_seconds).tolist(),
            "load": os.getloadavg()[0],
        }
        for c in found
    ]


def report(results: list[dict]) -> str:
    timed = {r["period"]: r for r in results}
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
    pyplot = setting.pyplot()
    figure, axis = pyplot.subplots(figsize=(4, 3.2))
    seconds = {r["period"]: statistics.median(r["cpu_seconds"]) for r in results}
    periods = [period for period in seconds if period]
    axis.plot(periods, [seconds[p] for p in periods], "ko-", label="two workers")
    axis.axhline(seconds[0], color="0.6", linestyle=":", label="plain fit")
    axis.set_ylim(0)
    axis.set_ylabel("CPU seconds of an epoch")
    axis.set_xscale("log", base=2)
    axis.set_xlabel("average_every")
    axis.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=90)


def main() -> None:
    parser = setting.arguments(__doc__)
    parser.add_argument("--periods", default=",".join(str(period) for period in PERIODS))
    parser.add_argument("--repetitions", type=int, default=5, help="epochs that are timed")
    parser.add_argument("--examples", type=int, default=32_768, help="of an epoch that is timed")
    options = parser.parse_args()
    setting.finish(options, clock(options, setting.numbers(options.periods)), report, plot)


if __name__ == "__main__":
    main()
