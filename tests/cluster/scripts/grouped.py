"""A chief that trains replicas of two tasks each, one of whose tasks are struck.

Usage: grouped.py '[[task, stops], ...]', with a fault for each, one after another; prints a RESULT
line. That each example was applied once an epoch is asserted here.
"""

import json
import sys

import faulty
import numpy as np

import tf_dsgd
from tests import faults

EXAMPLES = 800
PARTS = tf_dsgd.ModelParallel({"seen|dense": 0, "dense_.*": 1}, microbatches=2)


def fault(task, stops, step):
    return faults.stop_at(task, step, seconds=60.0) if stops else faults.fail_at(task, step)


if __name__ == "__main__":
    cluster = tf_dsgd.TFCluster(worker_timeout_seconds=faulty.TIMEOUT)
    strategy = tf_dsgd.DownpourStrategy(cluster, model_parallel=PARTS, push_every=2, fetch_every=3)
    with strategy.scope():
        model = faults.seen_model(EXAMPLES, "sgd")
    x, y = faults.data(EXAMPLES)
    asked = enumerate(json.loads(sys.argv[1]))
    script = [fault(task, stops, 20 + 15 * i) for i, (task, stops) in asked]
    playing = faults.OnProcesses(strategy, script, until_lost=True)
    until = faulty.UntilAllWorkAgain(strategy, playing)
    history = model.fit(
        x, y, batch_size=faulty.BATCH, epochs=10_000, verbose=0, callbacks=[playing, until]
    )
    faults.assert_metrics_whole(history, y)
    steps = EXAMPLES // faulty.BATCH
    ledger = faults.assert_nothing_lost(strategy, model, until.epochs, steps)
    assert all(np.isfinite(w).all() for w in model.get_weights())
    result = {
        "expected": until.epochs * steps,
        "struck": sorted([fault.index, fault.stops] for fault in playing.struck),
        "incarnations": list(strategy.engine.store.incarnations),
        "steps": [worker.steps for worker in ledger.workers],
    }
    print("RESULT", json.dumps(result), flush=True)
