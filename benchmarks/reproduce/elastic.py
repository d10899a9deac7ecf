"""Elastic averaging against Downpour, as the period grows.

    python benchmarks/reproduce/elastic.py

Zhang, Choromanska and LeCun (NIPS 2015) train convolutional networks with 4, 8 and 16 workers and
periods of 1, 4, 16 and 64: Downpour becomes unstable as the period grows, EASGD stays stable, and
EAMSGD, with Nesterov momentum on the workers, is best. Here the task of teacher.py, mini-batches
that take an exponentially distributed time, 1 s in the mean, and messages that take none: nobody
waits, so that equally many mini-batches a worker are equal virtual seconds, the paper's measure.
elasticity is the paper's 0.9 / M. Downpour is that of the same paper: workers make SGD steps and
push their sum, which the shard adds.
"""

import driver  # isort: skip (finds the package)

from functools import partial

import keras
import seeded
import teacher

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


def simulated(workers: int, seed: int = 1) -> tf_dsgd.SimulatedCluster:
    return tf_dsgd.SimulatedCluster(workers, compute_seconds=tf_dsgd.Exponential(1.0), seed=seed)


def run(condition, seeds, rates, options) -> dict:
    workers, method = condition["workers"], condition["method"]
    updates = workers * options.seconds  # in the mean, as all take a second
    trained, held = teacher.of_seeds(seeds, teacher.BATCH * updates)
    study = seeded.Seeds(
        strategy(method, simulated(workers), condition["period"]),
        lambda seed: simulated(workers, seed),
        METHODS[method][0],
        rates,
        seeded.mlp([teacher.STUDENT, teacher.CLASSES]),
        trained,
        teacher.BATCH,
    )
    return study.judged(updates, held)


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
