"""Elastic averaging against Downpour, as the period grows.

    python benchmarks/reproduce/elastic.py

Zhang, Choromanska and LeCun (NIPS 2015) train convolutional networks with 4, 8 and 16 workers and
periods of 1, 4, 16 and 64: Downpour becomes unstable as the period grows, EASGD stays stable, and
EAMSGD, with Nesterov momentum on the workers, is best. Here the task of teacher.py, mini-batches
that take an exponentially distributed time, 1 s in the mean, and messages that take none: nobody
waits, so that equally many mini-batches a worker are equal virtual seconds, the paper's measure.
Claims of a quarter, a half and three quarters are at the rates that are best then.
elasticity is the paper's 0.9 / M. Downpour is that of the same paper: workers make SGD steps and
push their sum, which the shard adds.
"""

import driver  # isort: skip (finds the package)

from functools import partial

import keras
import seeded

import tf_dsgd

WORKERS, PERIODS = (4, 16), (1, 4, 16, 64)
nesterov = partial(keras.optimizers.SGD, momentum=0.9, nesterov=True)
METHODS = {
    "Downpour": (keras.optimizers.SGD, (-8, 0)),
    "EASGD": (keras.optimizers.SGD, (-8, 0)),
    "EAMSGD": (nesterov, (-10, -2)),
}


def strategy(method: str, cluster: tf_dsgd.SimulatedCluster, period: int):
    if method == "Downpour":
        return tf_dsgd.DownpourStrategy(
            cluster, push_every=period, fetch_every=period, local_rule="optimizer"
        )
    return tf_dsgd.ElasticAveragingStrategy(cluster, average_every=period)


def run(condition, seeds, rates, options) -> dict:
    workers, method = condition["workers"], condition["method"]
    return seeded.taught(
        strategy(method, seeded.exponential(workers), condition["period"]),
        workers,
        METHODS[method][0],
        rates,
        seeds,
        workers * options.seconds,  # in the mean, as all take a second
        parts=4,
    )


STUDY = driver.Study(
    name="elastic",
    conditions=[
        {"workers": workers, "period": period, "method": method}
        for workers in WORKERS
        for period in PERIODS
        for method in METHODS
    ],
    grid=lambda condition: METHODS[condition["method"]][1],
    run=run,
    options={"seconds": (250, 10)},
    seeds=8,
    together=8,
)

if __name__ == "__main__":
    driver.main(STUDY, __doc__)
