"""Accuracy against the period of averaging.

    python benchmarks/reproduce/averaging_period.py

Su and Chen (2015) average the parameters of workers that train speech models with SGD: a period of
10 to 20 mini-batches is acceptable, and with longer ones accuracy falls. Here the task of
teacher.py, SGD, 8 simulated workers of one speed, and the same number of mini-batches for every
period: what is compared is what was learnt from equally many examples. Period 0 is one worker.
"""

import driver  # isort: skip (finds the package)

import keras
import teacher

import tf_dsgd

PERIODS = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256)
WORKERS = 8


def run(condition, seeds, rates, options) -> dict:
    strategy, period = None, condition["period"]
    if period:
        strategy = tf_dsgd.PeriodicAveragingStrategy(
            teacher.simulated(WORKERS), average_every=period
        )
    task = teacher.Task(seeds)
    return teacher.train(strategy, keras.optimizers.SGD, rates, task, teacher.BATCH, options.steps)


STUDY = driver.Study(
    name="averaging_period",
    conditions=[{"period": period} for period in PERIODS],
    grid=lambda condition: (-5, 1),
    run=run,
    options={"steps": (16_384, 128)},
    seeds=8,
    together=8,
)

if __name__ == "__main__":
    driver.main(STUDY, __doc__)
