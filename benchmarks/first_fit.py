"""Seconds until the first mini-batch of a first `fit`, and until that `fit` is over.

    python benchmarks/first_fit.py
    python benchmarks/first_fit.py --contenders plain,downpour --layers 20

Each run is a process of its own, whose imports and model are made before the clock starts; what is
timed is Keras's and our tracing, TensorFlow's preparation, and 40 mini-batches of 4 examples. The
model has `--layers` dense layers of 8 units, two variables each, and Adam. Contenders run in turn,
and ratios are to plain Keras in the same repetition, of seconds and of processor seconds.

`plain` is Keras without a strategy, the others are two threads by default settings, `averaging`
with `average_every=20`. `loop` is written by hand, with nothing of this package: two threads with a
Keras model each, a function of twenty of Keras's steps, after which a worker goes halfway to what
both share, and that to it, in weights and in what the optimizer keeps. So it costs what averaging
costs, and waits for nobody. Its first mini-batch is the first round of either.
"""

import argparse
import json
import sys
import threading
import time

import runs

STEPS, BATCH, UNITS = 40, 4, 8
TIMEOUT_SECONDS = 900.0
LOOP = "loop"
CONTENDERS = ("plain", "downpour", "softsync", "averaging", "elastic", LOOP)
EVERY = 20
"""Steps from average to average."""
NAMES = ("seconds", "processor seconds")


def now() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


def since(begun: tuple[float, float], ended: tuple[float, float]) -> dict[str, float]:
    return {n: a - b for n, a, b in zip(NAMES, ended, begun, strict=True)}


def build(layers: int):
    import keras

    dense = [keras.layers.Dense(UNITS, "relu") for _ in range(layers)]
    model = keras.Sequential([keras.Input((UNITS,)), *dense])
    model.compile(keras.optimizers.Adam(), "mse", metrics=["mae"])
    return model


def examples():
    import numpy as np

    return np.random.default_rng(0).normal(size=(STEPS * BATCH, UNITS)).astype("float32")


def loop(layers: int) -> dict:
    """The same by hand: averaging of two threads."""
    import tensorflow as tf

    models, x = [build(layers) for _ in range(2)], examples()
    begun = now()
    for model in models:
        model.optimizer.build(model.trainable_variables)
    # Of the optimizer's the first two are its counter and its rate, which are not averaged.
    averaged = [
        [v.value for v in (*model.trainable_variables, *model.optimizer.variables[2:])]
        for model in models
    ]
    shared = [tf.Variable(value.read_value()) for value in averaged[0]]
    lock = tf.CriticalSection()

    def round_of(model, mine):
        def average() -> tf.Tensor:
            for value, common in zip(mine, shared, strict=True):
                common.assign_add(0.5 * (value - common), read_value=False)
                value.assign(common.read_value(), read_value=False)
            return tf.constant(0)

        @tf.function(autograph=False)
        def steps(x: tf.Tensor) -> None:
            def step(k: tf.Tensor) -> tf.Tensor:
                part = x[k * BATCH : (k + 1) * BATCH]
                model.train_step((part, part))
                return k + 1

            done = tf.while_loop(lambda k: k < EVERY, step, [0], parallel_iterations=1)
            with tf.control_dependencies(done):
                lock.execute(average)

        return steps

    ends = []

    def work(m: int) -> None:
        steps = round_of(models[m], averaged[m])
        for first in range(m * EVERY * BATCH, len(x), 2 * EVERY * BATCH):
            steps(tf.constant(x[first : first + EVERY * BATCH]))
            ends.append(now())

    threads = [threading.Thread(target=work, args=(m,)) for m in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_SECONDS)
    if len(ends) != STEPS // EVERY:
        raise SystemExit(f"{len(ends)} of {STEPS // EVERY} rounds ended.")
    first, *_, last = sorted(ends)
    return {
        "kind": LOOP,
        "variables": len(models[0].weights),
        "first batch": since(begun, first),
        "fit": since(begun, last),
    }


def contender(kind: str, layers: int) -> dict:
    """Seconds, and processor seconds, to the first mini-batch's end and to that of `fit`."""
    import contextlib

    import keras

    import tf_dsgd

    makers = {
        "downpour": lambda cluster: tf_dsgd.DownpourStrategy(cluster),
        "softsync": lambda cluster: tf_dsgd.SoftsyncStrategy(cluster, gradients_per_update=2),
        "averaging": lambda cluster: tf_dsgd.PeriodicAveragingStrategy(
            cluster, average_every=EVERY
        ),
        "elastic": lambda cluster: tf_dsgd.ElasticAveragingStrategy(cluster, average_every=EVERY),
    }
    strategy = None if kind == "plain" else makers[kind](tf_dsgd.LocalCluster(2))
    with contextlib.nullcontext() if strategy is None else strategy.scope():
        model = build(layers)
    x = examples()

    class First(keras.callbacks.Callback):
        at = None

        def on_train_batch_end(self, batch: int, logs: dict | None = None) -> None:
            self.at = self.at or now()

    first = First()
    begun = now()
    model.fit(x, x, batch_size=BATCH, verbose=0, callbacks=[first])
    ended = now()
    return {
        "kind": kind,
        "variables": len(model.weights),
        "first batch": since(begun, first.at),
        "fit": since(begun, ended),
    }


def table(found: dict[str, list[dict]]) -> str:
    """By contender; beside plain Keras where that was run."""
    rows = []
    for kind, outcomes in found.items():
        row = [kind]
        for until in ("first batch", "fit"):
            for unit in NAMES:
                values = [run[until][unit] for run in outcomes]
                plain = [run[until][unit] for run in found.get("plain", [])]
                row.append(runs.spread(values, 1))
                ratios = [a / b for a, b in zip(values, plain, strict=False)]
                row.append(runs.spread(ratios, 2) if ratios else "")
        rows.append(row)
    heads = ["", "s to the first batch", "in plain's", "of processors", "in plain's"]
    heads += ["s of the first fit", "in plain's", "of processors", "in plain's"]
    return runs.table(heads, rows)


def main() -> None:
    if sys.argv[1:] and sys.argv[1] in CONTENDERS:
        kind, layers = sys.argv[1], int(sys.argv[2])
        print(json.dumps(loop(layers) if kind == LOOP else contender(kind, layers)), flush=True)
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--contenders", default=",".join(CONTENDERS), help="with commas")
    parser.add_argument("--layers", type=int, default=80)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--json", help="where to write all single runs")
    options = parser.parse_args()
    kinds = options.contenders.split(",")
    if unknown := sorted(set(kinds) - set(CONTENDERS)):
        parser.error(f"--contenders must be of {', '.join(CONTENDERS)}. Received: {unknown}.")
    found: dict[str, list[dict]] = {kind: [] for kind in kinds}
    for _ in range(options.repetitions):
        for kind in kinds:
            command = [sys.executable, __file__, kind, str(options.layers)]
            found[kind].append(runs.run_process(command, TIMEOUT_SECONDS))
            runs.write_json(options.json, {**runs.provenance(), "results": found})
    print(f"{runs.heading(runs.provenance())}\n\n{table(found)}")


if __name__ == "__main__":
    main()
