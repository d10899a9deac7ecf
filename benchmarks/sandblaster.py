"""Seconds to a loss of the optimum + 1e-3 on logistic regression: batch methods side by side.

    python benchmarks/sandblaster.py --repetitions 3

SciPy's L-BFGS-B on NumPy, `SandblasterStrategy` on threads, PyTorch's LBFGS and TensorFlow
Probability's where they are installed, and Downpour with Adagrad. Each run is a process of its own.
Seconds count from where data and model are ready; what tracing and the first call take is in them
for the first column, and not for the second, for which the run is made twice.

`--processes` prints another table: what a second worker process brings to passes that keep a
processor busy; `--sizes` the chief's processor time for an iteration by the number of parameters.
`--stragglers`: what backup tasks bring, in virtual seconds.
"""

import argparse
import importlib.util
import json
import math
import os
import re
import sys
import time
from collections.abc import Mapping, Sequence

import numpy as np
import processor_time
import runs

NEAR = 1e-3
SCIPY = "SciPy"
HIGHER = 1e300
"""For the loss of a pass that is not an iteration's last one: it counts as a pass."""
DECAY = 1e-4


def data(problem: str, examples: int, features: int) -> tuple[np.ndarray, np.ndarray, int]:
    """(x, labels, number of classes)."""
    if problem == "digits":
        from sklearn.datasets import load_digits

        x, y = load_digits(return_X_y=True)
        return (x / 16.0).astype("float32"), y.astype("int32"), 10
    random = np.random.default_rng(0)
    x = random.standard_normal((examples, features), np.float32)
    x *= np.geomspace(1.0, 0.03, features, dtype=np.float32)  # not all of one scale
    logits = x @ random.standard_normal(features) * 3.0
    return x, (logits + random.logistic(size=examples) > 0).astype("int32"), 2


def loss_and_gradient(x: np.ndarray, y: np.ndarray, classes: int):
    """Mean cross-entropy of a softmax, with decay of its kernel, for SciPy: flat, in double."""
    examples, features = x.shape

    def function(flat: np.ndarray) -> tuple[float, np.ndarray]:
        kernel = flat[: features * classes].reshape(features, classes).astype(x.dtype)
        logits = x @ kernel + flat[features * classes :].astype(x.dtype)
        logits -= logits.max(1, keepdims=True)
        shares = np.exp(logits)
        total = shares.sum(1, keepdims=True)
        picked = logits[np.arange(examples), y] - np.log(total[:, 0])
        loss = -picked.mean(dtype=np.float64) + DECAY * float(np.square(kernel).sum())
        shares /= total
        shares[np.arange(examples), y] -= 1
        of_kernel = x.T @ shares / examples + 2 * DECAY * kernel
        gradient = np.concatenate([of_kernel.ravel(), shares.mean(0)])
        return float(loss), gradient.astype(np.float64)

    return function


def by_scipy(spec: dict, found: list) -> None:
    import threadpoolctl
    from scipy import optimize

    x, y, classes = data(spec["problem"], spec["examples"], spec["features"])
    function = loss_and_gradient(x, y, classes)
    start = np.zeros((x.shape[1] + 1) * classes)
    began = time.perf_counter()

    def evaluate(flat: np.ndarray) -> tuple[float, np.ndarray]:
        result = function(flat)
        found.append((time.perf_counter() - began, result[0]))
        return result

    options = {"maxiter": spec["iterations"], "ftol": 0.0, "gtol": 1e-7}
    # OpenBLAS's threads wait for one another in a loop: with two, small problems take many times
    # what they take with one.
    with threadpoolctl.threadpool_limits(spec["threads"]):
        optimize.minimize(evaluate, start, jac=True, method="L-BFGS-B", options=options)


