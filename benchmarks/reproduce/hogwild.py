"""Hogwild!, locks of rows, and round-robin, over the density of the gradient.

    python benchmarks/reproduce/hogwild.py

Niu, Recht, Re and Wright (NIPS 2011) compare three ways of updating shared weights, on 10 threads
and data of which an example touches little: without a lock (Hogwild!), with locks of the example's
variables for its update (AIG: `lock="rows"` here), and in turn (RR: `lock="round-robin"`). Hogwild!
is the fastest, 3 times as fast as one thread on RCV1, where RR is slower than one; where a gradient
takes about 1 ms, RR catches up.

`logistic`: RCV1-like, 47,000 columns; an example has `density` x 47,000 of them, drawn without
repetition with Zipf's probabilities, and standard normal values, scaled to length 1. Labels are
those of normal weights of the columns, a tenth of them wrong. Mini-batches of one example, as in
the paper, SGD at a rate of 2. scikit-learn's `SGDClassifier` does the same steps, in one thread.
`completion`: rank 8, users x items, ratings u' v of normal factors; mini-batches of 16 ratings, SGD
on the mean of squares at a rate of 0.5. `density` is 16 / users: a mini-batch's share of a table.

Of a seed are the data and the first weights. All contenders of a seed are in one process, made and
traced before any is timed; then each trains on the next mini-batches, and so on, in an order that
turns by one every time, so that a slow minute of the machine hits all alike. `ms` and `cpu_ms` are
milliseconds of a mini-batch, by the clock and of all threads of the process: the median of the
repetitions. `staleness` is the mean of what is counted; of scikit-learn it is 0.
"""

import driver  # isort: skip (finds the package)

import argparse
import dataclasses
import functools
import statistics
import time
from collections.abc import Callable

import keras
import numpy as np
import tensorflow as tf
from sklearn.linear_model import SGDClassifier

import tf_dsgd

COLUMNS, RATE, WRONG, HELD_OUT = 47_000, 2.0, 0.1, 1_000
RANK, BATCH, COMPLETION_RATE = 8, 16, 0.5
DENSITIES = {"logistic": (0.00016, 0.0016, 0.016), "completion": (0.0016, 0.016, 0.16)}
LOCKS = {"Hogwild!": "none", "AIG": "rows", "round-robin": "round-robin"}
ONE, SKLEARN = "one thread", "scikit-learn"
THREADS = 2


@dataclasses.dataclass
class Problem:
    """Data, and what is trained on it."""

    x: list[np.ndarray]
    y: np.ndarray
    batch: int
    model: Callable[[], keras.Model]
    loss: Callable[[list[np.ndarray]], float]
    """Of a model's weights, on examples that nobody is trained on."""

    def part(self, place: int, steps: int) -> tuple[list[np.ndarray], np.ndarray]:
        chosen = slice(place * steps * self.batch, (place + 1) * steps * self.batch)
        return [each[chosen] for each in self.x], self.y[chosen]


# -- sparse logistic regression --------------------------------------------------------------------


def zipf_columns(random: np.random.Generator, examples: int, number: int) -> np.ndarray:
    """Different columns for each example, `[examples, number]`; column c has weight 1 / (c + 1)."""
    logs = -np.log(np.arange(1, COLUMNS + 1, dtype="float32"))
    found = np.empty((examples, number), "int32")
    for row in found:  # the largest of log weight + Gumbel noise
        drawn = random.standard_exponential(COLUMNS, dtype="float32")
        noise = -np.log(np.maximum(drawn, np.finfo("float32").tiny))
        row[:] = np.argpartition(logs + noise, COLUMNS - number)[COLUMNS - number :]
    return found


def logistic(density: float, examples: int, seed: int) -> Problem:
    random = np.random.default_rng(seed)
    number = max(1, round(density * COLUMNS))
    total = examples + HELD_OUT
    ids = zipf_columns(random, total, number)
    values = random.standard_normal((total, number), dtype="float32")
    values /= np.linalg.norm(values, axis=1, keepdims=True)
    truth = random.standard_normal(COLUMNS, dtype="float32")
    positive = (values * truth[ids]).sum(1) > 0
    wrong = random.random(total) < WRONG
    y = np.where(wrong, ~positive, positive).astype("float32")[:, None]

    def model() -> keras.Model:
        of_ids = keras.Input((number,), dtype="int32")
        of_values = keras.Input((number,))
        table = keras.layers.Embedding(COLUMNS, 1, embeddings_initializer="zeros", name="columns")
        weights = keras.ops.squeeze(table(of_ids), -1)
        output = keras.ops.sum(weights * of_values, axis=1, keepdims=True)
        made = keras.Model([of_ids, of_values], output)
        loss = keras.losses.BinaryCrossentropy(from_logits=True)
        made.compile(keras.optimizers.SGD(RATE), loss)
        return made

    def loss(weights: list[np.ndarray]) -> float:
        logits = (weights[0][:, 0][ids[examples:]] * values[examples:]).sum(1)
        return float(np.logaddexp(0, logits * (1 - 2 * y[examples:, 0])).mean())

    x = [ids[:examples], values[:examples]]
    return Problem(x, y[:examples], 1, model, loss)


