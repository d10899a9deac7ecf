"""The ps task dies while nothing trains; then what the strategy and the model hold is read.

Prints, for each way to read it, the error that this raises.
"""

import keras
import numpy as np
import psutil

import tf_dsgd

strategy = tf_dsgd.DownpourStrategy()
with strategy.scope():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.1), "mse")
model.fit(np.ones((8, 2)), np.ones((8, 1)), batch_size=2, verbose=0)
(ps,) = [
    process
    for process in psutil.Process().parent().children(recursive=True)
    if process.environ().get("TF_CONFIG", "").count('"type": "ps"')
]
ps.kill()
ps.wait(10)
weight = model.trainable_variables[0]
for name, read in {
    "weights": model.get_weights,
    "array": lambda: np.asarray(weight),
    "assign": lambda: weight.assign(np.zeros((2, 1))),
    "rate": lambda: float(model.optimizer.learning_rate.numpy()),
    "steps": lambda: strategy.steps,
    "updates": lambda: strategy.updates,
    "staleness": strategy.staleness,
    "ledger": strategy.ledger,
    "state": strategy.state,
}.items():
    try:
        read()
    except Exception as error:
        print("READ", name, type(error).__name__, error, flush=True)