def by_keras(spec: dict, found: list) -> None:
    import keras

    import tf_dsgd

    x, y, classes = data(spec["problem"], spec["examples"], spec["features"])
    cluster = tf_dsgd.LocalCluster(spec["workers"])
    batch = spec["kind"] == "sandblaster"
    strategy = tf_dsgd.SandblasterStrategy(cluster) if batch else None
    if strategy is None:
        strategy = tf_dsgd.DownpourStrategy(cluster, push_every=4, fetch_every=4)
    with strategy.scope():
        decay = keras.regularizers.L2(DECAY)
        dense = keras.layers.Dense(classes, kernel_initializer="zeros", kernel_regularizer=decay)
        model = keras.Sequential([keras.Input((x.shape[1],)), dense])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        optimizer = {} if batch else {"optimizer": keras.optimizers.Adagrad(spec["rate"])}
        model.compile(loss=loss, **optimizer)

    def note(epoch: int, logs: dict) -> None:
        nonlocal began
        if batch:
            value, passes = strategy.last_iteration().loss, strategy.last_iteration().evaluations
            found.extend([(time.perf_counter() - began, HIGHER)] * (passes - 1))
        else:  # metrics of an epoch are of weights that changed; the time of this does not count
            before = time.perf_counter()
            value = model.evaluate(x, y, batch_size=4096, verbose=0)
            began += time.perf_counter() - before
        found.append((time.perf_counter() - began, value))
        if value <= spec["target"]:
            model.stop_training = True

    callbacks = [keras.callbacks.LambdaCallback(on_epoch_end=note)]
    options = {"batch_size": spec["batch_size"], "verbose": 0, "callbacks": callbacks}
    for _ in range(2):  # the second time nothing is traced
        model.set_weights([np.zeros_like(w) for w in model.get_weights()])
        found.append((0.0, np.inf))
        began = time.perf_counter()
        model.fit(x, y, epochs=spec["iterations"], **options)


def by_torch(spec: dict, found: list) -> None:
    import torch

    x, y, classes = data(spec["problem"], spec["examples"], spec["features"])
    x, y = torch.from_numpy(x), torch.from_numpy(y).long()
    layer = torch.nn.Linear(x.shape[1], classes)
    with torch.no_grad():
        layer.weight.zero_()
        layer.bias.zero_()
    method = torch.optim.LBFGS(
        layer.parameters(),
        max_iter=spec["iterations"],
        history_size=10,
        line_search_fn="strong_wolfe",
        tolerance_grad=1e-7,
        tolerance_change=0.0,
    )
    began = time.perf_counter()

    def closure():
        method.zero_grad()
        loss = torch.nn.functional.cross_entropy(layer(x), y) + DECAY * layer.weight.square().sum()
        loss.backward()
        found.append((time.perf_counter() - began, float(loss)))
        return loss

    method.step(closure)


def by_probability(spec: dict, found: list) -> None:
    import tensorflow as tf
    import tensorflow_probability as tfp

    x, y, classes = data(spec["problem"], spec["examples"], spec["features"])
    features = x.shape[1]
    x = tf.constant(x)

    @tf.function
    def value_and_gradient(flat):
        def loss(flat):
            kernel = tf.reshape(flat[: features * classes], [features, classes])
            logits = x @ kernel + flat[features * classes :]
            cross = tf.nn.sparse_softmax_cross_entropy_with_logits(y, logits)
            return tf.reduce_mean(cross) + DECAY * tf.reduce_sum(kernel**2)

        return tfp.math.value_and_gradient(loss, flat)

    began = time.perf_counter()

    def evaluate(flat):
        value, gradient = value_and_gradient(flat)
        found.append((time.perf_counter() - began, float(value)))
        return value, gradient

    start = tf.zeros([(features + 1) * classes])
    tfp.optimizer.lbfgs_minimize(evaluate, start, max_iterations=spec["iterations"])


def by_processes(spec: dict) -> dict:
    """Run by the launcher: seconds of a pass, the chief's processor seconds of an iteration."""
    import keras

    import tf_dsgd

    layers = keras.layers
    if spec.get("hidden"):
        shape = (784,)
        hidden = [layers.Dense(spec["hidden"], "relu") for _ in range(2)]
    else:
        shape = (32, 32, 3)
        hidden = [layers.Conv2D(32, 3, activation="relu"), layers.Conv2D(64, 3)]
        hidden += [layers.Activation("relu"), layers.GlobalAveragePooling2D()]
    random = np.random.default_rng(0)
    x = random.standard_normal((spec["examples"], *shape), np.float32)
    y = random.integers(0, 10, spec["examples"])
    strategy = tf_dsgd.SandblasterStrategy(tf_dsgd.TFCluster())
    with strategy.scope():
        model = keras.Sequential([keras.Input(shape), *hidden, layers.Dense(10)])
        model.compile(loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    passes = []
    count = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: passes.append(strategy.last_iteration().evaluations)
    )
    options = {"batch_size": spec["batch_size"], "verbose": 0, "callbacks": [count]}
    model.fit(x, y, epochs=2, **options)  # traces
    del passes[:]
    pids = processor_time.of_cluster()
    began, before = time.perf_counter(), processor_time.read(pids)
    model.fit(x, y, epochs=spec["iterations"], **options)
    seconds = time.perf_counter() - began
    spent = processor_time.spent(before, processor_time.read(pids))
    number = sum(passes)
    return {
        "parameters": model.count_params(),
        "pass": seconds / number,
        "chief": spent[processor_time.CHIEF] / len(passes),
        **{f"{role} of a pass": value / number for role, value in spent.items()},
    }


