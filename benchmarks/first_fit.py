"""Seconds until the first mini-batch of a first `fit`, and until that `fit` is over.

    python benchmarks/first_fit.py
    python benchmarks/first_fit.py --contenders plain,downpour --layers 20

Each run is a process of its own, whose imports and model are made before the clock starts; what is
timed is Keras's and our tracing, TensorFlow's preparation, and 40 mini-batches of 4 examples. The
model has `--layers` dense layers of 8 units, two variables each, and Adam. Contenders run in turn,
and ratios are to plain Keras in the same repetition, of seconds and of processor seconds.

`plain` is Keras without a strategy, the others are two threads by default settings, `averaging`
with `average_every=20`.
"""

import argparse
import json
import sys
import time

import runs

STEPS, BATCH, UNITS = 40, 4, 8
TIMEOUT_SECONDS = 900.0
CONTENDERS = ("plain", "downpour", "softsync", "averaging", "elastic")


def contender(kind: str, layers: int) -> dict:
    """Seconds, and processor seconds, to the first mini-batch's end and to that of `fit`."""
    import contextlib

    import keras
    import numpy as np

    import tf_dsgd

    makers = {
        "downpour": lambda cluster: tf_dsgd.DownpourStrategy(cluster),
        "softsync": lambda cluster: tf_dsgd.SoftsyncStrategy(cluster, gradients_per_update=2),
        "averaging": lambda cluster: tf_dsgd.PeriodicAveragingStrategy(cluster, average_every=20),
        "elastic": lambda cluster: tf_dsgd.ElasticAveragingStrategy(cluster, average_every=20),
    }
    strategy = None if kind == "plain" else makers[kind](tf_dsgd.LocalCluster(2))
    with contextlib.nullcontext() if strategy is None else strategy.scope():
        dense = [keras.layers.Dense(UNITS, "relu") for _ in range(layers)]
        model = keras.Sequential([keras.Input((UNITS,)), *dense])
        model.compile(keras.optimizers.Adam(), "mse", metrics=["mae"])
    x = np.random.default_rng(0).normal(size=(STEPS * BATCH, UNITS)).astype("float32")

    class First(keras.callbacks.Callback):
        at = None

        def on_train_batch_end(self, batch: int, logs: dict | None = None) -> None:
            self.at = self.at or (time.perf_counter(), time.process_time())

    first = First()
    begun = time.perf_counter(), time.process_time()
    model.fit(x, x, batch_size=BATCH, verbose=0, callbacks=[first])
    ended = time.perf_counter(), time.process_time()
    names = ("seconds", "processor seconds")
    return {
        "kind": kind,
        "variables": len(model.weights),
        "first batch": {n: a - b for n, a, b in zip(names, first.at, begun, strict=True)},
        "fit": {n: a - b for n, a, b in zip(names, ended, begun, strict=True)},
    }


def main() -> None:
    if sys.argv[1:] and sys.argv[1] in CONTENDERS:
        print(json.dumps(contender(sys.argv[1], int(sys.argv[2]))), flush=True)
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
    rows = []
    for kind in kinds:
        row = [kind]
        for until in ("first batch", "fit"):
            for unit in ("seconds", "processor seconds"):
                values = [run[until][unit] for run in found[kind]]
                plain = [run[until][unit] for run in found.get("plain", [])]
                row.append(runs.spread(values, 1))
                ratios = [a / b for a, b in zip(values, plain, strict=False)]
                row.append(runs.spread(ratios, 2) if ratios else "")
        rows.append(row)
    print(runs.heading(runs.provenance()) + "\n")
    heads = ["", "s to the first batch", "in plain's", "of processors", "in plain's"]
    heads += ["s of the first fit", "in plain's", "of processors", "in plain's"]
    print(runs.table(heads, rows))


if __name__ == "__main__":
    main()
