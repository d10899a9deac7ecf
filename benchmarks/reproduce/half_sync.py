"""Tables asynchronous and the rest synchronous, beside all of one and all of the other.

    python benchmarks/reproduce/half_sync.py

Lian et al. (Persia, KDD 2022) train recommenders so, and report an accuracy like that of fully
synchronous training at nearly the speed of asynchronous. Here the two towers of
examples/recommender.py learn who likes what, of which the best possible AUC is known, on eight
simulated workers whose mini-batches take a second (log-normal) and whose messages take 0.05 s on
average. All see the same examples, once. Every seed has its own examples, first weights and delays.
Rates are Adagrad's. `gap` is the best possible AUC less the one that was reached.
"""

import driver  # isort: skip (finds the package)

import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path

import keras
import numpy as np

import tf_dsgd

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

import recommender

SPLIT = {"(users|items)/.*": tf_dsgd.Rows()}
WORKERS, BATCH, ROWS, HELD_OUT = 8, 256, 20_000, 20_000
"""ROWS are those of each of the two tables; BATCH of each worker."""


@dataclasses.dataclass(frozen=True)
class Way:
    """How workers meet."""

    strategy: Callable[[tf_dsgd.SimulatedCluster], tf_dsgd.DownpourStrategy]
    several: bool = True
    """Whether of several workers; else of one."""


def downpour(every: int) -> Callable:
    return lambda cluster: tf_dsgd.DownpourStrategy(
        cluster, push_every=every, fetch_every=every, local_rule="none", placement=SPLIT
    )


def averaging(every: int, placement: dict | None) -> Callable:
    return lambda cluster: tf_dsgd.PeriodicAveragingStrategy(
        cluster, average_every=every, placement=placement
    )


def synchronous(cluster: tf_dsgd.SimulatedCluster) -> tf_dsgd.SoftsyncStrategy:
    return tf_dsgd.SoftsyncStrategy(
        cluster,
        gradients_per_update=cluster.num_workers,
        staleness_scaling=None,
        max_staleness=0,
        placement=SPLIT,
    )


WAYS = {
    "one worker": Way(downpour(1), several=False),
    "asynchronous": Way(downpour(1)),
    "half-synchronous": Way(averaging(1, SPLIT)),
    "synchronous, mean gradient": Way(synchronous),
    "synchronous, mean weights": Way(averaging(1, None)),
    "asynchronous, 8": Way(downpour(8)),
    "half-synchronous, 8": Way(averaging(8, SPLIT)),
    "all averaged, 8": Way(averaging(8, None)),
}
"""8 is a period."""


def train(way: Way, rate: float, seed: int, examples: int) -> dict[str, float]:
    """One pass over the examples, and how well held-out ones are told apart after it."""
    keras.utils.clear_session()
    keras.utils.set_random_seed(seed)
    world = recommender.World(users=500, items=200, rows=ROWS)
    world.random = np.random.default_rng(100 + seed)
    user, item, liked, _ = world.draw(examples)
    of_test = world.draw(HELD_OUT)
    cluster = tf_dsgd.SimulatedCluster(
        WORKERS if way.several else 1,
        compute_seconds=tf_dsgd.LogNormal(1.0, sigma=0.3),
        network_seconds=tf_dsgd.Exponential(0.05),
        seed=seed,
    )
    strategy = way.strategy(cluster)
    with strategy.scope():
        model, _, _ = recommender.build_model(ROWS, rate)
    x = {"user": user, "item": item}
    model.fit(x, liked, batch_size=BATCH, shuffle=False, verbose=0)
    user, item, liked, probability = of_test
    scores = model.predict({"user": user, "item": item}, batch_size=4096, verbose=0)[:, 0]
    best, reached = (float(recommender.auc(found, liked)) for found in (probability, scores))
    return {
        "gap": best - reached,
        "auc": reached,
        "loss": float(np.mean(np.logaddexp(0.0, scores) - liked * scores)),
        "virtual_seconds": float(strategy.engine.clock()),
    }


def run(condition, seeds, rates, options) -> dict:
    way = WAYS[condition["way"]]
    found = [[train(way, rate, seed, options.examples) for seed in seeds] for rate in rates]
    return {name: [[each[name] for each in row] for row in found] for name in found[0][0]}


STUDY = driver.Study(
    name="half_sync",
    conditions=[{"way": way} for way in WAYS],
    grid=lambda condition: (-5, -2),
    run=run,
    options={"examples": (150_000, 4_096)},
    seeds=5,
    chosen_by="gap",
)

if __name__ == "__main__":
    driver.main(STUDY, __doc__)
