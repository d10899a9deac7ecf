"""Which explicit momentum is best, as asynchronous workers become more.

    python benchmarks/reproduce/explicit_momentum.py

Mitliagkas et al. (2016): asynchrony is like a momentum of 1 - 1/M, so the best momentum that one
sets besides falls as workers become more. Here the task of teacher.py, SGD at constant rates,
simulated workers whose mini-batches take an exponentially distributed time; each momentum with a
rate of its own.
"""

import driver  # isort: skip (finds the package)

from functools import partial

import keras
import seeded

import tf_dsgd

WORKERS, MOMENTA = (1, 4, 16), (0.0, 0.3, 0.6, 0.9)


def run(condition, seeds, rates, options) -> dict:
    return seeded.taught(
        tf_dsgd.DownpourStrategy(local_rule="none"),
        condition["workers"],
        partial(keras.optimizers.SGD, momentum=condition["momentum"]),
        rates,
        seeds,
        options.updates,
    )


STUDY = driver.Study(
    name="explicit_momentum",
    conditions=[{"workers": m, "momentum": mu} for m in WORKERS for mu in MOMENTA],
    grid=lambda condition: (-8, 0) if condition["momentum"] < 0.9 else (-10, -2),
    run=run,
    options={"updates": (1500, 60)},
    seeds=10,
    together=10,
)

if __name__ == "__main__":
    driver.main(STUDY, __doc__)
