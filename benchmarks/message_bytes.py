"""What each codec makes of messages: bytes, and accuracy at equal steps; and bytes on the network.

    python benchmarks/message_bytes.py                    # simulated workers, in this process
    python -m tf_dsgd.launch --workers 2 --ps 1 benchmarks/message_bytes.py --epochs 2

A network 64-512-512-10 (relu) on scikit-learn's handwritten digits, SGD, Downpour with periods
of 4. In this process four simulated workers train it, for each codec from the same weights in the
same order, and the bytes of what `encode` gives are counted. On a cluster of processes the bytes
are those that the kernel has counted on the connections from workers to ps tasks (`ss`), less what
they are with messages of nothing: headers, calls, heartbeats.
"""

import argparse
import collections
import os
import re
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import psutil
import runs
import sklearn.datasets
import tensorflow as tf

import tf_dsgd
from tf_dsgd import compression
from tf_dsgd.algorithm import Codec

WORKERS, PERIOD, BATCH = 4, 4, 32
CODECS = {
    "none": Codec(),
    "Cast, bfloat16": compression.Cast("bfloat16"),
    "QSGD, 64 levels": compression.QSGD(64),
    "OneBit": compression.OneBit(),
    "EFSign": compression.EFSign(),
    "PowerSGD, rank 4": compression.PowerSGD(4),
    "PowerSGD, rank 1": compression.PowerSGD(1),
    "TopK, 1 %": compression.TopK(0.01),
    "TopK, 0.1 %": compression.TopK(0.001),
    "Threshold 0.01": compression.Threshold(0.01),
    "Threshold 0.01, entropy": compression.Threshold(0.01, entropy=True),
    "Threshold 0.1, entropy": compression.Threshold(0.1, entropy=True),
}


class Counted(Codec):
    """A codec, the bytes of whose messages are counted on the worker."""

    def __init__(self, codec: Codec):
        self.codec = codec
        self.repeatable = codec.repeatable
        self.held_back = codec.held_back

    @property
    def keeps(self):
        return (*self.codec.keeps, "bytes")

    def encode(self, worker, index, tensor):
        sent = self.codec.encode(worker, index, tensor)
        count = worker.cell("bytes", index, shape=[], dtype=tf.int64)
        for part in tf.nest.flatten(sent, expand_composites=True):
            count.assign_add(tf.size(part, tf.int64) * part.dtype.size)
        return sent

    def decode(self, place, index, sent):
        return self.codec.decode(place, index, sent)

    def encode_fetched(self, shard, index, value):
        return self.codec.encode_fetched(shard, index, value)

    def decode_fetched(self, worker, index, sent):
        return self.codec.decode_fetched(worker, index, sent)


def data():
    x, y = sklearn.datasets.load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(x))
    x, y = (x / 16).astype("float32")[order], y[order]
    return (x[:1440], y[:1440]), (x[1440:], y[1440:])


def train(cluster, codec, epochs, seed):
    """(the strategy, loss and accuracy on what was held out)."""
    keras.utils.set_random_seed(seed)
    strategy = tf_dsgd.DownpourStrategy(
        cluster, push_every=PERIOD, fetch_every=PERIOD, compression=codec
    )
    with strategy.scope():
        dense = [keras.layers.Dense(512, "relu"), keras.layers.Dense(512, "relu")]
        model = keras.Sequential([keras.Input((64,)), *dense, keras.layers.Dense(10)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.05), loss, metrics=["accuracy"])
    given, held_out = data()
    model.fit(*given, batch_size=BATCH, epochs=epochs, verbose=0)
    found = model.evaluate(*held_out, verbose=0, return_dict=True)
    return strategy, found["loss"], found["accuracy"]


def simulated(name, epochs, seeds):
    """A row: means over seeds."""
    rows = []
    for seed in range(seeds):
        cluster = tf_dsgd.SimulatedCluster(
            WORKERS, compute_seconds=tf_dsgd.LogNormal(1.0, 0.3), network_seconds=0.1, seed=seed
        )
        strategy, loss, accuracy = train(cluster, Counted(CODECS[name]), epochs, seed)
        cells = strategy.engine.store.kept.values()
        total = sum(int(copy) for kept in cells for copy in kept["bytes"].present())
        rows.append((total / strategy.ledger().sent, loss, accuracy))
    return np.array(rows)


def to_ps():
    """Bytes that the kernel has counted on connections from workers to ps tasks, by `ss`."""
    jobs = collections.defaultdict(set)
    for process in psutil.Process(os.getppid()).children():
        environment = process.environ()
        if "TF_CONFIG" in environment and process.pid != os.getpid():
            job = "ps" if '"type": "ps"' in environment["TF_CONFIG"] else "worker"
            for connection in process.net_connections("tcp"):
                if connection.raddr:
                    jobs[job].add((connection.laddr.port, connection.raddr.port))
    listed = subprocess.run(["ss", "-tniHO"], capture_output=True, text=True, check=True).stdout
    total = 0
    for line in listed.splitlines():
        ends = tuple(int(port) for port in re.findall(r":(\d+) ", f"{line} ")[:2])
        if ends in jobs["worker"] and ends[::-1] in jobs["ps"]:
            total += int((re.search(r"bytes_sent:(\d+)", line) or [0, 0])[1])
    return total


class Nothing(Codec):
    """Messages of zeros, which travel as nothing: what is left are headers and calls."""

    def encode(self, worker, index, tensor):
        return [tf.zeros([0], tf.float32)]

    def decode(self, place, index, sent):
        return tf.zeros_like(place.weights[index])


def on_cluster(codec, epochs):
    """Bytes a message, as the kernel counts them."""
    before = to_ps()
    strategy, _, _ = train(None, codec, epochs, seed=0)
    return (to_ps() - before) / strategy.ledger().sent


def main():
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", default="", help="a part of the codecs' names")
    arguments = parser.parse_args()
    names = [name for name in CODECS if arguments.only in name]
    print(runs.heading(runs.provenance()), end="\n\n")
    if "TF_CONFIG" in os.environ:
        print(
            "| codec | bytes a message on the network | of them the message's own |\n|---|---|---|"
        )
        least = on_cluster(Nothing(), arguments.epochs)
        print(f"| (an empty message) | {least:,.0f} | 0 |")
        for name in names:
            found = on_cluster(CODECS[name], arguments.epochs)
            print(f"| {name} | {found:,.0f} | {found - least:,.0f} |", flush=True)
        return
    print("| codec | bytes a message | times less | loss | accuracy |\n|---|---:|---:|---:|---|")
    dense = None
    for name in names:
        rows = simulated(name, arguments.epochs, arguments.seeds)
        size, loss, accuracy = rows.mean(0)
        dense = dense or size
        spread = f"{100 * np.ptp(rows[:, 2]) / 2:.1f}"
        ratio = f"{dense / size:.1f}"
        print(
            f"| {name} | {size:,.0f} | {ratio} | {loss:.3f} | {100 * accuracy:.1f} ± {spread} % |"
        )
        sys.stdout.flush()


if __name__ == "__main__":
    main()
