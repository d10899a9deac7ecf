"""FASGD against staleness-scaled SGD, from 4 to 1,000 workers.

    python benchmarks/reproduce/fasgd.py

Odena (2016) trains a network 784-200-10 on MNIST, in a simulation of M clients of which a random
one finishes next: FASGD always reaches a lower cost than SGD with alpha_0 / tau, and the gap grows
with M; ten times fewer fetches do no harm. Here a network 64-200-10 (relu) on scikit-learn's
handwritten digits, on simulated workers whose mini-batches take an exponentially distributed time,
which is the same: each is as likely to be next. SGD at a fixed rate stands beside the two.

All settings make the same number of updates. The cost is the cross-entropy of the held-out images,
averaged over training (at the ends of twenty equal parts of it), and at the end.
"""

import driver  # isort: skip (finds the package)

import keras
import numpy as np
import seeded
import side_by_side

import tf_dsgd

# (M, mini-batch). Two keep M times batch at 128, as the paper does; then M grows.
SETTINGS = ((4, 32), (32, 4), (250, 32), (1000, 32))
# The optimizer, what scales its step, mini-batches from one fetch to the next, and the grid.
METHODS = {
    "SGD": (keras.optimizers.SGD, None, 1, (-10, 1)),
    "SGD, alpha_0 / tau": (keras.optimizers.SGD, "inverse", 1, (-6, 5)),
    "FASGD": (tf_dsgd.optimizers.FASGD, None, 1, (-14, -3)),
    "FASGD, fetch_every=10": (tf_dsgd.optimizers.FASGD, None, 10, (-14, -3)),
}
PARTS = 20
TOGETHER = 20_000
"""Copies of the weights, of all workers and rates, that are there at one time."""


def run(condition, seeds, rates, options) -> dict:
    if condition["workers"] * len(rates) > TOGETHER and len(rates) > 1:
        half = len(rates) // 2
        parts = [run(condition, seeds, part, options) for part in (rates[:half], rates[half:])]
        return {name: parts[0][name] + parts[1][name] for name in parts[0]}
    workers, batch = condition["workers"], condition["batch"]
    optimizer, scaling, fetch_every, _ = METHODS[condition["method"]]
    trained, held = seeded.digits(seeds, options.epochs)
    study = seeded.Seeds(
        tf_dsgd.DownpourStrategy(
            local_rule="none", staleness_scaling=scaling, fetch_every=fetch_every
        ),
        lambda seed: seeded.exponential(workers, seed),
        optimizer,
        rates,
        seeded.mlp([200, 10]),
        trained,
        batch,
    )
    each = []
    for seed in seeds:
        study.begin(seed)
        entries = study.entries(seed, study.timetable(seed, options.updates))
        costs, error = [], {}
        for part in side_by_side.pieces(entries, PARTS):
            study.go(part)
            error = seeded.judged(study.logits(held[seed][0]), held[seed][1])
            costs.append(error["loss"])
        each.append({"cost": np.mean(costs, 0), "last": costs[-1], "error": error["error"]})
    return seeded.merged(each)


STUDY = driver.Study(
    name="fasgd",
    conditions=[
        {"workers": workers, "batch": batch, "method": method}
        for workers, batch in SETTINGS
        for method in METHODS
    ],
    grid=lambda condition: METHODS[condition["method"]][3],
    run=run,
    options={"updates": (3000, 100), "epochs": (20, 4)},
    seeds=5,
    together=5,
    chosen_by="cost",
)

if __name__ == "__main__":
    driver.main(STUDY, __doc__)
