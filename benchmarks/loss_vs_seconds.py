"""Loss against seconds, beside plain Keras, also where asynchrony loses.

    python benchmarks/loss_vs_seconds.py --json benchmarks/results/loss_vs_seconds.json

Tasks of ten classes with 64 inputs, labelled by a random teacher network. They differ in what a
stale gradient costs:

    moderate   plain SGD at a modest rate: workers' gradients are nearly those of one process
    steep      SGD with momentum 0.9 at a large rate: sums of stale gradients overshoot
    eight      as moderate, with eight workers and periods of 20, whatever the number of cores

The clock runs during training only: after every epoch it stops, the weights are read (which waits
for all updates) and the loss on 4,096 of the training examples is computed. Every contender runs in
a process of its own.
"""

import argparse
import dataclasses
import json
import os
import statistics
import sys
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import runs

PROGRAM = "loss_vs_seconds.py"

TASKS = {
    "moderate": {"rate": 0.05, "momentum": 0.0},
    "steep": {"rate": 0.1, "momentum": 0.9},
    "eight": {"rate": 0.05, "momentum": 0.0},
}


@dataclasses.dataclass(frozen=True)
class Spec:
    """One training run. No workers means plain Keras."""

    rate: float
    momentum: float
    workers: int = 0
    period: int = 1
    steps_per_execution: int = 1
    examples: int = 12_800
    epochs: int = 10


def contenders(task: str) -> dict[str, dict]:
    downpour = {
        f"Downpour, {count} workers, periods of {period}": {"workers": count, "period": period}
        for count, period in ([(8, 20)] if task == "eight" else [(2, 1), (2, 5), (2, 20)])
    }
    return {
        "plain fit": {},
        "plain fit, steps_per_execution=20": {"steps_per_execution": 20},
        **downpour,
    }


def train(spec: Spec) -> dict:
    """The loss after every epoch and the seconds of training up to there."""
    import contextlib

    import keras
    import numpy as np

    random = np.random.default_rng(0)
    x = random.standard_normal((spec.examples, 64), dtype=np.float32)
    hidden = np.maximum(x @ random.standard_normal((64, 64), dtype=np.float32) / 8.0, 0.0)
    y = np.argmax(hidden @ random.standard_normal((64, 10), dtype=np.float32), axis=1)

    scope = contextlib.nullcontext()
    if spec.workers:
        import tf_dsgd

        scope = tf_dsgd.DownpourStrategy(
            tf_dsgd.LocalCluster(num_workers=spec.workers),
            push_every=spec.period,
            fetch_every=spec.period,
        ).scope()
    keras.utils.set_random_seed(0)
    with scope:
        layers = [keras.layers.Dense(256, "relu"), keras.layers.Dense(256, "relu")]
        model = keras.Sequential([keras.Input((64,)), *layers, keras.layers.Dense(10)])
        model.compile(
            optimizer=keras.optimizers.SGD(spec.rate, momentum=spec.momentum),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            steps_per_execution=spec.steps_per_execution,
        )
    initial = model.get_weights()
    model.fit(x, y, batch_size=64, verbose=0)  # traces
    model.set_weights(initial)
    model.optimizer.learning_rate = spec.rate
    for variable in model.optimizer.variables:
        if "momentum" in variable.path:
            variable.assign(np.zeros(variable.shape, "float32"))

    seconds, curve = 0.0, []
    for _ in range(spec.epochs):
        start = time.perf_counter()
        model.fit(x, y, batch_size=64, verbose=0)
        model.get_weights()
        seconds += time.perf_counter() - start
        loss = float(model.evaluate(x[:4096], y[:4096], batch_size=1024, verbose=0))
        curve.append([seconds, loss])
    return {"curve": curve}


def loss_at(curve: list[list[float]], seconds: float) -> float | None:
    """The last loss measured by then."""
    reached = [loss for moment, loss in curve if moment <= seconds]
    return reached[-1] if reached else None


def format_loss(losses: list[float | None]) -> str:
    known = [loss for loss in losses if loss is not None]
    return f"{statistics.median(known):.3f}" if len(known) == len(losses) else "not yet"


def task_tables(results: dict[str, list[dict]], epochs: int) -> str:
    """Loss at equal times, and loss after equal numbers of mini-batches."""
    plain = statistics.median(run["curve"][-1][0] for run in results["plain fit"])
    moments = [plain * share for share in (0.1, 0.25, 0.5, 1.0)]
    by_seconds = [
        [name, *(format_loss([loss_at(run["curve"], t) for run in outcomes]) for t in moments)]
        for name, outcomes in results.items()
    ]
    chosen = sorted({1, max(1, epochs // 4), max(1, epochs // 2), epochs})
    by_epochs = [
        [name, *(format_loss([run["curve"][e - 1][1] for run in outcomes]) for e in chosen)]
        for name, outcomes in results.items()
    ]
    return "\n\n".join(
        [
            runs.table(["loss after", *(f"{moment:.1f} s" for moment in moments)], by_seconds),
            runs.table(["loss after", *(f"{e} epoch{'s'[: e > 1]}" for e in chosen)], by_epochs),
        ]
    )


def main() -> None:
    if len(sys.argv) == 2 and sys.argv[1].startswith("{"):
        print(json.dumps(train(Spec(**json.loads(sys.argv[1])))))
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tasks", default=",".join(TASKS))
    parser.add_argument("--only", default="", help="a regular expression of contenders' names")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--examples", type=int, default=12_800)
    parser.add_argument("--json", help="where to write all single runs")
    options = parser.parse_args()

    record = {**runs.provenance(), "tasks": {}}
    print(runs.heading(record))
    for task in options.tasks.split(","):
        if task not in TASKS:
            raise SystemExit(f"--tasks: no such task: {task!r}; there are {list(TASKS)}")
        common = {**TASKS[task], "examples": options.examples, "epochs": options.epochs}
        chosen = runs.chosen(contenders(task), options.only, "plain fit")
        specs = {name: {**common, **spec} for name, spec in chosen.items()}
        results = runs.interleaved(PROGRAM, specs, options.repetitions)
        record["tasks"][task] = results
        rule = f"SGD({common['rate']}, momentum={common['momentum']})"
        print(f"\n### {task}: {rule}\n\n{task_tables(results, options.epochs)}", flush=True)
        runs.write_json(options.json, record)


if __name__ == "__main__":
    main()
