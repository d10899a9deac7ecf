"""Downpour with Adagrad against a fixed rate: 16 workers, and one as control.

    python benchmarks/reproduce/downpour_adagrad.py

Dean et al. (NIPS 2012) find that Adagrad on the shards makes Downpour both faster and stable: in
their figures it beats a fixed rate. They push and fetch after every mini-batch, and so do these
workers, whose mini-batches take an exponentially distributed time. Is that because of asynchrony?
One worker is the control: what Adagrad gains there has nothing to do with it. Three tasks: a dense
network 32-64-10 that learns from a random one (teacher.py), a convolution of 3 x 3 pixels and a
recurrent network over rows on scikit-learn's handwritten digits. Rates are constant.
"""

import driver  # isort: skip (finds the package)

import keras
import seeded
import side_by_side
import teacher

import tf_dsgd

WORKERS = (1, 16)
OPTIMIZERS = {
    "SGD": (keras.optimizers.SGD, (-8, 1)),
    "Adagrad": (keras.optimizers.Adagrad, (-9, 0)),
}


def convolutional(rates: int, seeds: list[int]) -> list:
    return [
        side_by_side.Convolution(rates, seeds, side=8, filters=8),
        side_by_side.Dense(rates, seeds, 10),
    ]


def recurrent(rates: int, seeds: list[int]) -> list:
    return [
        side_by_side.Recurrent(rates, seeds, steps=8, units=32),
        side_by_side.Dense(rates, seeds, 10),
    ]


LAYERS = {"convolution": convolutional, "recurrent": recurrent}
TASKS = ("dense", *LAYERS)
BATCH = teacher.BATCH


def run(condition, seeds, rates, options) -> dict:
    workers, task = condition["workers"], condition["task"]
    strategy = tf_dsgd.DownpourStrategy(local_rule="none")
    optimizer, _ = OPTIMIZERS[condition["optimizer"]]
    if task == "dense":
        return seeded.taught(strategy, workers, optimizer, rates, seeds, options.updates)
    trained, held = seeded.digits(seeds, -(-BATCH * options.updates // 1437))
    study = seeded.Seeds(
        strategy,
        lambda seed: seeded.exponential(workers, seed),
        optimizer,
        rates,
        LAYERS[task],
        trained,
        BATCH,
    )
    return study.judged(options.updates, held)


STUDY = driver.Study(
    name="downpour_adagrad",
    conditions=[
        {"task": task, "workers": workers, "optimizer": optimizer}
        for task in TASKS
        for workers in WORKERS
        for optimizer in OPTIMIZERS
    ],
    grid=lambda condition: OPTIMIZERS[condition["optimizer"]][1],
    run=run,
    options={"updates": (2000, 60)},
    seeds=10,
    together=10,
)

if __name__ == "__main__":
    driver.main(STUDY, __doc__)
