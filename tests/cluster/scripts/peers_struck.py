"""A chief whose workers send to one another, while they are struck.

Usage: peers_struck.py '[["kill", 1, 20], ["stop", 2, 25]]': what befalls which worker, when it has
sent so many messages. "sends" kills it between its sends of that message to two others; "gives"
kills, as it gives its model to another, whoever does so first. Trains on until all work again, and
asserts that each mini-batch counted once, in every copy. Prints RESULT, with what happened. With
"all" after that, it trains once more, and kills all at once.
"""

import json
import sys
import threading

import keras
import numpy as np
from faulty import UntilAllWorkAgain

import tf_dsgd
from tests import faults, helpers
from tests.algorithms import peers_bench as bench
from tf_dsgd.engine import carrier
from tf_dsgd.engine.wire import ClusterWire

BATCHES, TIMEOUT = 100, 5.0
HOW = {
    "kill": faults.fail_at,
    "stop": lambda m, step: faults.stop_at(m, step, seconds=60.0),
}


LEFT, KILLED = [], []
"""What is still to happen, and whom it happened to."""
SENT, CALLS = [], {}
"""Sends of who is to be killed by that; and each worker's last one."""


def strikes(what, m):
    LEFT.remove(what)
    KILLED.append(m)
    faults.task("worker", m).kill()


class Striking(ClusterWire):
    """Kills in the middle of what the wire does."""

    def _send(self, source, key, target):
        for how, m, number in list(LEFT):
            if how == "sends" and source[0] == m:
                SENT.append(target)
                if len(SENT) == 2 * number:
                    assert CALLS[m].wait(20.0)
                    strikes([how, m, number], m)
        CALLS[source[0]] = call = super()._send(source, key, target)
        return call

    def model(self, m):
        found = super().model(m)
        for what in [each for each in LEFT if each[0] == "gives"]:
            if threading.current_thread().name.startswith("tf_dsgd worker"):  # and not at a drain
                strikes(what, m)
        return found


class Until(UntilAllWorkAgain):
    """Until all of it has happened, too."""

    def missing(self):
        missing = super().missing()
        if not LEFT:
            return missing
        if missing is None:  # who came back needed no model of another's: once more
            faults.task("worker", 1).kill()
        return f"{LEFT} are to come"


class KillsAll(keras.callbacks.Callback):
    """Once some updates are in the workers' models alone."""

    def on_train_begin(self, logs=None):
        self.enough = strategy.updates + 5

    def on_train_batch_end(self, batch, logs=None):
        if strategy.updates >= self.enough:
            self.enough = float("inf")
            for m in range(strategy.num_workers):
                faults.task("worker", m).kill()


if __name__ == "__main__":
    asked = json.loads(sys.argv[1])
    script = [HOW[how](m, step) for how, m, step in asked if how in HOW]
    LEFT.extend(each for each in asked if each[0] not in HOW)
    carrier.ClusterWire = Striking
    strategy = tf_dsgd.CompressedAsyncStrategy(
        tf_dsgd.TFCluster(worker_timeout_seconds=TIMEOUT),
        compression=tf_dsgd.compression.TopK(1.0),  # which holds nothing back that could be lost
    )
    model = bench.linear(strategy)
    playing = faults.OnProcesses(strategy, script, until_lost=True)
    until = Until(strategy, playing)
    x, y = bench.dyadic(BATCHES)
    options = {"batch_size": bench.BATCH, "shuffle": False, "verbose": 0}
    model.fit(x, y, epochs=1000, callbacks=[playing, until], **options)
    wanted = -until.epochs * bench.gradients(x, y).sum(0)
    np.testing.assert_array_equal(model.get_weights()[0], wanted)
    bench.assert_copies_are_equal(strategy)
    helpers.assert_ledger_balances(strategy)
    assert strategy.steps == strategy.updates == until.epochs * BATCHES
    told = {
        "struck": sorted([fault.index, fault.stops] for fault in playing.struck),
        "killed": KILLED,
        "incarnations": list(strategy.engine.store.incarnations),
        "epochs": until.epochs,
        "steps": [worker.steps for worker in strategy.ledger().workers],
        "lost": strategy.engine.store.residuals_lost,
    }
    print("RESULT", json.dumps(told), flush=True)
    if sys.argv[2:] == ["all"]:
        model.fit(x, y, callbacks=[KillsAll()], **options)