KINDS = {
    "scipy": by_scipy,
    "sandblaster": by_keras,
    "downpour": by_keras,
    "torch": by_torch,
    "probability": by_probability,
}


def run(spec: dict) -> dict:
    """Seconds to the target, with the first call and without; passes until then."""
    found: list[tuple[float, float]] = []
    KINDS[spec["kind"]](spec, found)
    parts: list[list[tuple[float, float]]] = [[]]
    for seconds, loss in found:
        if loss == np.inf:
            parts.append([])
        else:
            parts[-1].append((seconds, loss))
    times = [next((s for s, loss in p if loss <= spec["target"]), np.inf) for p in parts if p]
    counts = [sum(loss > spec["target"] for _, loss in p) + 1 for p in parts if p]
    return {
        "seconds": times[0],
        "again": times[-1],
        "rounds": counts[-1],
        "best": min(loss for part in parts for _, loss in part),
    }


def stragglers() -> str:
    """Virtual seconds of an evaluation where one of four workers is slower, by backup tasks or not.

    Sixty portions, each a second of the other workers.
    """
    import keras

    import tf_dsgd

    random = np.random.default_rng(1)
    x = random.standard_normal((240, 4)).astype("float32")
    y = np.sin(x.sum(1, keepdims=True))
    rows = []
    for slower in (10.0, 100.0):
        seconds = []
        for late in (None, 0.5):
            cluster = tf_dsgd.SimulatedCluster(
                4,
                compute_seconds=[1.0, 1.0, 1.0, slower],
                network_seconds=0.1,
                late_after_seconds=late,
            )
            strategy = tf_dsgd.SandblasterStrategy(cluster)
            with strategy.scope():
                model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
                model.compile(loss="mse")
            model.fit(x, y, batch_size=4, epochs=3, verbose=0)
            seconds.append(strategy.engine.clock() / (strategy.steps / 60))
        rows.append([f"{slower:g} times", *(f"{each:.1f}" for each in seconds)])
    return runs.table(["one of four is slower", "without", "with backup tasks"], rows)


def launched(workers: int, ps: int, **spec) -> dict:
    """A run on processes; each worker computes with one thread."""
    size = ("--workers", str(workers), "--ps", str(ps), "--threads_per_worker", "1")
    program = [str(runs.HERE / "sandblaster.py"), json.dumps({"kind": "processes", **spec})]
    return runs.run_process([sys.executable, "-m", "tf_dsgd.launch", *size, *program], 1800)


def processes(repetitions: int, only: str) -> dict[str, list[dict]]:
    """Passes by one worker process and by two, in turn."""
    models = {
        "MLP 784-1024-1024-10": {"examples": 8192, "hidden": 1024, "batch_size": 512},
        "CNN on 32 x 32 x 3": {"examples": 1024, "batch_size": 32},
    }
    results: dict[str, list[dict]] = {}
    for name, spec in runs.chosen(models, only).items():
        for _ in range(repetitions):
            for workers in (1, 2):
                found = launched(workers, 1, iterations=5, **spec)
                results.setdefault(f"{name}, {workers}", []).append(found)
    return results


def passes_table(results: Mapping[str, Sequence[Mapping]]) -> str:
    """The second worker's gain."""
    rows = []
    for one, two in zip(*[iter(results)] * 2, strict=True):
        pairs = zip(results[one], results[two], strict=True)
        gain = runs.spread([a["pass"] / b["pass"] for a, b in pairs], 2)
        for name in (one, two):
            of = results[name]
            spent = [[each[f"{role} of a pass"] for each in of] for role in processor_time.ROLES]
            rows.append(
                [*name.rsplit(", ", 1), runs.spread([each["pass"] for each in of], 2)]
                + [runs.spread(each, 2) for each in spent]
                + [gain if name == two else ""]
            )
    heads = ["model", "workers", "seconds of a pass"]
    heads += [f"{role}, seconds of processor" for role in processor_time.ROLES]
    return runs.table([*heads, "times as fast"], rows)


def sizes(repetitions: int) -> dict[str, list[dict]]:
    """Iterations of models of several sizes."""
    spec = {"examples": 64, "batch_size": 16, "iterations": 20}
    return {
        str(hidden): [launched(1, 1, hidden=hidden, **spec) for _ in range(repetitions)]
        for hidden in (64, 256, 1024, 2048)
    }


