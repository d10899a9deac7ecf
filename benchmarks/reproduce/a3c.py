"""A3C on CartPole: virtual seconds and episodes until it is solved, with 1 to 16 workers.

    python benchmarks/reproduce/a3c.py --json a3c.json

Mnih et al. (2016), table 2: to a score of reference, on average over seven Atari games, 2, 4, 8 and
16 threads are 2.1, 3.7, 6.9 and 12.5 times as fast as one. Here examples/a3c_cartpole.py runs on
simulated workers: a rollout of at most five steps takes a second (log-normal, so that workers do
not go in step), a message 0.05 s on average. CartPole is solved when 100 new episodes have a mean
return of 475. This is looked at every `--check_every` rollouts, when all workers meet. Another
1,000 episodes with the same weights then say how far that was luck. The rate falls to 0 over
`--rollouts`, which is also where a run is given up. Every seed has its own first weights, episodes
and delays; intervals are 95 % by bootstrap over the seeds.
"""

import setting  # isort: skip (finds the package and `runs`)

import json
import os
import sys
import time
from pathlib import Path

import keras
import numpy as np
import runs

import tf_dsgd

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

import a3c_cartpole

PAPER = {1: 1.0, 2: 2.1, 4: 3.7, 8: 6.9, 16: 12.5}
AGAIN = 10
DRAWS = 10_000


def solve(workers: int, seed: int, options) -> dict:
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
        "--rate": options.rate,
    }
    example = a3c_cartpole.parsed([str(part) for pair in chosen.items() for part in pair])
    curve: list[tuple[int, float]] = []
    start = time.process_time()
    result = a3c_cartpole.train(
        strategy, example, note=lambda number, _, mean: curve.append((number, mean))
    )
    spent = time.process_time() - start
    judge = a3c_cartpole.make_judge(example)
    weights = result["agent"].model.get_weights()
    again = [judge(weights, options.rollouts + k) for k in range(1, AGAIN + 1)]
    return {
        "workers": workers,
        "seed": seed,
        "solved": result["solved"],
        "rollouts": result["rollouts"],
        "episodes": result["episodes"],
        "virtual_seconds": float(strategy.engine.clock()),
        "mean_staleness": strategy.staleness().mean,
        "processor_seconds": round(spent, 1),
        "again": round(float(np.mean(again)), 1),
        "curve": [(number, round(mean, 1)) for number, mean in curve],
    }


def interval(statistic, *samples: np.ndarray) -> str:
    """Of a statistic of samples, each of which is drawn again by itself."""
    random = np.random.default_rng(0)
    drawn = (s[random.integers(0, len(s), (DRAWS, len(s)))] for s in samples)
    low, high = np.percentile(statistic(*drawn), [2.5, 97.5])
    digits = 0 if high >= 100 else 1
    found = statistic(*(s[None] for s in samples))[0]
    return f"{found:,.{digits}f} ({low:,.{digits}f} to {high:,.{digits}f})"


def report(results: list[dict]) -> str:
    def of(workers: int, name: str) -> np.ndarray:
        return np.array([r[name] for r in results if r["workers"] == workers], float)

    def mean(values: np.ndarray) -> np.ndarray:
        return values.mean(1)

    def ratio(one: np.ndarray, several: np.ndarray) -> np.ndarray:
        return one.mean(1) / several.mean(1)

    counts = sorted({r["workers"] for r in results})
    rows = []
    for workers in counts:
        seconds = of(workers, "virtual_seconds")
        faster = "1"
        if workers > 1 and 1 in counts:
            faster = interval(ratio, of(1, "virtual_seconds"), seconds)
        rows.append(
            [
                str(workers),
                f"{int(of(workers, 'solved').sum())} of {len(seconds)}",
                interval(mean, of(workers, "episodes")),
                interval(mean, seconds),
                faster,
                f"{PAPER.get(workers, float('nan')):g}",
                f"{of(workers, 'mean_staleness').mean():.1f}",
                f"{of(workers, 'again').mean():.0f} ({of(workers, 'again').min():.0f})",
            ]
        )
    header = ["workers", "solved", "episodes", "virtual seconds", "times as fast as one"]
    header += ["the paper's", "mean staleness", "return in 1,000 more episodes (least)"]
    return runs.table(header, rows)


def main() -> None:
    parser = setting.arguments(__doc__)
    parser.add_argument("--workers", default="1,2,4,8,16", help="numbers of workers, by commas")
    parser.add_argument("--seeds", default="1,2,3,4,5,6,7,8,9,10", help="by commas")
    parser.add_argument("--rollouts", type=int, default=20_000, help="at most")
    parser.add_argument("--check_every", type=int, default=240, help="rollouts")
    parser.add_argument("--rate", type=float, default=0.01, help="at first")
    options = parser.parse_args()
    results = []
    if options.json and os.path.exists(options.json):  # goes on where it was cut off
        with open(options.json) as file:
            results = json.load(file)["results"]
    done = {(r["workers"], r["seed"]) for r in results}
    for seed in setting.numbers(options.seeds):
        for workers in setting.numbers(options.workers):
            if (workers, seed) not in done:
                results.append(solve(workers, seed, options))
                print({k: v for k, v in results[-1].items() if k != "curve"}, flush=True)
                runs.write_json(options.json, {**runs.provenance(), "results": results})
    setting.finish(options, results, report, None)


if __name__ == "__main__":
    main()
