"""Tables asynchronous and the rest synchronous, beside all of one and all of the other.

    python benchmarks/reproduce/half_sync.py --json half_sync.json

Lian et al. (Persia, KDD 2022) train recommenders so, and report an accuracy like that of fully
synchronous training at nearly the speed of asynchronous. Here the two towers of
examples/recommender.py learn who likes what, of which the best possible AUC is known, on simulated
workers whose mini-batches take a second (log-normal) and whose messages take 0.05 s on average. All
see the same examples, once. Every seed has its own examples, first weights and delays. Each way has
the rate of Adagrad under which its AUC is highest on seed 0, which then is not counted.
"""

import setting  # isort: skip (finds the package and `runs`)

import dataclasses
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import keras
import numpy as np
import runs

import tf_dsgd

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

import recommender

SPLIT = {"(users|items)/.*": tf_dsgd.Rows()}


@dataclasses.dataclass(frozen=True)
class Way:
    """How workers meet."""

    name: str
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


WAYS = [
    Way("one worker", downpour(1), several=False),
    Way("asynchronous", downpour(1)),
    Way("half-synchronous", averaging(1, SPLIT)),
    Way("synchronous, mean gradient", synchronous),
    Way("synchronous, mean weights", averaging(1, None)),
    Way("asynchronous, 8", downpour(8)),
    Way("half-synchronous, 8", averaging(8, SPLIT)),
    Way("all averaged, 8", averaging(8, None)),
]


def train(way: Way, rate: float, seed: int, options) -> dict:
    """One pass over the examples, and how well held-out ones are told apart after it."""
    keras.utils.clear_session()
    keras.utils.set_random_seed(seed + 1)
    world = recommender.World(users=500, items=200, rows=options.rows)
    world.random = np.random.default_rng(100 + seed)
    user, item, liked, _ = world.draw(options.examples)
    of_test = world.draw(20_000)
    cluster = tf_dsgd.SimulatedCluster(
        options.workers if way.several else 1,
        compute_seconds=tf_dsgd.LogNormal(1.0, sigma=0.3),
        network_seconds=tf_dsgd.Exponential(0.05),
        seed=seed,
    )
    strategy = way.strategy(cluster)
    with strategy.scope():
        model, _, _ = recommender.build_model(options.rows, rate)
    began = time.process_time()
    x = {"user": user, "item": item}
    model.fit(x, liked, batch_size=options.batch_size, shuffle=False, verbose=0)
    spent = time.process_time() - began
    user, item, liked, probability = of_test
    scores = model.predict({"user": user, "item": item}, batch_size=4096, verbose=0)[:, 0]
    loss = np.mean(np.logaddexp(0.0, scores) - liked * scores)
    return {
        "way": way.name,
        "rate": rate,
        "seed": seed,
        "auc": float(recommender.auc(scores, liked)),
        "best_auc": float(recommender.auc(probability, liked)),
        "loss": float(loss),
        "steps": strategy.steps,
        "virtual_seconds": float(strategy.engine.clock()),
        "staleness": strategy.staleness().mean,
        "processor_seconds": round(spent, 1),
    }


def chosen(results: list[dict], way: str) -> float | None:
    """The rate with the highest AUC on seed 0."""
    tried = [(r["auc"], r["rate"]) for r in results if r["way"] == way and r["seed"] == 0]
    return max(tried)[1] if tried else None


def judged(results: list[dict], way: str) -> list[dict]:
    """The runs of a way by which it is judged."""
    rate = chosen(results, way)
    return [r for r in results if r["way"] == way and r["seed"] and r["rate"] == rate]


def report(results: list[dict]) -> str:
    rows = []
    for way in dict.fromkeys(r["way"] for r in results):
        found = judged(results, way)
        if found:
            rows.append(
                [
                    way,
                    f"{found[0]['rate']:g}",
                    *(runs.spread([r[name] for r in found], 4) for name in ("auc", "loss")),
                    f"{np.mean([r['virtual_seconds'] for r in found]):,.0f}",
                    f"{np.mean([r['staleness'] for r in found]):.1f}",
                ]
            )
    heads = ["", "rate", "AUC", "loss", "virtual seconds", "staleness"]
    best = np.mean([r["best_auc"] for r in results])
    return f"{runs.table(heads, rows)}\n\nThe best possible AUC is {best:.4f}."


def main() -> None:
    parser = setting.arguments(__doc__)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--only", default="", help="ways whose names this expression finds")
    parser.add_argument("--rates", default="0.1,0.2,0.4", help="of Adagrad, by commas")
    parser.add_argument("--seeds", type=int, default=5, help="besides seed 0")
    parser.add_argument("--examples", type=int, default=200_000)
    parser.add_argument("--batch_size", type=int, default=256, help="of each worker")
    parser.add_argument("--rows", type=int, default=20_000, help="of each of the two tables")
    options = parser.parse_args()
    results: list[dict] = []
    if options.json and os.path.exists(options.json):  # goes on where it was cut off
        results = json.loads(Path(options.json).read_text())["results"]

    def run(way: Way, rate: float, seed: int) -> None:
        if all((r["way"], r["rate"], r["seed"]) != (way.name, rate, seed) for r in results):
            results.append(train(way, rate, seed, options))
            print(results[-1], flush=True)
            runs.write_json(options.json, {**runs.provenance(), "results": results})

    ways = runs.chosen({way.name: way for way in WAYS}, options.only).values()
    for way in ways:
        for rate in setting.numbers(options.rates, float):
            run(way, rate, 0)
    for seed in range(1, options.seeds + 1):
        for way in ways:
            run(way, chosen(results, way.name) or 0.0, seed)
    setting.finish(options, results, report, None)


if __name__ == "__main__":
    main()
