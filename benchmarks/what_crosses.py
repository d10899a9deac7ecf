"""Prints which tensors cross between a worker and the shards in one round, as TensorFlow sees it.

    python -m tf_dsgd.launch --workers 1 --ps 2 benchmarks/what_crosses.py

TensorFlow partitions the function of a round between the worker and the ps tasks and puts a Send
and a Recv at every edge that it cuts. This lists the Sends of its own partitioned graphs.
"""

import argparse

import keras
import numpy as np
import tensorflow as tf

import tf_dsgd
from tf_dsgd import _tf_prepared


def round_of(period, batch, tau):
    """A strategy that has trained a small network, and one round's batches."""
    strategy = tf_dsgd.DownpourStrategy(
        push_every=period,
        fetch_every=period,
        compression=tau and tf_dsgd.compression.Threshold(tau, entropy=True),
    )
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((784,)),
                keras.layers.Dense(512, "relu", name="hidden"),
                keras.layers.Dense(10, name="logits"),
            ]
        )
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adagrad(0.01), loss)
    x, y = np.zeros((period * batch, 784), "float32"), np.zeros(period * batch, "int64")
    model.fit(x, y, batch_size=batch, verbose=0)
    batches = tf.data.Dataset.from_tensor_slices((x, y)).batch(batch)
    iterator = iter(batches)
    variants = [tf.nest.flatten(iterator.get_next_as_optional(), True)[0] for _ in batches]
    return strategy, strategy.engine.program.step.packing.pack(tf.stack(variants))


def sends(graphs):
    """(from, to, type, operation) of every tensor that crosses; of control edges None as type."""
    for graph in graphs:
        nodes = {node.name: node for node in graph.node}
        for node in graph.node:
            if node.op != "_Send":
                continue
            ends = [node.attr[f"{end}_device"].s.decode() for end in ("send", "recv")]
            tasks = [e.split("/device")[0].replace("/replica:0", "").strip("/") for e in ends]
            source = node.input[0].split(":")[0]
            control = nodes[source].op == "Const"
            dtype = None if control else tf.as_dtype(node.attr["T"].type).name
            yield (*tasks, dtype, node.attr["tensor_name"].s.decode().split("_", 2)[-1])


def main():
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--period", type=int, default=20)
    parser.add_argument("--tau", type=float, help="the threshold of compressed messages")
    arguments = parser.parse_args()
    strategy, inputs = round_of(arguments.period, 64, arguments.tau)
    function = strategy.engine.program.round_on[0]
    graphs = _tf_prepared.partitions(function, strategy.engine.store.worker_devices[0], inputs)
    print("| from | to | type | operation |\n|---|---|---|---|")
    for sender, receiver, dtype, name in sorted(sends(graphs), key=lambda row: row[:2]):
        if "chief" not in sender + receiver and dtype is not None:
            print(f"| {sender} | {receiver} | {dtype} | {name.removeprefix('import/')} |")


if __name__ == "__main__":
    main()
