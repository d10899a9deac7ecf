"""Hogwild!, locks of rows, and round-robin, over the density of the gradient.

    python benchmarks/reproduce/hogwild.py --json hogwild.json --plot hogwild.png
    python benchmarks/reproduce/hogwild.py --quick

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
on the mean of squares at a rate of 2. `density` is 16 / users: a mini-batch's share of a table.

All contenders are in one process, made and traced before any is timed; then each trains on the next
mini-batches, and so on, in an order that turns by one every time, so that a slow minute of the
machine hits all alike. A ratio is one contender's speed beside one thread's in the same repetition.
Processor time is that of all threads of the process.
"""

import setting  # isort: skip (finds the package and `runs`)

import dataclasses
import statistics
import time
from collections.abc import Callable

import keras
import numpy as np
import runs
import tensorflow as tf
from sklearn.linear_model import SGDClassifier

import tf_dsgd

COLUMNS, RATE, WRONG, HELD_OUT = 47_000, 2.0, 0.1, 1_000
RANK, BATCH, COMPLETION_RATE = 8, 16, 2.0
DENSITIES = {"logistic": (0.00016, 0.0016, 0.016), "completion": (0.0016, 0.016, 0.16)}
LOCKS = {"none": "Hogwild!", "rows": "AIG", "round-robin": "round-robin"}
ONE, SKLEARN = "one thread", "scikit-learn"


@dataclasses.dataclass
class Problem:
    """Data, and what is trained on it."""

    x: list[np.ndarray]
    y: np.ndarray
    batch: int
    model: Callable[[], keras.Model]
    loss: Callable[[list[np.ndarray]], float]
    """Of a model's weights, on examples that nobody is trained on."""
    rows: float
    """That a mini-batch names, on average."""

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


def logistic(density: float, examples: int) -> Problem:
    random = np.random.default_rng(1)
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
    return Problem(x, y[:examples], 1, model, loss, number)


class ScikitLearn:
    """The same steps, by `SGDClassifier`."""

    def __init__(self, first: Problem):
        self._classifier = SGDClassifier(
            loss="log_loss",
            penalty=None,
            alpha=1e-12,
            learning_rate="constant",
            eta0=RATE,
            fit_intercept=False,
            shuffle=False,
        )
        self.loss = lambda: first.loss([self._classifier.coef_.T])

    def train(self, x: list[np.ndarray], y: np.ndarray) -> Callable[[], object]:
        from scipy.sparse import csr_matrix

        ids, values = x
        ends = np.arange(len(ids) + 1) * ids.shape[1]
        matrix = csr_matrix((values.ravel(), ids.ravel(), ends), (len(ids), COLUMNS))
        return lambda: self._classifier.partial_fit(matrix, y[:, 0], classes=[0.0, 1.0])


# -- matrix completion -----------------------------------------------------------------------------


def completion(density: float, examples: int) -> Problem:
    random = np.random.default_rng(1)
    rows, total = round(BATCH / density), examples + HELD_OUT
    pairs = random.integers(0, rows, (total, 2), dtype="int32")
    u, v = random.standard_normal((2, rows, RANK)).astype("float32") / RANK**0.25
    y = (u[pairs[:, 0]] * v[pairs[:, 1]]).sum(1, keepdims=True)

    def model() -> keras.Model:
        keras.utils.set_random_seed(1)
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
    return Problem(x, y[:examples], BATCH, model, loss, 2 * BATCH)


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

    def train(self, x: list[np.ndarray], y: np.ndarray) -> Callable[[], object]:
        data = tf.data.Dataset.from_tensor_slices((tuple(x), y)).batch(self._problem.batch)
        data = data.prefetch(64)

        def fit() -> None:
            self.model.fit(data, shuffle=False, verbose=0)
            self.strategy.settle()

        return fit


def contenders(name: str, problem: Problem, threads: list[int]) -> dict[str, object]:
    made: dict[str, object] = {ONE: Threads(problem, 1, "none")}
    for number in threads:
        for lock, paper in LOCKS.items():
            made[f"{paper}, {number}"] = Threads(problem, number, lock)
    if name == "logistic":
        made[SKLEARN] = ScikitLearn(problem)
    return made