def sizes_table(results: Mapping[str, Sequence[Mapping]]) -> str:
    """The chief's time by the number of parameters."""
    rows = [
        [f"{of[0]['parameters'] / 1e6:.2f}", runs.spread([1e3 * each["chief"] for each in of], 1)]
        for of in results.values()
    ]
    heads = ["million parameters", "processor ms of the chief an iteration"]
    return runs.table(heads, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--examples", type=int, default=100_000)
    parser.add_argument("--features", type=int, default=200)
    parser.add_argument("--iterations", type=int, default=300)
    parser.add_argument("--problems", default="synthetic,digits")
    parser.add_argument("--only", default="", help="contenders whose names have this")
    parser.add_argument("--stragglers", action="store_true", help="this table alone")
    parser.add_argument("--processes", action="store_true", help="this table alone")
    parser.add_argument("--sizes", action="store_true", help="this table alone")
    parser.add_argument("--json", help="where to write all single runs")
    options = parser.parse_args()
    record: dict = {**runs.provenance(), "groups": []}
    print(runs.heading(record), flush=True)
    if options.stragglers:
        print(stragglers())
    elif options.processes:
        record["results"] = processes(options.repetitions, options.only)
        print(passes_table(record["results"]))
    elif options.sizes:
        record["results"] = sizes(options.repetitions)
        print(sizes_table(record["results"]))
    else:
        for problem in options.problems.split(","):
            record["groups"].append(group(problem, options))
            runs.write_json(options.json, record)
        print("\n" + table(record["groups"]))
    if "results" in record:
        runs.write_json(options.json, record)


def group(problem: str, options: argparse.Namespace) -> dict:
    """One problem's runs."""
    size = {"problem": problem, "examples": options.examples, "features": options.features}
    size["iterations"] = options.iterations
    best = runs.run_contender(
        "sandblaster.py",
        {**size, "kind": "scipy", "threads": 1, "target": 0.0, "iterations": 3000},
    )["best"]
    size["target"] = best + NEAR
    portion = 8192 if problem == "synthetic" else 512
    ours = {**size, "batch_size": portion}
    specs = {
        **{f"{SCIPY}, {n} of BLAS": {**size, "kind": "scipy", "threads": n} for n in (1, 2)},
        "Sandblaster, 1 thread": {**ours, "kind": "sandblaster", "workers": 1},
        "Sandblaster, 2 threads": {**ours, "kind": "sandblaster", "workers": 2},
        "Downpour, Adagrad, 2 threads": {
            **{**ours, "kind": "downpour", "workers": 2, "rate": 0.5, "batch_size": 256}
        },
    }
    for module, kind in (("torch", "torch"), ("tensorflow_probability", "probability")):
        if importlib.util.find_spec(module) is not None:
            specs[module] = {**size, "kind": kind}
    specs = {n: s for n, s in specs.items() if SCIPY in n or re.search(options.only, n)}
    results = runs.interleaved("sandblaster.py", specs, options.repetitions)
    names = {"synthetic": f"logistic regression, {options.examples:,} x {options.features}"}
    title = names.get(problem, "digits, 1,797 x 64")
    return {"problem": problem, "title": title, "optimum": best, "results": results}


def table(groups: Sequence[Mapping]) -> str:
    """Seconds of each contender, a problem after the other."""
    rows = []
    for each in groups:
        results = each["results"]
        faster = scipy_at_its_best(results)
        for name, outcomes in results.items():
            cells = ["not reached", "", "", ""]
            if all(math.isfinite(outcome["again"]) for outcome in outcomes):
                cells = [
                    runs.spread([outcome[of] for outcome in outcomes], digits)
                    for of, digits in (("seconds", 2), ("again", 2), ("rounds", 0))
                ]
                cells.append(runs.spread(runs.ratios(results, name, faster, "again"), 2))
            rows.append([f"{each['title']}, optimum {each['optimum']:.6f}", name, *cells])
    heads = ["problem", "", "seconds", "seconds, warm", "passes or epochs"]
    return runs.table([*heads, "warm, beside SciPy's faster"], rows)


def scipy_at_its_best(results: Mapping[str, Sequence[dict]]) -> str:
    """Whose second run is the shorter."""
    names = [name for name in results if SCIPY in name]
    return min(names, key=lambda name: runs.median(results[name], "again"))


if __name__ == "__main__":
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    if len(sys.argv) == 2 and sys.argv[1].startswith("{"):
        spec = json.loads(sys.argv[1])
        print(json.dumps(by_processes(spec) if spec["kind"] == "processes" else run(spec)))
    else:
        main()
