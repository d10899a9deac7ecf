"""The distribution of staleness under n-softsync.

    python benchmarks/reproduce/softsync_staleness.py

Zhang et al. (IJCAI 2016) measured on 30 learners that the mean staleness of n-softsync is about n,
that it is above 2n with a probability below 1e-4, and that 1-softsync sees 0, 1 and 2 only. Here on
simulated workers, whose mini-batches all take a second, or an exponentially distributed time of a
second in the mean; messages take an exponentially distributed time of several means. Nothing is
learnt: staleness hangs on times alone. That its mean is about n is bookkeeping, as each message is
missed by as many others as there are, whatever the times: the tail is what is measured.
"""

import driver  # isort: skip (finds the package)

import numpy as np
import seeded
import setting

import tf_dsgd
from tf_dsgd.simulation.study import timetable

SPEEDS = {"one second": 1.0, "exponential": tf_dsgd.Exponential(1.0)}
NS, MESSAGES = (1, 15, 30), (0.01, 0.05, 0.2, 1.0)


def staleness(n: int, speed: str, message: float, seed: int, count: int) -> np.ndarray:
    """Of each message, in updates, as the shard counts it."""
    cluster = tf_dsgd.SimulatedCluster(
        setting.WORKERS,
        compute_seconds=SPEEDS[speed],
        network_seconds=tf_dsgd.Exponential(message),
        seed=seed,
    )
    exchange = setting.softsync(n, cluster, None).algorithm.exchange
    in_an_update, pushes = setting.WORKERS // n, 0
    read, found = dict.fromkeys(range(setting.WORKERS), 0), []
    for worker, action, *_ in timetable(cluster, exchange, count):
        updates = pushes // in_an_update
        if action == "fetch":
            read[worker] = updates
        elif action == "push":
            found.append(updates - read[worker])
            pushes += 1
    return np.array(found)


def run(condition, seeds, rates, options) -> dict:
    n, each = condition["n"], []
    for seed in seeds:
        taus = staleness(n, condition["mini-batch"], condition["message"], seed, options.messages)
        values = {"mean": taus.mean(), "largest": taus.max(), "above_2n": (taus > 2 * n).mean()}
        each.append({name: [[float(value)]] * len(rates) for name, value in values.items()})
    return seeded.merged(each)


STUDY = driver.Study(
    name="softsync_staleness",
    conditions=[
        {"n": n, "mini-batch": speed, "message": message}
        for n in NS
        for speed in SPEEDS
        for message in MESSAGES
    ],
    grid=lambda condition: (0, 0),
    run=run,
    options={"messages": (20_000, 600)},
    seeds=5,
    together=5,
    chosen_by="above_2n",
)

if __name__ == "__main__":
    driver.main(STUDY, __doc__)
