"""Sandblaster beside Downpour after the same virtual seconds, with few replicas and with many.

    python benchmarks/reproduce/sandblaster_seconds.py

The task of teacher.py, of each seed its own data and first weights. A worker takes a second for 50
examples, a message 0.05 s in the mean; so seconds are those of a machine whose workers do nothing
else. Downpour sends each gradient, with Adagrad or a fixed rate on the shard; L-BFGS has no rate.
What counts is the held-out error after so many seconds, and a rate is chosen for them. The weights
are judged at the end of each epoch, where Downpour's workers meet: with 16 workers that takes two
or three seconds of twenty-eight. With 160 workers an epoch of 400 mini-batches would be little
else, so that control has epochs of five passes, and is judged as seldom. A run ends at an error of
26 %.
"""

import driver  # isort: skip (finds the package)

import functools

import keras
import numpy as np
import teacher

import tf_dsgd

BATCH, MESSAGE_SECONDS = 50, 0.05
FEW, MANY = 16, 160
METHODS = {
    "L-BFGS": (None, (0, 0)),
    "Adagrad": (keras.optimizers.Adagrad, (-7, -1)),
    "fixed rate": (keras.optimizers.SGD, (-8, 0)),
}
SECONDS = (40, 80, 160)
ENOUGH = 26.0
"""An error at which a run ends, and as which all below count: who came there is not compared."""


class Pace(keras.callbacks.Callback):
    """(virtual seconds, held-out error in per cent) at each epoch's end, until the time is over."""

    def __init__(self, strategy, x: np.ndarray, y: np.ndarray, seconds: float):
        super().__init__()
        self.strategy, self.x, self.y, self.end = strategy, x, y, seconds
        self.seen: list[tuple[float, float]] = []

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        judged = teacher.judge(np.array(self.model(self.x))[None], self.y[None])
        now = float(self.strategy.engine.clock())
        error = float(judged["error"][0])
        self.seen.append((now, error))
        if now >= self.end or error <= ENOUGH or not np.isfinite(judged["loss"][0]):
            self.model.stop_training = True


@functools.cache
def errors(method: str, workers: int, rate: float, seed: int, seconds: int) -> Pace:
    """One run, for so long."""
    keras.utils.clear_session()
    keras.utils.set_random_seed(seed)
    x, y = teacher.taught(seed)
    trained, held_out = slice(0, teacher.TRAINED), slice(teacher.TRAINED, None)
    cluster = tf_dsgd.SimulatedCluster(
        workers,
        compute_seconds=1.0,
        network_seconds=tf_dsgd.Exponential(MESSAGE_SECONDS),
        seed=seed,
    )
    optimizer, _ = METHODS[method]
    kind = tf_dsgd.DownpourStrategy if optimizer else tf_dsgd.SandblasterStrategy
    strategy = kind(cluster)
    layers = keras.layers
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((teacher.INPUTS,)),
                layers.Dense(teacher.STUDENT, "relu"),
                layers.Dense(teacher.CLASSES),
            ]
        )
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(loss=loss, **({"optimizer": optimizer(rate)} if optimizer else {}))
    pace = Pace(strategy, x[held_out], y[held_out], seconds)
    passes = 5 if workers > FEW and optimizer else 1
    model.fit(
        np.tile(x[trained], (passes, 1)),
        np.tile(y[trained], passes),
        batch_size=BATCH,
        epochs=1000,
        verbose=0,
        callbacks=[pace],
    )
    return pace


def run(condition, seeds, rates, options) -> dict:
    """The error of the last weights that were judged by then."""

    def error(rate: float, seed: int) -> float:
        longest = max(SECONDS) * options.per_cent // 100
        pace = errors(condition["method"], condition["replicas"], rate, seed, longest)
        by_then = condition["until"] * options.per_cent / 100
        untrained = 100.0 * (1 - 1 / teacher.CLASSES)
        found = next((e for at, e in reversed(pace.seen) if at <= by_then), untrained)
        return max(ENOUGH, found)

    return {"error": [[error(rate, seed) for seed in seeds] for rate in rates]}


STUDY = driver.Study(
    name="sandblaster_seconds",
    conditions=[
        {"method": method, "replicas": replicas, "until": seconds}
        for method in METHODS
        for replicas in (FEW, MANY)
        for seconds in SECONDS
    ],
    grid=lambda condition: METHODS[condition["method"]][1],
    run=run,
    options={"per_cent": (100, 20)},
    seeds=5,
)

if __name__ == "__main__":
    driver.main(STUDY, __doc__)
