"""Sandblaster beside Downpour in virtual seconds, with few replicas and with many.

    python benchmarks/reproduce/sandblaster.py --json sandblaster.json --plot sandblaster.png

The task of teacher.py, of each seed its own data and first weights. A worker takes a second for 50
examples, a message 0.05 s in the mean; so seconds are those of a machine whose workers do nothing
else. Downpour sends each gradient, with Adagrad or a fixed rate on the shard; a seed's rate is the
one that the other seeds choose, by the seconds to the target. L-BFGS has nothing to choose. Tasks
differ between seeds: a seed's target is a multiple of the least error that any of its runs reached.
The weights are judged at the end of each epoch, where Downpour's workers meet: with 16 workers that
takes two or three seconds of twenty-eight. With 160 workers an epoch of 400 mini-batches would be
little else, so that control has epochs of five passes, and its seconds are as coarse.
"""

import setting  # isort: skip (finds the package and `runs`)

import itertools
import json
import os

import keras
import numpy as np
import runs
import teacher

import tf_dsgd

BATCH = 50
MESSAGE_SECONDS = 0.05
RATES = {"L-BFGS": [None], "Adagrad": teacher.powers(-7, -1), "fixed rate": teacher.powers(-8, 0)}
FEW, MANY = 16, 160


class Pace(keras.callbacks.Callback):
    """(virtual seconds, held-out error in per cent, held-out loss) at each epoch's end."""

    def __init__(self, strategy, x: np.ndarray, y: np.ndarray, enough: float):
        super().__init__()
        self.strategy, self.x, self.y, self.enough = strategy, x, y, enough
        self.seen: list[tuple[float, float, float]] = []

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        judged = teacher.judge(np.array(self.model(self.x))[None], self.y[None])
        error, loss = judged["error"][0], judged["loss"][0]
        self.seen.append((float(self.strategy.engine.clock()), error, loss))
        if error <= self.enough or not np.isfinite(loss):
            self.model.stop_training = True


def train(method: str, workers: int, rate: float | None, seed: int, options) -> dict:
    keras.utils.clear_session()
    keras.utils.set_random_seed(seed)
    x, y = teacher.taught(seed)
    trained = slice(0, teacher.TRAINED)
    cluster = tf_dsgd.SimulatedCluster(
        workers,
        compute_seconds=1.0,
        network_seconds=tf_dsgd.Exponential(MESSAGE_SECONDS),
        seed=seed,
    )
    batch_method = method == "L-BFGS"
    kind = tf_dsgd.SandblasterStrategy if batch_method else tf_dsgd.DownpourStrategy
    strategy = kind(cluster)
    optimizers = {"Adagrad": keras.optimizers.Adagrad, "fixed rate": keras.optimizers.SGD}
    with strategy.scope():
        layers = keras.layers
        model = keras.Sequential(
            [
                keras.Input((teacher.INPUTS,)),
                layers.Dense(teacher.STUDENT, "relu"),
                layers.Dense(teacher.CLASSES),
            ]
        )
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        compiled = {} if batch_method else {"optimizer": optimizers[method](rate)}
        model.compile(loss=loss, **compiled)
    held_out = slice(teacher.TRAINED, None)
    pace = Pace(strategy, x[held_out], y[held_out], options.enough)
    passes = 5 if workers > FEW and not batch_method else 1
    epochs = options.iterations if batch_method else options.epochs
    model.fit(
        np.tile(x[trained], (passes, 1)),
        np.tile(y[trained], passes),
        batch_size=BATCH,
        epochs=epochs,
        verbose=0,
        callbacks=[pace],
    )
    result = {
        "method": method,
        "workers": workers,
        "rate": rate,
        "seed": seed,
        "best": min(error for _, error, _ in pace.seen),
        "curve": [[round(seconds, 1), round(error, 2)] for seconds, error, _ in pace.seen],
    }
    print({k: v for k, v in result.items() if k != "curve"}, flush=True)
    return result


def cells(options) -> list[tuple[str, int, float | None, int]]:
    """All runs: method, workers, rate, seed."""
    seeds = setting.numbers(options.seeds)
    grid = [
        (method, workers, rate)
        for method, rates in RATES.items()
        if method in options.methods.split(",")
        for workers in (FEW, MANY)
        for rate in rates
    ]
    return [(*cell, seed) for seed, cell in itertools.product(seeds, grid)]


def seconds_to(run: dict, target: float) -> float | None:
    """Virtual seconds until the held-out error is at most this; None if it never was."""
    return next((seconds for seconds, error in run["curve"] if error <= target), None)


