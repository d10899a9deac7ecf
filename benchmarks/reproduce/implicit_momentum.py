r"""The momentum that asynchrony brings, measured, against 1 - 1/M.

    python benchmarks/reproduce/implicit_momentum.py --plot docs/images/implicit_momentum.png

Mitliagkas, Zhang, Hadjis and Re (2016): M asynchronous workers without momentum behave, in the
mean, like one with momentum 1 - 1/M, if delays are distributed exponentially:

    E[w_{t+1} - w_t] = (1 - 1/M) E[w_t - w_{t-1}] - (alpha/M) E grad f(w_t).

Why, for a gradient that is linear in w: workers without memory are each as likely to be next, so
that tau is geometric, P(tau = l) = p q^l with p = 1/M, q = 1 - p, and independent of w_{t-tau}.
Then

    E[w_{t+1} - w_t] = -alpha sum_{l<t} p q^l E grad f(w_{t-l}) - alpha q^t grad f(w_0)

(until its first push a worker computes on w_0), and less q times the same for t - 1 that is
-alpha p E grad f(w_t), from t = 1 on.

Here f(w) = h (w - y)^2 / 2 with y from N(0, 1), so that E grad f(w) = h E w, for several h; many
runs from w_0 = 10, each with delays and noise of its own, give means over runs, m_t of w_t, for
t = 0 ... T. Over all h and t = 1 ... T - 1 is fitted, without a constant,

    m_{t+1} - m_t = mu (m_t - m_{t-1}) - gamma h m_t.

(Several h, since with M = 1 and one h the two factors are proportional.)

mu is the momentum measured, gamma the rate, to be compared with 1 - 1/M and alpha / M. By least
squares mu would come out too small, as the means on the right have errors, too. So there are two
sets of means, A and B, each of every other run, and each is the other's instrument: with X the
factors on the right and s the steps on the left,

    (X_B' X_A + X_A' X_B) (mu, gamma) = X_B' s_A + X_A' s_B.

Standard errors by the jackknife over twenty groups of runs. Then the same for mini-batches that all
take equally long, where theory promises nothing.
"""

import setting  # isort: skip (finds the package and `runs`)

from typing import Any

import keras
import numpy as np
import runs
import side_by_side
import tensorflow as tf
from keras import ops

import tf_dsgd
from tf_dsgd.simulation.study import Study, timetable

RATE, START = 0.1, 10.0
CURVATURES = np.repeat([0.25, 0.5, 1.0, 2.0], 4)  # of as many w under one schedule
COLUMNS = len(CURVATURES)
GROUPS = 20
TIMES = {"exponential": tf_dsgd.Exponential(1.0), "one second": 1.0}


class RecordingSGD(keras.optimizers.SGD):
    """SGD that writes down the weight before each of its last `length` updates."""

    def __init__(self, rate: float, length: int):
        super().__init__(rate)
        self.length = length

    def build(self, variables: Any) -> None:
        super().build(variables)
        self.path = self.add_variable((self.length, *variables[0].shape), name="path")

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        row = ops.cast(self.iterations % self.length, "int64")
        before = tf.IndexedSlices(tf.convert_to_tensor(variable)[None], row[None])
        self.path.value.scatter_update(before)
        super().update_step(gradient, variable, learning_rate)


def quadratic(length: int) -> keras.Model:
    model = keras.Sequential(
        [
            keras.Input((1,)),
            keras.layers.Dense(
                COLUMNS, use_bias=False, kernel_initializer=keras.initializers.Constant(START)
            ),
        ]
    )
    model.compile(
        RecordingSGD(RATE, length),
        loss=lambda y, w: ops.sum(CURVATURES.astype("float32") / 2 * ops.square(w - y)),
    )
    return model


def length_of(workers: int) -> int:
    """Updates in a run: some times the relaxation, which takes about 2 M."""
    return 16 + 8 * workers


def paths(workers: int, times: str, repetitions: int) -> tuple[np.ndarray, float]:
    """w_0 ... w_T of each run, `[runs, T + 1, h]`; the mean staleness."""
    updates = length_of(workers)
    strategy = tf_dsgd.DownpourStrategy(local_rule="none")
    noise = np.random.default_rng(workers).standard_normal((1 << 14, COLUMNS)).astype("float32")
    study = Study(
        strategy.algorithm,
        workers,
        lambda: quadratic(updates),
        np.ones((len(noise), 1), np.float32),
        noise,
        batch_size=1,
        jit_compile=False,  # runs are short
    )
    kernel, path = study.model.trainable_variables[0], study.model.optimizer.path
    found = []
    for seed in range(repetitions):
        kernel.assign(np.full([1, COLUMNS], START, np.float32))
        study.run(schedule(workers, times, updates, strategy, seed))
        found.append([*path.numpy()[:, 0], kernel.numpy()[0]])
    # Of equal curvature the mean.
    return np.array(found).reshape(repetitions, updates + 1, -1, 4).mean(
        -1
    ), study.strategy.staleness().mean


