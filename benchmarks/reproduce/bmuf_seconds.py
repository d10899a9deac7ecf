"""How many times as fast BMUF is as one worker, for equally many mini-batches.

    python benchmarks/reproduce/bmuf_seconds.py

Chen and Huo (ICASSP 2016) find an almost linear speed-up. Here the task of teacher.py, with
equally many mini-batches in all for every number of workers, on a virtual clock. A mini-batch takes
a second in the mean, and its time varies, by 30 % (log-normal) or as much as its mean
(exponential); a message 0.05 s in the mean. `worker_seconds` are those of a mini-batch: the virtual
seconds of the whole run, times the workers, by the mini-batches of all. One worker's, beside those
of several, are the share of a linear speed-up that these reach. What they lose is waiting, as an
average is due when the last has arrived. Accuracy after as many mini-batches is in bmuf.py.
"""

import driver  # isort: skip (finds the package)

import keras
import teacher

import tf_dsgd

WORKERS, PERIODS = (2, 4, 8, 16), (2, 8, 32)
TIMES = {
    "log-normal": tf_dsgd.LogNormal(1.0, sigma=0.3),
    "exponential": tf_dsgd.Exponential(1.0),
}
MESSAGE_SECONDS = 0.05


def train(condition, rate: float, seed: int, steps: int) -> dict[str, float]:
    """One run of a seed's own data, order, first weights and times."""
    keras.utils.clear_session()
    keras.utils.set_random_seed(seed)
    workers, period = condition["workers"], condition["period"] or 1
    strategy = tf_dsgd.PeriodicAveragingStrategy(
        tf_dsgd.SimulatedCluster(
            workers,
            compute_seconds=TIMES[condition["time"]],
            network_seconds=tf_dsgd.Exponential(MESSAGE_SECONDS if workers > 1 else 0.0),
            seed=seed,
        ),
        average_every=period,
        outer_optimizer=tf_dsgd.optimizers.BlockMomentum() if workers > 1 else None,
    )
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((teacher.INPUTS,)),
                keras.layers.Dense(teacher.STUDENT, "relu"),
                keras.layers.Dense(teacher.CLASSES),
            ]
        )
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(rate), loss, steps_per_execution=32)
    trained, held = teacher.of_seeds([seed], teacher.BATCH * steps)
    x, y = trained[seed]
    model.fit(x, y, batch_size=teacher.BATCH, shuffle=False, verbose=0)
    judged = teacher.judge(model.predict(held[seed][0], verbose=0)[None], held[seed][1][None])
    return {
        "worker_seconds": float(strategy.engine.clock()) * workers / strategy.steps,
        "error": float(judged["error"][0]),
    }


def run(condition, seeds, rates, options) -> dict:
    found = [[train(condition, rate, seed, options.steps) for seed in seeds] for rate in rates]
    return {name: [[each[name] for each in row] for row in found] for name in found[0][0]}


STUDY = driver.Study(
    name="bmuf_seconds",
    conditions=[
        {"workers": workers, "period": period, "time": time}
        for time in TIMES
        for workers, period in [(1, 0), *((m, p) for m in WORKERS for p in PERIODS)]
    ],
    grid=lambda condition: (-3, -3),  # by bmuf.py; of no influence on seconds
    run=run,
    options={"steps": (4_096, 128)},
    seeds=5,
    chosen_by="worker_seconds",
)

if __name__ == "__main__":
    driver.main(STUDY, __doc__)
