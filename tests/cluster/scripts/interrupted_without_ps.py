"""Ctrl-C while the chief waits for a ps that was stopped. Usage: interrupted_without_ps.py WHAT

WHAT: evaluate or read. Prints INTERRUPTED once KeyboardInterrupt was raised.
"""

import os
import signal
import sys
import threading

import keras
import numpy as np

import tf_dsgd
from tests import faults

with tf_dsgd.DownpourStrategy(tf_dsgd.TFCluster(worker_timeout_seconds=4.0)).scope():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
    model.compile("sgd", "mse")
data = (np.ones((8, 4), "float32"), np.ones((8, 3), "float32"))
model.fit(*data, verbose=0)
model.evaluate(*data, verbose=0)
try:
    faults.task("ps", 0).suspend()
    threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT)).start()
    if sys.argv[1] == "evaluate":
        model.evaluate(*data, verbose=0)
    else:
        model.get_weights()
except KeyboardInterrupt:
    print("INTERRUPTED", flush=True)
