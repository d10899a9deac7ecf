"""Bounded staleness (SSP): error against virtual seconds, with and without a straggler.

    python benchmarks/reproduce/staleness_bound.py

Ho et al. (NIPS 2013): a worker may be ahead of the slowest by s clocks. s = 0 is bulk synchronous,
and every worker waits for the last one to end; without a bound nobody waits, and gradients may be
arbitrarily old. In between, the paper says, is the fastest convergence. Here the task of
teacher.py, SGD at constant rates, 8 simulated workers whose mini-batches take an exponentially
distributed time, 1 s in the mean; once one of them takes four times as long; and once there are
seven, the slow one left out. All train until the same second. `batches` counts the mini-batches
that were done by then, which is the last-executor effect alone.
"""

import driver  # isort: skip (finds the package)

import keras
import seeded
import side_by_side
import teacher

import tf_dsgd

WORKERS, SLOWER, BATCH = 8, 4.0, 16
BOUNDS = (0, 1, 4, 16, "none")
PARTS = 4


def cluster(straggler: str, seed: int = 1) -> tf_dsgd.SimulatedCluster:
    last = {
        "no": [tf_dsgd.Exponential(1.0)],
        "yes": [tf_dsgd.Exponential(SLOWER)],
        "left out": [],
    }
    times = [tf_dsgd.Exponential(1.0)] * (WORKERS - 1) + last[straggler]
    return tf_dsgd.SimulatedCluster(len(times), compute_seconds=times, seed=seed)


def run(condition, seeds, rates, options) -> dict:
    bound, straggler = condition["bound"], condition["straggler"]
    most = 2 * WORKERS * options.seconds
    trained, held = teacher.of_seeds(seeds, BATCH * most)
    study = seeded.Seeds(
        tf_dsgd.DownpourStrategy(
            local_rule="none", max_staleness=None if bound == "none" else bound
        ),
        lambda seed: cluster(straggler, seed),
        keras.optimizers.SGD,
        rates,
        seeded.mlp([teacher.STUDENT, teacher.CLASSES]),
        trained,
        BATCH,
    )
    each = []
    for seed in seeds:
        times = study.timetable(seed, most)
        times = times.until(options.seconds)
        pushed = [t for e, t in zip(times, times.seconds, strict=True) if e[1] == "push"]
        counts = [sum(t <= options.seconds * k / PARTS for t in pushed) for k in range(1, PARTS)]
        study.begin(seed)
        values = {"batches": [[float(len(pushed))]] * len(rates)}
        for k, part in enumerate(side_by_side.cut(study.entries(seed, times), counts), 1):
            study.go(part)
            at = seeded.judged(study.logits(held[seed][0]), held[seed][1])
            if k < PARTS:
                values[f"error_{k}"] = at["error"]
        each.append({**values, **at})
    return seeded.merged(each)


STUDY = driver.Study(
    name="staleness_bound",
    conditions=[
        *(
            {"straggler": straggler, "bound": bound}
            for straggler in ("no", "yes")
            for bound in BOUNDS
        ),
        *({"straggler": "left out", "bound": bound} for bound in (0, "none")),
    ],
    grid=lambda condition: (-7, 0),
    run=run,
    options={"seconds": (200, 10)},
    seeds=10,
    together=10,
)

if __name__ == "__main__":
    driver.main(STUDY, __doc__)
