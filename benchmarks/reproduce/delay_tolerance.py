"""Adagrad, AdaptiveRevision and staleness scaling under delays of 1 to 4096 updates.

    python benchmarks/reproduce/delay_tolerance.py --plot docs/images/delay_tolerance.png

McMahan and Streeter (NIPS 2014) train logistic regression online, every gradient applied a fixed
number of updates after its weights were read: at delays of 1,000 and more AdaptiveRevision is
significantly better than standard adaptive methods. Here the same on made-up data like that of
clicks on advertisements: binary features of which the j-th is present with probability
min(1/2, 2/j), besides one that is always there; true weights -1 for that one and standard normal
for the others; labels drawn by them. Every example is seen once (`round_robin` makes the delay).

The loss is that of each example before its label is used, at the delayed weights, averaged over
all; less that of the true weights on the same examples (the regret for each example). Every method
has the best of its grid of rates, at each delay, by the mean over the seeds.
"""

import setting  # isort: skip (finds the package and `runs`)

import keras
import numpy as np
import runs
import side_by_side

import tf_dsgd

DELAYS = (1, 4, 16, 64, 256, 1024, 4096)


def adagrad(rate: object) -> keras.optimizers.Optimizer:
    return keras.optimizers.Adagrad(rate, initial_accumulator_value=1.0)


# The optimizer, what scales its step, and the grid: powers of 2, from and to.
METHODS = {
    "Adagrad": (adagrad, None, (-10, 3)),
    "AdaptiveRevision": (tf_dsgd.optimizers.AdaptiveRevision, None, (-10, 3)),
    "Adagrad, alpha_0 / tau": (adagrad, "inverse", (-6, 9)),
    "SGD, alpha_0 / tau": (keras.optimizers.SGD, "inverse", (-6, 9)),
}


def clicks(examples: int, features: int, seed: int) -> tuple[np.ndarray, ...]:
    """Features, labels, and the losses of the true weights."""
    random = np.random.default_rng(seed)
    often = np.minimum(0.5, 2.0 / np.arange(1, features))
    x = np.ones((examples, features), np.float32)
    x[:, 1:] = random.random((examples, features - 1)) < often
    weights = np.array([-1.0, *random.standard_normal(features - 1)])
    margin = x @ weights
    y = (random.random(examples) < 1 / (1 + np.exp(-margin))).astype(np.float32)
    return x, y, losses(margin, y)


def losses(margin: np.ndarray, y: np.ndarray) -> np.ndarray:
    return np.logaddexp(0.0, margin) - y * margin


def measure(
    name: str, delay: int, data: list[tuple], held: int, seeds: list[int], jit_compile: bool
) -> dict:
    """One method at one delay, for all its rates and all seeds."""
    optimizer, scaling, (low, high) = METHODS[name]
    rates = [2.0**k for k in range(low, high + 1)]
    x, y, best = (np.stack(part, 1) for part in zip(*data, strict=True))
    updates = len(x) - held
    study = side_by_side.Runs(
        tf_dsgd.DownpourStrategy(local_rule="none", staleness_scaling=scaling),
        delay + 1,
        optimizer,
        rates,
        seeds,
        lambda rates, seeds: [side_by_side.Dense(rates, seeds, 1, glorot=False, bias=False)],
        x[:updates],
        y[:updates],
        batch_size=1,
        jit_compile=jit_compile,
    )
    regret = study.train(side_by_side.round_robin(delay, updates)) - best[:updates].mean(0)
    staleness = study.study.strategy.staleness()
    margin = np.swapaxes(study.logits(x[updates:])[..., 0], 1, 2)
    held_out = (losses(margin, y[updates:]) - best[updates:]).mean(1)
    chosen = int(np.argmin(regret.mean(1)))
    return {
        "method": name,
        "delay": delay,
        "updates": study.study.strategy.updates,
        "staleness_p50": staleness.p50,
        "staleness_max": staleness.max,
        "rates": rates,
        "regret": regret.tolist(),
        "held_out": held_out.tolist(),
        "best": chosen,
        "at_the_edge": chosen in (0, len(rates) - 1),
    }


def spread(values: np.ndarray) -> str:
    """Mean and its standard error."""
    error = values.std(ddof=1) / len(values) ** 0.5 if len(values) > 1 else float("nan")
    return f"{values.mean():.4f} ± {error:.4f}"


def at_best(result: dict, what: str = "regret") -> np.ndarray:
    """For each seed."""
    return np.array(result[what][result["best"]])


def report(results: list[dict]) -> str:
    methods = list(dict.fromkeys(r["method"] for r in results))
    tables = []
    for what in ("regret", "held_out"):
        rows = []
        for delay in dict.fromkeys(r["delay"] for r in results):
            found = [r for r in results if r["delay"] == delay]
            rows.append([str(delay), *(cell(r, what) for r in found)])
        title = {"regret": "delay; online", "held_out": "delay; held out at the end"}[what]
        tables.append(runs.table([title, *methods], rows))
    return "\n\n".join(tables)


def cell(result: dict, what: str) -> str:
    rate = f"2^{int(np.log2(result['rates'][result['best']]))}"
    edge = ", edge of the grid" if result["at_the_edge"] else ""
    return f"{spread(at_best(result, what))} ({rate}{edge})"


def plot(results: list[dict], path: str) -> None:
    pyplot = setting.pyplot()
    figure, axes = pyplot.subplots(1, 2, figsize=(8, 3.2), sharey=True)
    titles = {"regret": "online, all examples", "held_out": "held out, at the end"}
    for axis, (what, title) in zip(axes, titles.items(), strict=True):
        for name in dict.fromkeys(r["method"] for r in results):
            found = [r for r in results if r["method"] == name]
            values = np.array([at_best(r, what) for r in found])
            errors = values.std(1, ddof=min(1, values.shape[1] - 1)) / values.shape[1] ** 0.5
            delays = [r["delay"] for r in found]
            axis.errorbar(delays, values.mean(1), errors, marker="o", markersize=4, label=name)
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_title(title)
        axis.set_xlabel("delay, updates")
    axes[0].set_ylabel("loss less the true weights'")
    axes[0].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=90)


def main() -> None:
    parser = setting.arguments(__doc__)
    parser.add_argument("--delays", default=",".join(map(str, DELAYS)))
    parser.add_argument("--methods", default="|".join(METHODS), help="by |")
    parser.add_argument("--examples", type=int, default=80_000)
    parser.add_argument("--held_out", type=int, default=10_000)
    parser.add_argument("--features", type=int, default=256)
    parser.add_argument("--seeds", default="1,2,3,4")
    parser.add_argument("--no_xla", action="store_true", help="sooner done with few examples")
    options = parser.parse_args()
    seeds = setting.numbers(options.seeds)
    examples = options.examples + options.held_out
    data = [clicks(examples, options.features, seed) for seed in seeds]
    results = []
    for delay in setting.numbers(options.delays):
        for name in options.methods.split("|"):
            results.append(measure(name, delay, data, options.held_out, seeds, not options.no_xla))
            print(name, delay, cell(results[-1], "regret"), flush=True)
    setting.finish(options, results, report, plot)


if __name__ == "__main__":
    main()
