"""What the parts of a replica cost: processor time of a mini-batch and peak memory, by process.

    python benchmarks/model_parallel.py
    python -m tf_dsgd.launch --workers 1 --ps 2 benchmarks/model_parallel.py
    python -m tf_dsgd.launch --workers 2 --ps 2 --tasks_per_worker 2 benchmarks/model_parallel.py

Alone it has a replica in one part beside a replica without parts, in turn, in one process. Under
the launcher the replica has as many parts as a worker has tasks. Dense layers of equal width, SGD.
"""

import argparse
import json
import os
import time

import keras
import memory
import numpy as np
import processor_time
import psutil

import tf_dsgd


def trained(cluster, options, value):
    """A strategy and a function that trains for an epoch."""
    strategy = tf_dsgd.DownpourStrategy(cluster, model_parallel=value)
    hidden = [
        keras.layers.Dense(options.width, "tanh", name=f"l{i}") for i in range(options.layers)
    ]
    with strategy.scope():
        model = keras.Sequential([keras.Input((options.width,)), *hidden])
        model.compile("sgd", "mse")
    examples = options.batch * options.steps
    x = np.random.default_rng(0).standard_normal((examples, options.width)).astype("float32")
    fit = {"batch_size": options.batch, "verbose": 0, "shuffle": False}
    return strategy, lambda: model.fit(x, x, **fit)


def in_turn(options):
    """Prints the processor's milliseconds of a mini-batch, without parts and with one."""
    runs = {}
    for name, parts in (("no parts", None), ("one part", {".*": 0})):
        value = None if parts is None else tf_dsgd.ModelParallel(parts)
        _, runs[name] = trained(tf_dsgd.LocalCluster(1), options, value)
        runs[name]()  # traced
    took = {name: [] for name in runs}
    for _ in range(options.repetitions):
        for name, run in runs.items():
            before = time.process_time()
            run()
            took[name].append((time.process_time() - before) / options.steps * 1e3)
    for name, found in took.items():
        each = ", ".join(f"{value:.1f}" for value in found)
        print(f"{name}: median {np.median(found):.1f} CPU ms a mini-batch ({each})")


def tasks():
    """Task -> process id, of this script's launcher's."""
    found = {"chief": os.getpid()}
    for process in psutil.Process(os.getppid()).children():
        task = json.loads(process.environ()["TF_CONFIG"])["task"]
        if task["type"] != "chief":
            found[f"{task['type']} {task['index']}"] = process.pid
    return dict(sorted(found.items()))


def on_tasks(options):
    """Prints, of each task, processor time of a mini-batch and memory."""
    cluster = tf_dsgd.TFCluster()
    parts = cluster.devices_per_worker
    placed = {f"l{i}": i * parts // options.layers for i in range(options.layers)}
    value = tf_dsgd.ModelParallel(placed, microbatches=options.microbatches)
    first = {name: memory.peak_of(pid) for name, pid in tasks().items()}
    _, run = trained(cluster, options, value if parts > 1 else None)
    run()  # traced
    found = []
    for _ in range(options.repetitions):
        before = {name: processor_time.seconds_of(pid) for name, pid in tasks().items()}
        began = time.perf_counter()
        run()
        seconds = time.perf_counter() - began
        after = {name: processor_time.seconds_of(pid) for name, pid in tasks().items()}
        spent = {name: (after[name] - before[name]) / options.steps * 1e3 for name in after}
        found.append((seconds / options.steps * 1e3, spent))
    size = 4 * options.layers * (options.width**2 + options.width)
    print(f"{size / 1e6:.0f} MB of weights in {parts} part(s), {options.microbatches} piece(s)")
    print(f"a mini-batch: {', '.join(f'{each:.0f}' for each, _ in found)} ms")
    for name, pid in tasks().items():
        each = ", ".join(f"{spent[name]:.1f}" for _, spent in found)
        peak = memory.peak_of(pid)
        print(
            f"{name}: {each} CPU ms a mini-batch; peak {peak / 1e6:.0f} MB, of which "
            f"{(peak - first[name]) / 1e6:.0f} since it began"
        )


def main():
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    for name, value in (("width", 1024), ("layers", 8), ("batch", 512), ("steps", 10)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--microbatches", type=int, default=1)
    parser.add_argument("--repetitions", type=int, default=5)
    options = parser.parse_args()
    if os.environ.get("TF_CONFIG"):
        on_tasks(options)
    else:
        in_turn(options)


if __name__ == "__main__":
    main()
