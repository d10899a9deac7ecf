"""Blockwise model-update filtering against plain averaging, as workers become more.

    python benchmarks/reproduce/bmuf.py

Chen and Huo (ICASSP 2016) train speech models: with plain averaging accuracy falls as workers
become more, BMUF keeps that of one, and its speed-up is almost linear. Here the task of teacher.py,
SGD on the workers, the same number of mini-batches in all for every number of workers, so that a
speed-up is the number of workers but for what averages take. BMUF has eta = 1 - 1/M and zeta = 1,
once in the paper's classical and once in its Nesterov form.
"""

import driver  # isort: skip (finds the package)

import keras
import teacher

import tf_dsgd

WORKERS, PERIODS = (2, 4, 8, 16), (2, 8)
METHODS = {
    "plain averaging": lambda: None,
    "BMUF": lambda: tf_dsgd.optimizers.BlockMomentum(nesterov=False),
    "BMUF, Nesterov": lambda: tf_dsgd.optimizers.BlockMomentum(),
}


def run(condition, seeds, rates, options) -> dict:
    strategy = None
    if condition["workers"] > 1:
        strategy = tf_dsgd.PeriodicAveragingStrategy(
            teacher.simulated(condition["workers"]),
            average_every=condition["period"],
            outer_optimizer=METHODS[condition["method"]](),
        )
    task = teacher.Task(seeds)
    return teacher.train(strategy, keras.optimizers.SGD, rates, task, teacher.BATCH, options.steps)


STUDY = driver.Study(
    name="bmuf",
    conditions=[
        {"workers": 1, "period": 0, "method": "one worker"},
        *(
            {"workers": workers, "period": period, "method": method}
            for workers in WORKERS
            for period in PERIODS
            for method in METHODS
            if period == 8 or workers == 16
        ),
    ],
    grid=lambda condition: (-5, 1),
    run=run,
    options={"steps": (16_384, 128)},
    seeds=8,
    together=8,
)

if __name__ == "__main__":
    driver.main(STUDY, __doc__)
