"""Makes the cluster of TF_CONFIG, then those of the arguments, and says how long it took.

Usage: connect.py '{"connect_timeout_seconds": 5}' [CLUSTER_SPEC ...]
"""

import json
import sys
import time

import tensorflow as tf

import tf_dsgd

start = time.monotonic()
try:
    tf_dsgd.DownpourStrategy(tf_dsgd.TFCluster(**json.loads(sys.argv[1])))
    print("CONNECTED", flush=True)
    for text in sys.argv[2:]:
        tf_dsgd.DownpourStrategy(tf_dsgd.TFCluster(tf.train.ClusterSpec(json.loads(text))))
finally:
    print("SECONDS", time.monotonic() - start, flush=True)
