"""What the parts of a replica cost, and what they gain: processor time, memory, seconds.

    python benchmarks/model_parallel.py
    python -m tf_dsgd.launch --workers 1 --ps 2 benchmarks/model_parallel.py
    python -m tf_dsgd.launch --workers 2 --ps 2 --tasks_per_worker 2 benchmarks/model_parallel.py

Alone it has a replica in one part beside a replica without parts, in turn, in one process. Under
the launcher the replica has as many parts as a worker has tasks. Dense layers of equal width, SGD.

    python benchmarks/model_parallel.py --pieces 1,2,4,8 --batch 2048 --steps 4
    python -m tf_dsgd.launch --workers 2 --ps 1 --tasks_per_worker 2 --threads_per_worker 1
        benchmarks/model_parallel.py --pieces 1,2,4,8 --batch 2048 --steps 4

Seconds of a mini-batch that flows in so many pieces through two parts, on two devices of a process
and on two processes, beside one device with one thread, in turn; and what share that is of the
ideal, 2 m / (m + 1) for m pieces. In one process one device has one thread for operations, and two
share two, so that pieces of one part may run side by side, too; of processes each worker task has a
core of its own. For a machine that is at rest.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import keras
import memory
import numpy as np
import processor_time
import psutil
import runs
import tensorflow as tf

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
    """Prints, and gives, the processor's milliseconds of a mini-batch without parts, and one."""
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
    return {"kind": "in turn", "cpu_ms": took}


def tasks():
    """Task -> process id, of this script's launcher's."""
    found = {"chief": os.getpid()}
    for process in psutil.Process(os.getppid()).children():
        task = json.loads(process.environ()["TF_CONFIG"])["task"]
        if task["type"] != "chief":
            found[f"{task['type']} {task['index']}"] = process.pid
    return dict(sorted(found.items()))


def on_tasks(options):
    """Prints, and gives, of each task, processor time of a mini-batch and memory."""
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
    peaks = {}
    for name, pid in tasks().items():
        each = ", ".join(f"{spent[name]:.1f}" for _, spent in found)
        peak = memory.peak_of(pid)
        print(
            f"{name}: {each} CPU ms a mini-batch; peak {peak / 1e6:.0f} MB, of which "
            f"{(peak - first[name]) / 1e6:.0f} since it began"
        )
        peaks[name] = (peak - first[name]) / 1e6
    return {
        "kind": "on tasks",
        "parts": parts,
        "weights_mb": size / 1e6,
        "cpu_ms": {name: [spent[name] for _, spent in found] for name in tasks()},
        "peak_mb": peaks,
    }


# -- pieces ---------------------------------------------------------------------------------------

ONE = "one device"
LAUNCH = "python -m tf_dsgd.launch"


