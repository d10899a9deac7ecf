"""Simulated updates per second: through `fit`, and in the study driver.

    python benchmarks/simulator_rate.py --json benchmarks/results/simulator_rate.json

Downpour with a push and a fetch at every mini-batch, on a 64-200-10 MLP, whose workers take
exponentially distributed times. All take turns in one process, whose processor time a mini-batch is
printed. The limit is the bare step of one process, without Keras and this package (`limits.py`),
which runs in each turn with the same environment.
"""

import argparse
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import limits
import numpy as np
import runs
from simulator_rate_table import FIT, FIT_10, STUDY, STUDY_XLA, table

import tf_dsgd
from tf_dsgd.simulation.study import Study, timetable


def cluster(workers: int) -> tf_dsgd.SimulatedCluster:
    times = tf_dsgd.Exponential(1.0)
    return tf_dsgd.SimulatedCluster(workers, compute_seconds=times, network_seconds=0.05, seed=0)


def network() -> keras.Model:
    layers = [keras.layers.Dense(200, "relu"), keras.layers.Dense(10)]
    return keras.Sequential([keras.Input((64,)), *layers])


def compiled(**options) -> keras.Model:
    model = network()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.01), loss, **options)
    return model


def through_fit(options, x, y, steps_per_execution: int):
    """A function that trains an epoch."""
    strategy = tf_dsgd.DownpourStrategy(cluster(options.workers))
    with strategy.scope():
        model = compiled(steps_per_execution=steps_per_execution)

    def epoch() -> int:
        before = strategy.updates
        model.fit(x, y, batch_size=options.batch_size, verbose=0)
        return strategy.updates - before

    return epoch


def in_driver(options, x, y, jit: bool):
    """A function that plays a schedule of as many mini-batches."""
    strategy = tf_dsgd.DownpourStrategy(cluster(options.workers))
    algorithm = strategy.algorithm
    study = Study(algorithm, options.workers, compiled, x, y, options.batch_size, jit_compile=jit)
    schedule = timetable(cluster(options.workers), algorithm.exchange, options.updates)

    def play() -> int:
        before = study.strategy.updates
        study.run(schedule)
        return study.strategy.updates - before

    return play


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=16)
    parser.add_argument("--batch_size", type=int, default=16)
    parser.add_argument("--updates", type=int, default=2000, help="of one epoch, or one schedule")
    parser.add_argument("--repetitions", type=int, default=5, help="after one that is not timed")
    parser.add_argument(
        "--limit_seconds", type=float, default=2.0, help="that the limit is measured"
    )
    parser.add_argument("--json", help="where to write every single figure")
    options = parser.parse_args()
    origin = runs.provenance(os.environ)
    print(runs.heading(origin))

    random = np.random.default_rng(0)
    examples = options.batch_size * options.updates
    x = random.standard_normal((examples, 64), dtype=np.float32)
    y = random.integers(0, 10, examples)
    contenders = {
        FIT: through_fit(options, x, y, 1),
        FIT_10: through_fit(options, x, y, 10),
        STUDY: in_driver(options, x, y, False),
        STUDY_XLA: in_driver(options, x, y, True),
    }
    bare = {"model": "small", "batch_size": options.batch_size, "seconds": options.limit_seconds}
    results: dict[str, list[dict]] = {name: [] for name in [*contenders, limits.ONE]}
    for repetition in range(options.repetitions + 1):
        for name, run in contenders.items():
            start, cpu = time.perf_counter(), time.process_time()
            updates = run()
            seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
            if updates != options.updates:
                raise SystemExit(f"{name}: {updates} updates of {options.updates}")
            if repetition:
                results[name].append(
                    {
                        "steps": updates,
                        "steps_per_second": updates / seconds,
                        "cpu_seconds": {"chief": cpu},
                    }
                )
        if repetition:
            spec = limits.spec_of(limits.ONE, **bare)
            results[limits.ONE].append(runs.run_contender(limits.PROGRAM, spec, defaults=False))
    print(f"\n{table(results)}")
    runs.write_json(options.json, {**origin, "results": results})


if __name__ == "__main__":
    main()
