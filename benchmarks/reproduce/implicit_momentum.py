r"""The momentum that asynchrony brings, measured, against 1 - 1/M.

    python benchmarks/reproduce/implicit_momentum.py

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

A seed has forty runs, twenty in each set. Then the same for mini-batches that all take equally
long, where theory promises nothing. There is no rate to choose.
"""

import driver  # isort: skip (finds the package)

from typing import Any

import keras
import numpy as np
import side_by_side
import tensorflow as tf
from keras import ops

import tf_dsgd
from tf_dsgd.simulation.study import Study, timetable

RATE, START = 0.1, 10.0
CURVATURES = np.repeat([0.25, 0.5, 1.0, 2.0], 4)  # of as many w under one schedule
COLUMNS = len(CURVATURES)
WORKERS = (1, 2, 4, 8, 16)
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


def paths(workers: int, times: str, seed: int, repetitions: int) -> tuple[np.ndarray, float]:
    """w_0 ... w_T of each run, `[runs, T + 1, h]`; the mean staleness."""
    updates = length_of(workers)
    strategy = tf_dsgd.DownpourStrategy(local_rule="none")
    random = np.random.default_rng([workers, seed])
    noise = random.standard_normal((1 << 14, COLUMNS)).astype("float32")
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
    for number in range(repetitions):
        kernel.assign(np.full([1, COLUMNS], START, np.float32))
        study.run(schedule(workers, times, updates, strategy, seed * repetitions + number))
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


def run(condition, seeds, rates, options) -> dict:
    """Of each seed what its runs have in the mean."""
    found = []
    for seed in seeds:
        keras.utils.clear_session()
        workers, times = condition["workers"], condition["mini-batch"]
        of_seed, staleness = paths(workers, times, seed, options.repetitions)
        mu, gamma = fit(of_seed)
        rest = 100.0 * unexplained(of_seed)
        found.append(
            {"momentum": mu, "rate_measured": gamma, "unexplained": rest, "staleness": staleness}
        )
    return {name: [[float(each[name]) for each in found]] for name in found[0]}


STUDY = driver.Study(
    name="implicit_momentum",
    conditions=[
        {"mini-batch": times, "workers": workers} for times in TIMES for workers in WORKERS
    ],
    grid=lambda condition: (0, 0),
    run=run,
    options={"repetitions": (40, 4)},
    seeds=8,
    chosen_by="momentum",
)

if __name__ == "__main__":
    driver.main(STUDY, __doc__)