def laid(options, pieces):
    """Half of the layers on each of two parts."""
    placed = {f"l{i}": 2 * i // options.layers for i in range(options.layers)}
    return tf_dsgd.ModelParallel(placed, microbatches=pieces)


def serve(options):
    """Trains for an epoch, with what a line of the input names, and prints what that took.

    In a process of its own, since threads are the whole process's.
    """
    devices = 1 if options.serve == ONE else 2
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(devices)
    names = [ONE] if options.serve == ONE else options.pieces
    runs = {}
    for name in names:
        cluster = tf_dsgd.LocalCluster(1, devices_per_worker=devices)
        value = None if name == ONE else laid(options, name)
        _, runs[str(name)] = trained(cluster, options, value)
        runs[str(name)]()  # traced
    print("ready", flush=True)
    for line in sys.stdin:
        began, before = time.perf_counter(), time.process_time()
        runs[line.strip()]()
        print(time.perf_counter() - began, time.process_time() - before, flush=True)


class Child:
    """A process that serves."""

    def __init__(self, which):
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--serve", which, *sys.argv[1:]],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        if self._process.stdout.readline() != "ready\n":
            raise RuntimeError(f"{which} ended with {self._process.wait()}.")

    def run(self, name):
        """(seconds, processor's seconds) of an epoch."""
        self._process.stdin.write(f"{name}\n")
        self._process.stdin.flush()
        return tuple(map(float, self._process.stdout.readline().split()))

    def end(self):
        """Ends it."""
        self._process.stdin.close()
        self._process.wait()


def on_devices(options):
    """Name -> a function that trains for an epoch; and what ends their processes."""
    one, two = Child(ONE), Child("two devices")
    runs = {ONE: lambda: one.run(ONE)}
    runs |= {m: lambda m=m: two.run(m) for m in options.pieces}
    return runs, lambda: (one.end(), two.end())


def on_processes(options):
    """The same; without parts a worker uses the first of its tasks alone."""
    pids = tasks().values()
    cores = sorted(os.sched_getaffinity(0))
    workers = [pid for name, pid in tasks().items() if name.startswith("worker")]
    for i, pid in enumerate(workers):
        for thread in os.listdir(f"/proc/{pid}/task"):  # what it starts later is where it is
            os.sched_setaffinity(int(thread), {cores[i % len(cores)]})

    def timed(run):
        before = sum(map(processor_time.seconds_of, pids))
        began = time.perf_counter()
        run()
        took = time.perf_counter() - began
        return took, sum(map(processor_time.seconds_of, pids)) - before

    cluster, runs = tf_dsgd.TFCluster(), {}
    for name in (ONE, *options.pieces):
        _, run = trained(cluster, options, None if name == ONE else laid(options, name))
        run()  # traced
        runs[name] = lambda run=run: timed(run)
    return runs, lambda: None


def in_pieces(options, runs, end):
    """Prints, and gives, what a mini-batch took, in turn, and how much faster that is."""
    took = {name: [] for name in runs}
    for _ in range(options.repetitions):
        for name, run in runs.items():
            took[name].append([1e3 * value / options.steps for value in run()])
    end()
    print(
        f"{options.layers} layers of {options.width}, mini-batches of {options.batch}, "
        f"{options.repetitions} repetitions in turn: medians (least to most)"
    )
    base = np.array(took[ONE])
    for name, found in took.items():
        wall, cpu = np.array(found).T
        line = f"{name if name == ONE else f'{name} pieces'}: {spread(wall, 1)} ms"
        if name != ONE:
            ratios = base[:, 0] / wall
            ideal = 2 * name / (name + 1)
            line += (
                f", {spread(ratios, 3)} times as fast, {spread(ratios / ideal, 3)} of the ideal "
                f"{ideal:.3f}"
            )
        print(f"{line}; {spread(cpu, 1)} CPU ms", flush=True)
    ms = {str(name): [wall for wall, _ in found] for name, found in took.items()}
    where = "two processes" if os.environ.get("TF_CONFIG") else "two devices of one process"
    return {"kind": "pieces", "where": where, "ms": ms}


def spread(values, digits):
    """The median, and the least and the most."""
    low, middle, high = np.min(values), np.median(values), np.max(values)
    return f"{middle:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def main():
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    for name, value in (("width", 1024), ("layers", 8), ("batch", 512), ("steps", 10)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--microbatches", type=int, default=1)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--pieces", type=lambda text: [int(part) for part in text.split(",")])
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--launched", default="", help="what the launcher was given, for --json")
    parser.add_argument("--json", type=Path, help="what was measured is added to this file")
    options = parser.parse_args()
    if options.serve:
        serve(options)
        return
    if options.pieces:
        where = on_processes if os.environ.get("TF_CONFIG") else on_devices
        found = in_pieces(options, *where(options))
    else:
        found = on_tasks(options) if os.environ.get("TF_CONFIG") else in_turn(options)
    if options.json:
        sizes = ("width", "layers", "batch", "steps", "microbatches", "repetitions", "pieces")
        given = {name: getattr(options, name) for name in sizes}
        origin = runs.provenance()
        if options.launched:
            whole = origin["command"].replace("python ", f"{LAUNCH} {options.launched} ", 1)
            origin["command"] = re.sub(r" '--launched=[^']*'", "", whole)
        known = json.loads(options.json.read_text()) if options.json.exists() else {"records": []}
        known["records"].append({**origin, "options": given, **found})
        options.json.write_text(json.dumps(known, indent=1) + "\n")


if __name__ == "__main__":
    main()