class ScikitLearn:
    """The same steps, by `SGDClassifier`."""

    def __init__(self, problem: Problem):
        self._classifier = SGDClassifier(
            loss="log_loss",
            penalty=None,
            alpha=1e-12,
            learning_rate="constant",
            eta0=RATE,
            fit_intercept=False,
            shuffle=False,
        )
        self._problem = problem

    def loss(self) -> float:
        return self._problem.loss([self._classifier.coef_.T])

    def staleness(self) -> float:
        return 0.0

    def train(self, x: list[np.ndarray], y: np.ndarray) -> Callable[[], object]:
        from scipy.sparse import csr_matrix

        ids, values = x
        ends = np.arange(len(ids) + 1) * ids.shape[1]
        matrix = csr_matrix((values.ravel(), ids.ravel(), ends), (len(ids), COLUMNS))
        return lambda: self._classifier.partial_fit(matrix, y[:, 0], classes=[0.0, 1.0])


# -- matrix completion -----------------------------------------------------------------------------


def completion(density: float, examples: int, seed: int) -> Problem:
    random = np.random.default_rng(seed)
    rows, total = round(BATCH / density), examples + HELD_OUT
    pairs = random.integers(0, rows, (total, 2), dtype="int32")
    u, v = random.standard_normal((2, rows, RANK)).astype("float32") / RANK**0.25
    y = (u[pairs[:, 0]] * v[pairs[:, 1]]).sum(1, keepdims=True)

    def model() -> keras.Model:
        keras.utils.set_random_seed(seed)
        users, items = keras.Input((), dtype="int32"), keras.Input((), dtype="int32")
        first = keras.initializers.RandomNormal(stddev=0.5)
        tables = [keras.layers.Embedding(rows, RANK, embeddings_initializer=first) for _ in "uv"]
        output = keras.layers.Dot(1)([tables[0](users), tables[1](items)])
        made = keras.Model([users, items], output)
        made.compile(keras.optimizers.SGD(COMPLETION_RATE), "mse")
        return made

    def loss(weights: list[np.ndarray]) -> float:
        held = pairs[examples:]
        predicted = (weights[0][held[:, 0]] * weights[1][held[:, 1]]).sum(1)
        return float(np.square(predicted - y[examples:, 0]).mean())

    x = [pairs[:examples, 0], pairs[:examples, 1]]
    return Problem(x, y[:examples], BATCH, model, loss)


PROBLEMS = {"logistic": logistic, "completion": completion}


# -- contenders ------------------------------------------------------------------------------------


class Threads:
    """`HogwildStrategy`."""

    def __init__(self, problem: Problem, threads: int, lock: str):
        self._problem = problem
        cluster = tf_dsgd.LocalCluster(threads)
        self.strategy = tf_dsgd.HogwildStrategy(cluster, lock=lock)
        with self.strategy.scope():
            self.model = problem.model()

    def loss(self) -> float:
        return self._problem.loss(self.model.get_weights())

    def staleness(self) -> float:
        return self.strategy.staleness().mean

    def train(self, x: list[np.ndarray], y: np.ndarray) -> Callable[[], object]:
        data = tf.data.Dataset.from_tensor_slices((tuple(x), y)).batch(self._problem.batch)
        data = data.prefetch(64)

        def fit() -> None:
            self.model.fit(data, shuffle=False, verbose=0)
            self.strategy.settle()

        return fit


def contenders(name: str, problem: Problem) -> dict[str, Threads | ScikitLearn]:
    made: dict[str, Threads | ScikitLearn] = {ONE: Threads(problem, 1, "none")}
    for paper, lock in LOCKS.items():
        made[paper] = Threads(problem, THREADS, lock)
    if name == "logistic":
        made[SKLEARN] = ScikitLearn(problem)
    return made


@functools.lru_cache(maxsize=1)
def measured(name: str, density: float, seed: int, steps: int, repetitions: int) -> dict:
    """Of each contender: they take turns, so all of them are measured when one is asked for."""
    keras.utils.clear_session()
    batch = 1 if name == "logistic" else BATCH
    problem = PROBLEMS[name](density, (repetitions + 1) * steps * batch, seed)
    made = contenders(name, problem)
    found: dict[str, list[tuple[float, float]]] = {each: [] for each in made}
    names = list(made)
    for repetition in range(repetitions + 1):
        data = problem.part(repetition, steps)
        first = repetition % len(names)
        for each in names[first:] + names[:first]:
            train = made[each].train(*data)
            began, spent = time.perf_counter(), time.process_time()
            train()
            taken = time.perf_counter() - began, time.process_time() - spent
            if repetition:  # the first one traces
                found[each].append(taken)
    return {
        each: {
            "ms": 1e3 * statistics.median(wall for wall, _ in found[each]) / steps,
            "cpu_ms": 1e3 * statistics.median(cpu for _, cpu in found[each]) / steps,
            "loss": contender.loss(),
            "staleness": contender.staleness(),
        }
        for each, contender in made.items()
    }


def run(condition: dict, seeds: list[int], rates: list[float], options: argparse.Namespace) -> dict:
    of = condition["problem"], condition["density"]
    sizes = options.steps, options.repetitions
    found = [measured(*of, seed, *sizes)[condition["contender"]] for seed in seeds]
    return {name: [[each[name] for each in found] for _ in rates] for name in found[0]}


STUDY = driver.Study(
    name="hogwild",
    conditions=[
        {"problem": problem, "density": density, "contender": contender}
        for problem, densities in DENSITIES.items()
        for density in densities
        for contender in (ONE, *LOCKS, *([SKLEARN] if problem == "logistic" else []))
    ],
    grid=lambda condition: (0, 0),
    run=run,
    options={"steps": (150, 20), "repetitions": (3, 1)},
    seeds=5,
    chosen_by="ms",
)

if __name__ == "__main__":
    driver.main(STUDY, __doc__)
