"""DiLoCo between synchronous training and plain averaging.

    python benchmarks/reproduce/diloco.py

Douillard et al. (2023) train language models on 8 workers that meet every 500 steps: AdamW inside,
SGD with Nesterov momentum (rate 0.7, momentum 0.9) on the mean difference outside. That does as
well as synchronous training with 8 times the mini-batch, and better than plain averaging. Here the
task of teacher.py, at a very small scale: AdamW, 8 simulated workers, the same examples for all.
Synchronous training is plain Keras on the joint mini-batch.
"""

import driver  # isort: skip (finds the package)

import keras
import teacher

import tf_dsgd

WORKERS, PERIODS = 8, (4, 16, 64, 256)


def run(condition, seeds, rates, options) -> dict:
    strategy, batch_size, steps = None, teacher.BATCH, options.steps
    if condition["method"] == "synchronous":
        steps, batch_size = steps // WORKERS, batch_size * WORKERS
    else:
        outer = keras.optimizers.SGD(0.7, momentum=0.9, nesterov=True)
        strategy = tf_dsgd.PeriodicAveragingStrategy(
            teacher.simulated(WORKERS),
            average_every=condition["period"],
            optimizer_state="local",
            outer_optimizer=outer if condition["method"] == "DiLoCo" else None,
        )
    task = teacher.Task(seeds)
    return teacher.train(strategy, keras.optimizers.AdamW, rates, task, batch_size, steps)


STUDY = driver.Study(
    name="diloco",
    conditions=[
        {"period": 0, "method": "synchronous"},
        *(
            {"period": period, "method": method}
            for period in PERIODS
            for method in ("DiLoCo", "plain averaging")
        ),
    ],
    grid=lambda condition: (-10, -3),
    run=run,
    options={"steps": (16_384, 256)},
    seeds=8,
    together=8,
    chosen_by="loss",
)

if __name__ == "__main__":
    driver.main(STUDY, __doc__)