def targets(results: list[dict], within: float) -> dict[int, float]:
    """Of each seed."""
    seeds = {r["seed"] for r in results}
    least = {seed: min(r["best"] for r in results if r["seed"] == seed) for seed in seeds}
    return {seed: (1.0 + within) * error for seed, error in least.items()}


def chosen(results: list[dict], method: str, workers: int, within: float) -> list[dict]:
    """Each seed's run at the rate by which the other seeds come to their targets first."""
    aims = targets(results, within)
    found = [r for r in results if (r["method"], r["workers"]) == (method, workers)]
    rates = sorted({r["rate"] for r in found}, key=lambda rate: rate or 0.0)
    seeds = sorted({r["seed"] for r in found})
    by = {(r["rate"], r["seed"]): r for r in found}
    longest = 2.0 * max(r["curve"][-1][0] for r in found)

    def seconds(rate: float | None, seed: int) -> float:
        return seconds_to(by[rate, seed], aims[seed]) or longest

    picked = []
    for seed in seeds:
        others = [each for each in seeds if each != seed] or [seed]
        rate = min(rates, key=lambda rate: np.mean([seconds(rate, each) for each in others]))
        edge = len(rates) > 1 and rate in (rates[0], rates[-1])
        run = by[rate, seed]
        picked.append({**run, "edge": edge, "seconds": seconds_to(run, aims[seed])})
    return picked


def interval(values: list[float]) -> str:
    """Mean with its 95 % t-interval."""
    from scipy import stats

    if len(values) < 2:
        return f"{values[0]:.0f}"
    half = stats.t.ppf(0.975, len(values) - 1) * np.std(values, ddof=1) / len(values) ** 0.5
    return f"{np.mean(values):.0f} ± {half:.0f}"


def report(results: list[dict], options) -> str:
    rows, ran = [], options.methods.split(",")
    base = chosen(results, "Adagrad" if "Adagrad" in ran else ran[0], FEW, options.within)
    for method, workers in itertools.product(ran, (FEW, MANY)):
        picked = chosen(results, method, workers, options.within)
        pairs = [(r["seconds"], b["seconds"]) for r, b in zip(picked, base, strict=True)]
        whole = all(seconds is not None for pair in pairs for seconds in pair)
        rates = sorted({teacher.power(r["rate"]) for r in picked if r["rate"]})
        rows.append(
            [
                "Sandblaster, L-BFGS" if method == "L-BFGS" else f"Downpour, {method}",
                str(workers),
                ", ".join(rates) + (", edge" if any(r["edge"] for r in picked) else ""),
                f"{sum(r['seconds'] is not None for r in picked)} of {len(picked)}",
                interval([r["seconds"] for r in picked]) if whole else "",
                interval([a - b for a, b in pairs]) if whole and picked != base else "",
                f"{np.mean([r['best'] for r in picked]):.2f}",
            ]
        )
    heads = [
        "",
        "replicas",
        "rates",
        "came to the target",
        "virtual seconds",
        f"more than {base[0]['method']} with {FEW}",
        "least error",
    ]
    return runs.table(heads, rows)


def plot(results: list[dict], options, path: str) -> None:
    pyplot = setting.pyplot()
    figure, axis = pyplot.subplots(figsize=(6.4, 4.0))
    for method, workers in itertools.product(options.methods.split(","), (FEW, MANY)):
        for number, run in enumerate(chosen(results, method, workers, options.within)):
            seconds, errors = zip(*run["curve"], strict=True)
            axis.plot(
                seconds,
                errors,
                "-" if workers == FEW else "--",
                color=f"C{list(RATES).index(method)}",
                linewidth=1,
                label=None if number else f"{method}, {workers} replicas",
            )
    axis.set(xscale="log", xlabel="virtual seconds", ylabel="held-out error, per cent")
    axis.set_ylim(20, 80)
    axis.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = setting.arguments(__doc__)
    parser.add_argument("--seeds", default="1,2,3,4,5")
    parser.add_argument("--methods", default=",".join(RATES))
    parser.add_argument("--enough", type=float, default=26.0, help="the error at which a run ends")
    parser.add_argument("--within", type=float, default=0.15, help="of the least error: the target")
    parser.add_argument("--epochs", type=int, default=12, help="of Downpour, at most")
    parser.add_argument("--iterations", type=int, default=100, help="of L-BFGS, at most")
    options = parser.parse_args()
    results = []
    if options.json and os.path.exists(options.json):  # goes on where it was cut off
        with open(options.json) as file:
            results = json.load(file)["results"]
    done = {(r["method"], r["workers"], r["rate"], r["seed"]) for r in results}
    for cell in cells(options):
        if cell not in done:
            results.append(train(*cell, options))
            runs.write_json(options.json, {**runs.provenance(), "results": results})
    setting.finish(options, results, report, plot, options)


if __name__ == "__main__":
    main()
