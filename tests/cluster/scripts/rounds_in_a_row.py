"""Two workers whose calls have several rounds, and which are killed, one after the other.

A gradient of 1 in every weight counts mini-batches. Prints RESULT: weights, steps, the ledger, how
many calls had several rounds, and which killed workers were in one.
"""

import json
import threading

import keras
import numpy as np
import psutil

import tf_dsgd
from tf_dsgd.engine import in_a_row
from tf_dsgd.engine.remote import RemoteRounds

STEPS, BATCH, KILLED_AFTER = 3000, 2, (900, 1900)
in_a_row.PAYS_AFTER = 100

strategy = tf_dsgd.DownpourStrategy()
with strategy.scope():
    layer = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
    model = keras.Sequential([keras.Input((3,)), layer])
    mean = lambda _, out: keras.ops.mean(out, axis=-1)  # noqa: E731
    model.compile(keras.optimizers.SGD(1.0), mean, steps_per_execution=20)

scheduler, several, killed = strategy.engine.scheduler, [], []
whole = RemoteRounds._whole


def noted(self, program, messages):
    several.append(messages)
    return whole(self, program, messages)


RemoteRounds._whole = noted


def kill():
    """One that is in a call of several rounds, as soon as there is one."""
    workers = {
        process.environ()["TF_CONFIG"]: process
        for process in psutil.Process().parent().children()
        if '"type": "worker"' in process.environ().get("TF_CONFIG", "")
    }
    by_index = {json.loads(config)["task"]["index"]: p for config, p in workers.items()}
    while True:
        for task in scheduler.tasks:
            lease = task.open
            if lease is not None and lease.messages > 1 and lease.begun is not None:
                killed.append(lease.messages)
                by_index[task.index].kill()
                return


class Killing(keras.callbacks.Callback):
    begun = 0

    def on_train_batch_end(self, batch, logs=None):
        if self.begun < len(KILLED_AFTER) and batch >= KILLED_AFTER[self.begun]:
            self.begun += 1
            threading.Thread(target=kill, daemon=True).start()


x = np.ones((STEPS * BATCH, 3), "float32")
model.fit(x, x[:, :1], batch_size=BATCH, verbose=0, callbacks=[Killing()])
ledger = strategy.ledger()
result = {
    "weights": model.get_weights()[0].ravel().tolist(),
    "steps": strategy.steps,
    "applied": ledger.applied,
    "in_flight": ledger.in_flight,
    "calls": len(several),
    "several": sum(messages > 1 for messages in several),
    "killed": killed,
}
print("RESULT", json.dumps(result), flush=True)
