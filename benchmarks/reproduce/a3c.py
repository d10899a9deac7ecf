"""A3C on CartPole: virtual seconds and episodes until it is solved, with 1 to 16 workers.

    python benchmarks/reproduce/a3c.py

Mnih et al. (2016), table 2: to a score of reference, on average over seven Atari games, 2, 4, 8 and
16 threads are 2.1, 3.7, 6.9 and 12.5 times as fast as one. Here examples/a3c_cartpole.py runs on
simulated workers: a rollout of at most five steps takes a second (log-normal, so that workers do
not go in step), a message 0.05 s on average. CartPole is solved when 100 new episodes have a mean
return of 475. This is looked at every `--check_every` rollouts, when all workers meet. Another
1,000 episodes with the same weights then say how far that was luck (`again`). The rate falls from
0.01 to 0 over `--rollouts`, which is also where a run is given up (`given_up`). Every seed has its
own first weights, episodes and delays.
"""

import driver  # isort: skip (finds the package)

import sys
from pathlib import Path

import keras
import numpy as np

import tf_dsgd

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

import a3c_cartpole

RATE, AGAIN = 0.01, 10


def solve(workers: int, seed: int, options) -> dict[str, float]:
    """One run of the example, and what it took."""
    keras.utils.clear_session()
    cluster = tf_dsgd.SimulatedCluster(
        workers,
        compute_seconds=tf_dsgd.LogNormal(1.0, sigma=0.2),
        network_seconds=tf_dsgd.Exponential(0.05),
        seed=seed,
    )
    strategy = tf_dsgd.DownpourStrategy(cluster, local_rule="none")
    chosen = {
        "--seed": seed,
        "--rollouts": options.rollouts,
        "--check_every": options.check_every,
        "--rate": RATE,
    }
    example = a3c_cartpole.parsed([str(part) for pair in chosen.items() for part in pair])
    result = a3c_cartpole.train(strategy, example, note=lambda *_: None)
    judge = a3c_cartpole.make_judge(example)
    weights = result["agent"].model.get_weights()
    again = [judge(weights, options.rollouts + k) for k in range(1, AGAIN + 1)]
    return {
        "seconds": float(strategy.engine.clock()),
        "episodes": float(result["episodes"]),
        "given_up": float(not result["solved"]),
        "staleness": strategy.staleness().mean,
        "again": float(np.mean(again)),
    }


def run(condition, seeds, rates, options) -> dict:
    found = [solve(condition["workers"], seed, options) for seed in seeds]
    return {name: [[each[name] for each in found]] for name in found[0]}


STUDY = driver.Study(
    name="a3c",
    conditions=[{"workers": workers} for workers in (1, 2, 4, 8, 16)],
    grid=lambda condition: (0, 0),
    run=run,
    options={"rollouts": (20_000, 480), "check_every": (240, 240)},
    seeds=10,
    chosen_by="seconds",
)

if __name__ == "__main__":
    driver.main(STUDY, __doc__)
