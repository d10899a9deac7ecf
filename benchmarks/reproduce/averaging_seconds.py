"""Seconds of an epoch on this machine against the period of averaging.

    python benchmarks/reproduce/averaging_seconds.py

contenders.py's MLP 784-512-512-10, batch 64, two local workers, each period beside plain `fit` with
`steps_per_execution` of 1 and 20; all in one process, an epoch of each in turn: a slow minute of
the machine hits all alike. A `seed` is one turn. To be run on a machine with nothing beside it.
What longer periods cost in accuracy is averaging_period.py's.
"""

import driver  # isort: skip (finds the package)

import contextlib
import functools
import time
from typing import Any

import contenders

import tf_dsgd

PERIODS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
PLAIN = {"plain": 1, "plain, 20 a call": 20}  # steps_per_execution


class Contender:
    """A model that is trained on this machine, an epoch at a time; one of PLAIN is plain Keras."""

    def __init__(self, workers: str, period: int, examples: int):
        x, y = contenders.make_data(contenders.Spec(examples=examples))
        self.data = {"x": x, "y": y}
        scope: Any = contextlib.nullcontext()
        if period:
            cluster = tf_dsgd.LocalCluster(2)
            scope = tf_dsgd.PeriodicAveragingStrategy(cluster, average_every=period).scope()
        with scope:
            at_once = PLAIN.get(workers, 1)
            self.model = contenders.build_model(contenders.Spec(steps_per_execution=at_once))
        self.epoch()  # traces

    def epoch(self) -> dict[str, float]:
        """One epoch, until a weight has been read, by which all updates are made."""
        start, cpu = time.perf_counter(), time.process_time()
        self.model.fit(**self.data, batch_size=64, verbose=0)
        self.model.trainable_variables[-1].numpy()
        return {
            "seconds": time.perf_counter() - start,
            "cpu_seconds": time.process_time() - cpu,
        }


contender = functools.cache(Contender)


def run(condition, seeds, rates, options) -> dict:
    found = [contender(**condition, examples=options.examples).epoch() for _ in seeds]
    return {name: [[each[name] for each in found]] for name in found[0]}


STUDY = driver.Study(
    name="averaging_seconds",
    conditions=[
        *({"workers": plain, "period": 0} for plain in PLAIN),
        *({"workers": "two", "period": period} for period in PERIODS),
    ],
    grid=lambda condition: (0, 0),
    run=run,
    options={"examples": (32_768, 640)},
    seeds=10,
    chosen_by="seconds",
)

if __name__ == "__main__":
    driver.main(STUDY, __doc__)
