"""n-softsync with a fixed rate and with alpha_0 / tau: no learning against learning.

    python benchmarks/reproduce/softsync_learning.py

Zhang et al. (IJCAI 2016) train CIFAR-10 on 30 learners with mini-batches of 4 and a momentum of
0.9: with a fixed rate 15- and 30-softsync stay at an error of 90 % (chance), with alpha_0 / tau
every n reaches about 18 %. Here: scikit-learn's handwritten digits (1,437 images to train on, 360
held out, 10 classes), a network 64-64-10, otherwise the same setting, on simulated workers. The
paper asks what happens at the rate of synchronous training, which is 1-softsync.
"""

import driver  # isort: skip (finds the package)

from functools import partial

import keras
import seeded
import setting

BATCH, MOMENTUM = 4, 0.9
RULES = {"fixed": None, "alpha_0 / tau": "inverse"}


def run(condition, seeds, rates, options) -> dict:
    n, scaling = condition["n"], RULES[condition["scaling"]]
    trained, held = seeded.digits(seeds, options.epochs)
    study = seeded.Seeds(
        setting.softsync(n, setting.workers(), scaling),
        lambda seed: setting.workers(seed=seed),
        partial(keras.optimizers.SGD, momentum=MOMENTUM),
        rates,
        seeded.mlp([64, 10]),
        trained,
        BATCH,
    )
    return study.judged(len(trained[seeds[0]][0]) // BATCH, held)


STUDY = driver.Study(
    name="softsync_learning",
    conditions=[{"n": n, "scaling": rule} for n in (1, 15, 30) for rule in RULES],
    grid=lambda condition: (-11, -1),
    run=run,
    options={"epochs": (10, 2)},
    seeds=10,
    together=10,
)

if __name__ == "__main__":
    driver.main(STUDY, __doc__)
