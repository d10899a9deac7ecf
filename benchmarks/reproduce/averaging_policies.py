"""What becomes of the optimizer's state at an average: averaged, each worker's own, or reset.

    python benchmarks/reproduce/averaging_policies.py

The three policies of `PeriodicAveragingStrategy`, with SGD of momentum 0.9 and with Adam, at short
and long periods; the task of teacher.py, 8 simulated workers. No paper's claim is tested: users of
other libraries report that optimizers' states drift apart where only weights are averaged.
"""

import driver  # isort: skip (finds the package)

from functools import partial

import keras
import teacher

import tf_dsgd

WORKERS, PERIODS, POLICIES = 8, (4, 16, 64), ("average", "local", "reset")
OPTIMIZERS = {
    "momentum": (partial(keras.optimizers.SGD, momentum=0.9), (-7, -1)),
    "Adam": (keras.optimizers.Adam, (-10, -4)),
}


def run(condition, seeds, rates, options) -> dict:
    strategy = tf_dsgd.PeriodicAveragingStrategy(
        teacher.simulated(WORKERS),
        average_every=condition["period"],
        optimizer_state=condition["state"],
    )
    optimizer, _ = OPTIMIZERS[condition["optimizer"]]
    task = teacher.Task(seeds)
    return teacher.train(strategy, optimizer, rates, task, teacher.BATCH, options.steps)


STUDY = driver.Study(
    name="averaging_policies",
    conditions=[
        {"optimizer": optimizer, "period": period, "state": state}
        for optimizer in OPTIMIZERS
        for period in PERIODS
        for state in POLICIES
    ],
    grid=lambda condition: OPTIMIZERS[condition["optimizer"]][1],
    run=run,
    options={"steps": (8_192, 128)},
    seeds=8,
    together=8,
)

if __name__ == "__main__":
    driver.main(STUDY, __doc__)
