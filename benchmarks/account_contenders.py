"""What `accounts.py` measures: one training, and the same with parts of it left out, in turns.

    python benchmarks/account_contenders.py '{"kind": "threads"}'
    python -m tf_dsgd.launch --workers 2 benchmarks/account_contenders.py '{"kind": "arrays"}'

All variants are models of one process, trained by turns, so that a slow moment of the machine hits
all alike. The first epoch of each traces its graphs and is not measured. Prints one line of JSON.
"""

import contextlib
import dataclasses
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import cluster_contenders
import contenders
import keras
import numpy as np
import processor_time
import tensorflow as tf

import tf_dsgd
from tf_dsgd.accumulators import Accumulator

FULL, STRIPPED = "full", "stripped"
ACCRUAL, METRICS, EXCHANGE, INPUT = "accrual", "metrics", "exchange", "input"
LEFT_OUT: dict[str, tuple[str, ...]] = {
    FULL: (),
    ACCRUAL: (ACCRUAL,),
    METRICS: (METRICS,),
    EXCHANGE: (EXCHANGE,),
    INPUT: (INPUT,),
    STRIPPED: (ACCRUAL, METRICS, EXCHANGE, INPUT),
}
"""The variants, and what each is without."""

NO_PERIOD = 100_000
"""So many steps between exchanges that there is one at the end of an epoch, and no other."""


@dataclasses.dataclass(frozen=True)
class Spec:
    """What to run."""

    kind: str = "threads"
    """`threads`: workers of this process; `arrays`: processes, to which the chief sends what it
    reads from arrays; `files`: processes that read files themselves."""
    period: int = 20
    steps_per_execution: int = 1
    batch_size: int = 64
    examples: int = 12_800
    epochs: int = 5
    """Of a turn."""
    turns: int = 1


Fit = Callable[[int], None]


@contextlib.contextmanager
def without_accrual() -> Iterator[None]:
    """Within, what is traced computes gradients, and adds them to no sum."""

    def nothing(_: Accumulator, gradient: Any, *__: Any) -> None:
        with tf.control_dependencies(tf.nest.flatten(gradient, expand_composites=True)):
            # Else TensorFlow would leave the gradient out, where nothing else needs it.
            tf.raw_ops.Assert(condition=tf.constant(True), data=[tf.constant(0)])

    add, put = Accumulator.add, Accumulator.put
    Accumulator.add, Accumulator.put = nothing, nothing  # type: ignore[method-assign]
    try:
        yield
    finally:
        Accumulator.add, Accumulator.put = add, put  # type: ignore[method-assign]


def repeated(batch: Any, spec: Spec, share: int = 1) -> tf.data.Dataset:
    """One mini-batch again and again: nothing is read, mixed or decoded."""
    count = spec.examples // spec.batch_size // share
    dataset = tf.data.Dataset.from_tensors(batch).repeat(count)
    return dataset.apply(tf.data.experimental.assert_cardinality(count))


def data_of(spec: Spec, left_out: tuple[str, ...], strategy: Any, folder: str) -> dict[str, Any]:
    """What `fit` is given."""
    x, y = contenders.make_data(contenders.Spec(batch_size=spec.batch_size, examples=spec.examples))
    batch = x[: spec.batch_size], y[: spec.batch_size].astype(np.int64)
    if spec.kind == "files":
        if INPUT in left_out:
            workers = strategy.num_workers
            return {
                "x": strategy.distribute_datasets_from_function(
                    lambda _: repeated(batch, spec, workers)
                )
            }
        return {"x": cluster_contenders.from_files(strategy, x, y, spec.batch_size, folder)}
    if INPUT in left_out:
        return {"x": repeated(batch, spec)}
    return {"x": x, "y": y, "batch_size": spec.batch_size}


def variant(spec: Spec, name: str, folder: str) -> tuple[Any, Fit]:
    """A strategy, and a function that trains its model for some epochs, until all is applied."""
    left_out = LEFT_OUT[name]
    period = NO_PERIOD if EXCHANGE in left_out else spec.period
    cluster = [tf_dsgd.LocalCluster(num_workers=2)] if spec.kind == "threads" else []
    strategy = tf_dsgd.DownpourStrategy(*cluster, push_every=period, fetch_every=period)
    with strategy.scope():
        model = contenders.build_model(contenders.Spec())
        model.compile(
            keras.optimizers.SGD(0.01),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=[] if METRICS in left_out else ["accuracy"],
            steps_per_execution=spec.steps_per_execution,
        )
    data = data_of(spec, left_out, strategy, folder)
    weight = model.trainable_variables[-1]

    def fit(epochs: int) -> None:
        model.fit(**data, epochs=epochs, verbose=0)
        weight.numpy()

    with without_accrual() if ACCRUAL in left_out else contextlib.nullcontext():
        fit(1)
    return strategy, fit


def measured(spec: Spec, strategy: Any, fit: Fit, pids: processor_time.Pids) -> dict[str, Any]:
    """One turn."""
    me, steps = os.getpid(), strategy.steps
    threads, before = processor_time.threads_of(me), processor_time.read(pids)
    main, start = time.thread_time(), time.perf_counter()
    fit(spec.epochs)
    seconds, main = time.perf_counter() - start, time.thread_time() - main
    cpu = processor_time.spent(before, processor_time.read(pids))
    kinds = processor_time.by_kind(threads, processor_time.threads_of(me))
    # Python's other threads have ended by now; TensorFlow's live on.
    others = sum(value for kind, value in kinds.items() if kind != processor_time.PYTHON)
    calling = main if spec.kind == "threads" else max(main, cpu[processor_time.CHIEF] - others)
    return {
        "steps": strategy.steps - steps,
        "seconds": seconds,
        "steps_per_second": (strategy.steps - steps) / seconds,
        "cpu_seconds": cpu,
        "python_seconds": calling,
        "kinds": {**kinds, processor_time.PYTHON: cpu[processor_time.CHIEF] - others},
    }


def run(spec: Spec) -> dict[str, Any]:
    with contextlib.ExitStack() as stack:
        made = {}
        for name in LEFT_OUT:
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            made[name] = variant(spec, name, folder)
        pids = processor_time.of_cluster()
        turns = [
            {name: measured(spec, *each, pids) for name, each in made.items()}
            for _ in range(spec.turns)
        ]
    return {"package": os.path.dirname(tf_dsgd.__file__), "turns": turns}


def main() -> None:
    spec = Spec(**json.loads(sys.argv[1]))
    print(json.dumps({"spec": dataclasses.asdict(spec), **run(spec)}), flush=True)


if __name__ == "__main__":
    main()
