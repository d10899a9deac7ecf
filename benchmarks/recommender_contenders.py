"""One contender of recommender.py, in processes of its own. Prints one line of JSON.

    python benchmarks/recommender_contenders.py '{"kind": "split"}'
    python -m tf_dsgd.launch --workers 2 --ps 2 benchmarks/recommender_contenders.py '{}'
    python benchmarks/recommender_contenders.py '{"kind": "bare"}'
    python benchmarks/recommender_contenders.py '{"kind": "parameter_server"}'   # needs tf_keras

Ours takes arrays, shuffles them and sends mini-batches from the chief to the workers. Bare
TensorFlow and tf_keras's workers have theirs ready, which is easier; and so have ours of the kind
`ready`.
"""

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Iterator

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import cluster_contenders
import processor_time
import recommender_task as task

PS = 2


def ours(spec: task.Spec) -> dict:
    """`fit` under Downpour or half-synchronous, on the launcher's processes or on threads."""
    import keras

    import tf_dsgd

    launched = "TF_CONFIG" in os.environ
    cluster = None if launched else tf_dsgd.LocalCluster(spec.workers)
    rows = {
        "sparse": "lazy" if spec.optimizer == "adam" else "dense",
        "placement": None if spec.kind == "unsplit" else {"(users|items)/.*": tf_dsgd.Rows()},
    }
    if spec.kind == "half":
        strategy = tf_dsgd.PeriodicAveragingStrategy(cluster, average_every=spec.period, **rows)
    else:
        strategy = tf_dsgd.DownpourStrategy(
            cluster, push_every=spec.period, fetch_every=spec.period, **rows
        )
    with strategy.scope():
        model = task.build_model(keras, spec)
    meter = task.Meter(processor_time.of_cluster())
    steps = []

    class Steps(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            steps.append(strategy.steps)

    data = None
    if spec.kind == "ready":
        data = strategy.distribute_datasets_from_function(
            lambda context: ready(spec, spec.steps // context.num_input_pipelines)
        )
    if launched and spec.period == 1:  # as it trains from then on
        fit(keras, model, spec, None, data=data)
    fit(keras, model, spec, meter, Steps(), data=data)
    staleness = strategy.staleness()
    return {**meter.result(steps[-1] - steps[task.UNTIMED - 1]), "staleness_mean": staleness.mean}


def unread(spec: task.Spec) -> dict:
    """As `split`, but a step gets constants, and no row is read for it (prefetch.py)."""
    read_nothing()
    return ours(spec)


def read_nothing() -> None:
    """From here on rows of split tables are 0.05, whatever the tables have."""
    import tensorflow as tf

    from tf_dsgd.strategies.rows import reading

    def constants(tables, named):
        return [
            tf.fill(
                tf.concat([tf.shape(ids), table.shape.as_list()[1:]], 0),
                tf.constant(0.05, table.dtype),
            )
            for table, ids in zip(tables, named, strict=True)
        ]

    reading.from_shards = constants


def plain(spec: task.Spec) -> dict:
    """Keras's own `fit`."""
    import keras

    model, meter = task.build_model(keras, spec), task.Meter()
    return meter.result(spec.steps * fit(keras, model, spec, meter))


def fit(keras, model, spec: task.Spec, meter: task.Meter | None, *callbacks, data=None) -> int:
    """Trains on arrays, or the data that are given; gives how many epochs were timed.

    Without a meter none is, and it is for as many mini-batches as calls with several rounds need.
    """
    given = {"x": data, "shuffle": False}
    if data is None:
        x, y = task.make_data(spec)
        given = {"x": x, "y": y, "batch_size": task.BATCH}
    if meter is None:
        model.fit(**given, epochs=1 + cluster_contenders.PREPARED_AFTER // spec.steps, verbose=0)
        return 0
    timer = task.timer(keras, meter, spec.seconds)
    model.fit(**given, epochs=task.EPOCHS, verbose=0, callbacks=[*callbacks, timer])
    return timer.timed


def ready(spec: task.Spec, steps: int | None = None):
    """Whole mini-batches, shuffled: so many, or again and again."""
    import tensorflow as tf

    x, y = task.make_data(spec)
    batches = {name: ids.reshape(-1, task.BATCH) for name, ids in x.items()}
    dataset = tf.data.Dataset.from_tensor_slices((batches, y.reshape(-1, task.BATCH)))
    dataset = dataset.shuffle(spec.steps)
    return (dataset.repeat() if steps is None else dataset.take(steps)).prefetch(4)


# -- TensorFlow alone ------------------------------------------------------------------------------


def bare(spec: task.Spec) -> dict:
    """A loop over a function of `period` steps, which acts on the rows that it has read."""
    import bare_recommender

    iterator = iter(ready(spec))
    step = bare_recommender.make(spec)
    meter, calls = task.Meter(), 0
    for _ in range(max(1, spec.steps // spec.period)):
        step(iterator)
    import time

    meter.start()
    while time.perf_counter() - meter.started < spec.seconds:
        loss = step(iterator)
        calls += 1
    loss.numpy()
    meter.stop()
    return meter.result(calls * spec.period)


# -- tf_keras 2 on TensorFlow's ParameterServerStrategy --------------------------------------------


@contextlib.contextmanager
def servers(spec: task.Spec) -> Iterator[tuple[dict, processor_time.Pids]]:
    """Processes of workers and ps: their addresses, and their pids by role."""
    counts = {"worker": spec.workers, "ps": PS, "chief": 1}
    cluster = {
        job: [cluster_contenders.free_address() for _ in range(count)]
        for job, count in counts.items()
    }
    started: dict[str, list[subprocess.Popen]] = {"worker": [], "ps": []}
    try:
        for job, processes in started.items():
            for index in range(counts[job]):
                arguments = ["--serve", json.dumps([cluster, job, index])]
                command = [sys.executable, cluster_contenders.__file__, *arguments]
                quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
                processes.append(subprocess.Popen(command, **quiet))
        pids = {job: [process.pid for process in own] for job, own in started.items()}
        roles = {
            processor_time.CHIEF: [os.getpid()],
            processor_time.PS: pids["ps"],
            processor_time.WORKERS: pids["worker"],
        }
        yield cluster, roles
    finally:
        for process in (*started["worker"], *started["ps"]):
            process.kill()
            process.wait()


def parameter_server(spec: task.Spec) -> dict:
    with servers(spec) as (cluster, pids):
        os.environ["TF_USE_LEGACY_KERAS"] = "1"
        import tensorflow as tf
        import tf_keras

        distribute = tf.distribute
        resolver = distribute.cluster_resolver.SimpleClusterResolver(
            tf.train.ClusterSpec(cluster), rpc_layer="grpc", task_type="chief", task_id=0
        )
        partitioners = distribute.experimental.partitioners
        strategy = distribute.ParameterServerStrategy(
            resolver, partitioners.MinSizePartitioner(min_shard_bytes=256 << 10, max_shards=PS)
        )
        with strategy.scope():
            model = task.build_model(tf_keras, spec)
        meter = task.Meter(pids)
        timer = task.timer(tf_keras, meter, spec.seconds)
        model.fit(
            tf_keras.utils.experimental.DatasetCreator(lambda _: ready(spec)),
            epochs=task.EPOCHS,
            steps_per_epoch=spec.steps,
            verbose=0,
            callbacks=[timer],
        )
        return meter.result(spec.steps * timer.timed)


KINDS = {
    "split": ours,
    "unsplit": ours,
    "ready": ours,
    "half": ours,
    "unread": unread,
    "plain": plain,
    "bare": bare,
    "parameter_server": parameter_server,
}


def main() -> None:
    spec = task.Spec(**json.loads(sys.argv[1]))
    result = {"spec": dataclasses.asdict(spec), **KINDS[spec.kind](spec)}
    print(json.dumps(result), flush=True)
    if spec.kind == "parameter_server":
        os._exit(0)  # its coordinator's threads would wait for the servers that were ended


if __name__ == "__main__":
    main()
