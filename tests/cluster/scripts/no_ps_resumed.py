"""A chief whose workers hold the weights, one of which is killed in the middle of an epoch.

Usage: no_ps_resumed.py FOLDER. Started again it goes on from the checkpoint, and kills nobody.
Prints KILLS as it does; RESUMED, with the mini-batches that are done; and DONE, with all of them.
"""

import sys

import keras
import numpy as np

import tf_dsgd
from tests import faults

EXAMPLES, BATCH, EPOCHS = 800, 4, 3
STEPS = EXAMPLES // BATCH


class KillsAWorker(keras.callbacks.Callback):
    """After a quarter of the second epoch, unless training began there."""

    def __init__(self, strategy):
        super().__init__()
        self.strategy, self.first, self.epoch = strategy, None, None

    def on_epoch_begin(self, epoch, logs=None):
        if self.first is None and epoch:
            print("RESUMED", self.strategy.steps, flush=True)
        self.epoch = epoch
        self.first = epoch if self.first is None else self.first

    def on_train_batch_end(self, batch, logs=None):
        if (self.first, self.epoch, batch) == (0, 1, STEPS // 4):
            print("KILLS", flush=True)
            faults.task("worker", 1).kill()


if __name__ == "__main__":
    strategy = tf_dsgd.PeriodicAveragingStrategy(average_every=3, optimizer_state="local")
    with strategy.scope():
        model = faults.seen_model(EXAMPLES, keras.optimizers.SGD(0.02, momentum=0.5))
    x, y = faults.data(EXAMPLES)
    backup = tf_dsgd.callbacks.BackupAndRestore(sys.argv[1], save_freq=30)
    callbacks = [backup, KillsAWorker(strategy)]
    model.fit(x, y, batch_size=BATCH, epochs=EPOCHS, shuffle=False, verbose=0, callbacks=callbacks)
    faults.assert_nothing_lost(strategy, model, EPOCHS, STEPS)
    assert all(np.isfinite(w).all() for w in model.get_weights())
    print("DONE", strategy.steps, flush=True)
