"""Does a warm start help Downpour with many workers?

    python benchmarks/reproduce/warm_start.py

Dean et al. (NIPS 2012) start training with one replica before the others join ("warmstart"), which
together with Adagrad has "virtually eliminated stability concerns". Here the task of teacher.py, 64
simulated workers that push and fetch after every mini-batch, with and without 300 mini-batches of
the first worker alone; equally many mini-batches in all. Rates are constant.
"""

import driver  # isort: skip (finds the package)

import keras
import seeded

import tf_dsgd

WORKERS, ALONE = 64, 300
OPTIMIZERS = {
    "SGD": (keras.optimizers.SGD, (-9, 0)),
    "Adagrad": (keras.optimizers.Adagrad, (-10, -1)),
}


def run(condition, seeds, rates, options) -> dict:
    return seeded.taught(
        tf_dsgd.DownpourStrategy(local_rule="none", warm_start_steps=condition["warm_start"]),
        WORKERS,
        OPTIMIZERS[condition["optimizer"]][0],
        rates,
        seeds,
        options.updates,
    )


STUDY = driver.Study(
    name="warm_start",
    conditions=[
        {"optimizer": optimizer, "warm_start": alone}
        for optimizer in OPTIMIZERS
        for alone in (0, ALONE)
    ],
    grid=lambda condition: OPTIMIZERS[condition["optimizer"]][1],
    run=run,
    options={"updates": (3000, 400)},
    seeds=10,
    together=10,
)

if __name__ == "__main__":
    driver.main(STUDY, __doc__)
