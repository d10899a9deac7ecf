"""What `jit_compile=True` brings: plain Keras and Downpour on two threads, with it and without.

    python benchmarks/jit_compile.py --repetitions 3

Each run is a process of its own. What XLA takes to compile is not in the figures: an epoch comes
before them.
"""

import argparse
import contextlib
import json
import os
import sys
import time

import keras
import numpy as np
import runs

import tf_dsgd

BATCH, PERIOD = 64, 20


def mlp() -> keras.Model:
    widths = [keras.layers.Dense(512, "relu"), keras.layers.Dense(512, "relu")]
    return keras.Sequential([keras.Input((28, 28, 1)), keras.layers.Flatten(), *widths, last()])


def cnn() -> keras.Model:
    stack = []
    for filters in (8, 16):
        stack += [
            keras.layers.Conv2D(filters, 3, use_bias=False),
            keras.layers.BatchNormalization(),
            keras.layers.ReLU(),
            keras.layers.MaxPooling2D(),
        ]
    return keras.Sequential([keras.Input((28, 28, 1)), *stack, keras.layers.Flatten(), last()])


def last() -> keras.layers.Layer:
    return keras.layers.Dense(10)


MODELS = {"mlp": mlp, "cnn": cnn}


def strategy_of(kind: str) -> tf_dsgd.DownpourStrategy | None:
    """None is plain Keras."""
    if kind == "plain":
        return None
    cluster = tf_dsgd.LocalCluster(num_workers=2)
    return tf_dsgd.DownpourStrategy(cluster, push_every=PERIOD, fetch_every=PERIOD)


def run(spec: dict) -> dict:
    """One contender: mini-batches per second, and milliseconds of the processor for each."""
    strategy = strategy_of(spec["kind"])
    with contextlib.nullcontext() if strategy is None else strategy.scope():
        model = MODELS[spec["model"]]()
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.01), loss, jit_compile=spec["jit_compile"])
    random = np.random.default_rng(0)
    x = random.random((spec["examples"], 28, 28, 1), np.float32)
    y = random.integers(0, 10, spec["examples"])
    model.fit(x, y, batch_size=BATCH, verbose=0)  # traces, and compiles
    began, processor = time.perf_counter(), time.process_time()
    model.fit(x, y, batch_size=BATCH, epochs=spec["epochs"], verbose=0)
    model.get_weights()
    seconds, processor = time.perf_counter() - began, time.process_time() - processor
    steps = spec["epochs"] * (spec["examples"] // BATCH)
    return {"steps_per_second": steps / seconds, "cpu_ms": 1000 * processor / steps}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--examples", type=int, default=100 * BATCH)
    parser.add_argument("--epochs", type=int, default=5)
    options = parser.parse_args()
    size = {"examples": options.examples // BATCH * BATCH, "epochs": options.epochs}
    header = ["model", "", "mini-batches/s", "beside plain", "with XLA beside without", "CPU ms"]
    rows = []
    for model in MODELS:
        specs = {
            f"{kind}{', jit_compile' * jit_compile}": {
                **{"kind": kind, "model": model, "jit_compile": jit_compile},
                **size,
            }
            for kind in ("plain", "downpour")
            for jit_compile in (False, True)
        }
        results = runs.interleaved("jit_compile.py", specs, options.repetitions)
        for name in specs:
            without = name.removesuffix(", jit_compile")
            rows.append(
                [
                    model,
                    name,
                    runs.spread([each["steps_per_second"] for each in results[name]], 0),
                    runs.spread(runs.ratios(results, name, "plain"), 2),
                    runs.spread(runs.ratios(results, name, without), 2) if name != without else "",
                    runs.spread([each["cpu_ms"] for each in results[name]], 2),
                ]
            )
    print(runs.table(header, rows))


if __name__ == "__main__":
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    if len(sys.argv) == 2 and sys.argv[1].startswith("{"):
        print(json.dumps(run(json.loads(sys.argv[1]))))
    else:
        main()