def schedule(
    workers: int, times: str, updates: int, strategy: tf_dsgd.DownpourStrategy, seed: int
) -> list[tuple]:
    """All workers fetch; then this many pushes, on mini-batches that no other run uses soon."""
    cluster = tf_dsgd.SimulatedCluster(workers, compute_seconds=TIMES[times], seed=seed)
    # The last messages of a timetable are those of a drain, when fewer and fewer workers go on.
    whole = timetable(cluster, strategy.algorithm.exchange, updates + workers)
    entries: list[tuple] = [(m, "fetch") for m in range(workers)]
    pushes = 0
    for worker, action, *what in side_by_side.joined(whole):
        if action == "push" and pushes < updates:
            entries.append((worker, action, (seed * updates + pushes,)))
            pushes += 1
        elif action == "fetch" and pushes and pushes < updates:
            entries.append((worker, action))
        del what
    return entries


def parts(mean: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Factors and steps."""
    steps = np.diff(mean, axis=0)
    factors = np.stack([steps[:-1], -CURVATURES[::4] * mean[1:-1]], -1)
    return factors.reshape(-1, 2), steps[1:].ravel()


def fit(found: np.ndarray) -> np.ndarray:
    """(mu, gamma)."""
    (x_a, s_a), (x_b, s_b) = (parts(found[k::2].mean(0)) for k in (0, 1))
    return np.linalg.solve(x_b.T @ x_a + x_a.T @ x_b, x_b.T @ s_a + x_a.T @ s_b)


def unexplained(found: np.ndarray) -> float:
    """The root mean square of what the fit leaves of the steps, as a share of theirs."""
    factors, steps = parts(found.mean(0))
    rest = steps - factors @ fit(found)
    return float(np.sqrt(np.mean(rest**2) / np.mean(steps**2)))


def measure(workers: int, times: str, repetitions: int) -> dict:
    found, staleness = paths(workers, times, repetitions)
    count = min(GROUPS, repetitions // 4)
    groups = np.array_split(found, count)
    without = np.array([fit(np.concatenate([*groups[:k], *groups[k + 1 :]])) for k in range(count)])
    errors = np.sqrt((count - 1) / count * np.sum((without - without.mean(0)) ** 2, 0))
    mu, gamma = fit(found)
    return {
        "workers": workers,
        "times": times,
        "repetitions": repetitions,
        "mean_staleness": staleness,
        "momentum": float(mu),
        "momentum_error": float(errors[0]),
        "rate": float(gamma),
        "rate_error": float(errors[1]),
        "rest": unexplained(found),
        "mean_path": found.mean(0).tolist(),
    }


def report(results: list[dict]) -> str:
    rows = [
        [
            str(r["workers"]),
            r["times"],
            f"{r['mean_staleness']:.2f}",
            f"{r['momentum']:.4f} ± {r['momentum_error']:.4f}",
            f"{1 - 1 / r['workers']:.4f}",
            f"{r['rate']:.4f} ± {r['rate_error']:.4f}",
            f"{RATE / r['workers']:.4f}",
            f"{100 * r['rest']:.0f} %",
        ]
        for r in results
    ]
    header = ["M", "mini-batch", "mean staleness", "momentum", "1 - 1/M", "rate", "alpha / M"]
    return runs.table([*header, "left unexplained"], rows)


def plot(results: list[dict], path: str) -> None:
    pyplot = setting.pyplot()
    figure, axes = pyplot.subplots(1, 2, figsize=(8, 3.2))
    exact = np.linspace(1, max(r["workers"] for r in results), 200)
    axes[0].plot(exact, 1 - 1 / exact, color="0.6", label="1 - 1/M")
    for times in dict.fromkeys(r["times"] for r in results):
        found = [r for r in results if r["times"] == times]
        axes[0].errorbar(
            [r["workers"] for r in found],
            [r["momentum"] for r in found],
            [r["momentum_error"] for r in found],
            fmt="o",
            label=f"measured, {times}",
        )
    for r in results:
        if r["times"] == "exponential":
            axes[1].plot(np.array(r["mean_path"])[:, 2], label=f"M = {r['workers']}")
    axes[0].set_xlabel("M, workers")
    axes[0].set_ylabel("momentum")
    axes[1].set_xlabel("update")
    axes[1].set_ylabel("mean of w, h = 1, exponential")
    axes[1].set_xlim(0, 80)
    for axis in axes:
        axis.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=90)


def main() -> None:
    parser = setting.arguments(__doc__)
    parser.add_argument("--workers", default="1,2,4,8,16")
    parser.add_argument("--times", default="|".join(TIMES), help="of a mini-batch, by |")
    parser.add_argument("--repetitions", type=int, default=200)
    options = parser.parse_args()
    results = []
    for times in options.times.split("|"):
        for workers in setting.numbers(options.workers):
            results.append(measure(workers, times, options.repetitions))
            print({k: v for k, v in results[-1].items() if k != "mean_path"}, flush=True)
    setting.finish(options, results, report, plot)


if __name__ == "__main__":
    main()