def measure(name: str, density: float, threads: list[int], steps: int, repetitions: int) -> dict:
    keras.utils.clear_session()
    batch = 1 if name == "logistic" else BATCH
    problem = PROBLEMS[name](density, (repetitions + 1) * steps * batch)
    made = contenders(name, problem, threads)
    speeds: dict[str, list[float]] = {each: [] for each in made}
    processor: dict[str, list[float]] = {each: [] for each in made}
    names = list(made)
    for repetition in range(repetitions + 1):
        data = problem.part(repetition, steps)
        turned = names[repetition % len(names) :] + names[: repetition % len(names)]
        for each in turned:
            train = made[each].train(*data)
            began, spent = time.perf_counter(), time.process_time()
            train()
            if repetition:  # the first one traces
                speeds[each].append(steps / (time.perf_counter() - began))
                processor[each].append(1e3 * (time.process_time() - spent) / steps)
    staleness = {
        each: contender.strategy.staleness().mean
        for each, contender in made.items()
        if isinstance(contender, Threads)
    }
    return {
        "problem": name,
        "density": density,
        "rows": problem.rows,
        "steps": steps,
        "steps_per_second": speeds,
        "cpu_ms": processor,
        "loss": {each: contender.loss() for each, contender in made.items()},
        "staleness": staleness,
    }


# -- what came out ---------------------------------------------------------------------------------


def ratios(result: dict, name: str, beside: str) -> list[float]:
    speeds = result["steps_per_second"]
    return [ours / one for ours, one in zip(speeds[name], speeds[beside], strict=True)]


def report(results: list[dict]) -> str:
    heads = ["problem", "density", "contender", "mini-batches/s", "beside one thread"]
    heads += ["beside Hogwild!", "CPU, ms/mini-batch", "staleness", "held-out loss"]
    rows = []
    for result in results:
        for name, speeds in result["steps_per_second"].items():
            paper, _, number = name.partition(", ")
            beside = paper in LOCKS.values() and paper != LOCKS["none"]
            rows.append(
                [
                    result["problem"],
                    f"{100 * result['density']:g} %",
                    name if not number else f"{paper}, {number} threads",
                    f"{statistics.median(speeds):,.0f}",
                    runs.spread(ratios(result, name, ONE), 2),
                    runs.spread(ratios(result, name, f"Hogwild!, {number}"), 2) if beside else "",
                    runs.spread(result["cpu_ms"][name], 2),
                    f"{result['staleness'][name]:.2f}" if name in result["staleness"] else "",
                    f"{result['loss'][name]:.4f}",
                ]
            )
    return runs.table(heads, rows)


def plot(results: list[dict], path: str) -> None:
    pyplot = setting.pyplot()
    problems = list(dict.fromkeys(r["problem"] for r in results))
    figure, axes = pyplot.subplots(2, len(problems), figsize=(5 * len(problems), 7), squeeze=False)
    for column, problem in enumerate(problems):
        here = [r for r in results if r["problem"] == problem]
        densities = [100 * r["density"] for r in here]
        styles = {"": "-"}  # by the number of threads; one thread's line is grey
        for name in here[0]["steps_per_second"]:
            if name == SKLEARN:
                continue
            paper, _, number = name.partition(", ")
            color = {"Hogwild!": "C0", "AIG": "C1", "round-robin": "C2"}.get(paper, "0.5")
            style = styles.setdefault(number, ["-", "--", ":", "-."][(len(styles) - 1) % 4])
            of = {"color": color, "ls": style, "marker": "o", "ms": 3}
            label = f"{paper}, {number} threads" if number else name
            found = [statistics.median(ratios(r, name, ONE)) for r in here]
            axes[0][column].plot(densities, found, label=label, **of)
            spent = [statistics.median(r["cpu_ms"][name]) for r in here]
            axes[1][column].plot(densities, spent, label=label, **of)
        for row, what in enumerate(["speed beside one thread", "CPU, ms a mini-batch"]):
            axes[row][column].set(xscale="log", xlabel="density, %", ylabel=what)
        axes[0][column].set_title(problem)
        axes[1][column].set_yscale("log")
        axes[0][column].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=80)


def main() -> None:
    parser = setting.arguments(__doc__)
    parser.add_argument("--threads", default="2", help="by commas")
    parser.add_argument("--problems", default="logistic,completion")
    parser.add_argument("--steps", type=int, default=150, help="mini-batches timed at once")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="one density, few steps, two threads")
    options = parser.parse_args()
    threads = [2] if options.quick else setting.numbers(options.threads)
    steps, repetitions = (40, 2) if options.quick else (options.steps, options.repetitions)
    results = []
    for problem in options.problems.split(","):
        densities = DENSITIES[problem]
        for density in densities[1:2] if options.quick else densities:
            results.append(measure(problem, density, threads, steps, repetitions))
            print(report(results[-1:]), flush=True)
            runs.write_json(options.json, {**runs.provenance(), "results": results})
    setting.finish(options, results, report, plot)


if __name__ == "__main__":
    main()
