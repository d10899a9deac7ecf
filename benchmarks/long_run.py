"""What grows with the number of mini-batches, of each way to train: memory, threads, files.

    python benchmarks/long_run.py --steps 100000
    python benchmarks/long_run.py --only 'processes: Downpour' --json FILE

A fault that comes once in ten thousand rounds, or a thread that each leaves behind, is seen by no
test. So each way trains a very small model, as fast as it can and undisturbed, for `--steps`
mini-batches; after each epoch of 2,000 memory, threads and files of all its processes are written
down. Of the second half of the epochs a line is fitted by least squares: what grows with 10,000
mini-batches. An error ends the way, and is shown; so does a count of updates that is not right.

Threads of one process, and processes of `tf_dsgd.launch`: two workers and, where there are
servers, a ps. `soak.py` is the same under faults, of one way at a time.
"""

import argparse
import json
import os
import subprocess
import sys
import time

import runs

STEPS_OF_EPOCH = 2_000
BATCH = 4
TIMEOUT_SECONDS = 3600.0
WORKERS, PS = 2, 1

EVERY_STEP = {"push_every": 1, "fetch_every": 1}
# A name to (strategy, its arguments).
WAYS: dict[str, tuple[str, dict]] = {
    "Downpour, periods of 1": ("DownpourStrategy", EVERY_STEP),
    "Downpour, periods of 20": ("DownpourStrategy", {"push_every": 20, "fetch_every": 20}),
    "Downpour, pushes 2, fetches 4": ("DownpourStrategy", {"push_every": 2, "fetch_every": 4}),
    "Downpour, bounded": ("DownpourStrategy", {**EVERY_STEP, "max_staleness": 2}),
    "Downpour, Threshold": ("DownpourStrategy", {**EVERY_STEP, "compression": "Threshold"}),
    "Downpour, workers read files": ("DownpourStrategy", {**EVERY_STEP, "pipelines": True}),
    "Downpour, split tables": ("DownpourStrategy", {**EVERY_STEP, "tables": True}),
    "softsync": ("SoftsyncStrategy", {"gradients_per_update": 2}),
    "averaging, every 1": ("PeriodicAveragingStrategy", {"average_every": 1}),
    "elastic averaging, every 1": ("ElasticAveragingStrategy", {"average_every": 1}),
    "Hogwild!": ("HogwildStrategy", {}),
    "compressed, no ps": ("CompressedAsyncStrategy", {"compression": "TopK"}),
}


def ways() -> dict[str, dict]:
    found = {}
    for place in ("threads", "processes"):
        for name, (strategy, arguments) in WAYS.items():
            spec = {"strategy": strategy, **arguments, "processes": place == "processes"}
            found[f"{place}: {name}"] = spec
    return found


# -- in a process of its own -----------------------------------------------------------------------


def resources() -> dict[str, list[list[float]]]:
    """By role, of each process: MB, threads, files."""
    import processor_time
    import psutil
    import soak

    found: dict[str, list[list[float]]] = {}
    for role, pids in processor_time.of_cluster().items():
        for process in map(psutil.Process, sorted(pids)):
            row = [round(value, 2) for value in soak.measured(process)]
            found.setdefault(role, []).append(row)
    return found


def data(tables: bool):
    import numpy as np

    random = np.random.default_rng(0)
    count = STEPS_OF_EPOCH * BATCH
    x = random.standard_normal((count, 4)).astype("float32")
    if tables:
        x = random.integers(0, 1000, (count, 4)).astype("int32")
    return x, random.standard_normal((count, 1)).astype("float32")


def make_model(tables: bool):
    import keras

    layers = keras.layers
    if tables:
        inputs = keras.Input((4,), dtype="int32")
        hidden = layers.Flatten()(layers.Embedding(1000, 4, name="table")(inputs))
    else:
        inputs = hidden = keras.Input((4,))
    hidden = layers.Dense(8, "relu")(hidden)
    return keras.Model(inputs, layers.Dense(1)(hidden))


def make_strategy(spec: dict):
    import tf_dsgd

    arguments = dict(spec)
    cluster = None if arguments.pop("processes") else tf_dsgd.LocalCluster(WORKERS)
    make = getattr(tf_dsgd, arguments.pop("strategy"))
    codecs = {"Threshold": (0.01,), "TopK": (0.1,)}
    if "compression" in arguments:
        name = arguments["compression"]
        arguments["compression"] = getattr(tf_dsgd.compression, name)(*codecs[name])
    if arguments.pop("tables", False):
        arguments["placement"] = {"table/.*": tf_dsgd.Rows()}
    arguments.pop("pipelines", None)
    return make(cluster, **arguments)


def train(spec: dict, steps: int) -> dict:
    """One way; a row of resources after each epoch."""
    import keras
    import tensorflow as tf

    tables = spec.get("tables", False)
    x, y = data(tables)
    strategy = make_strategy(spec)
    with strategy.scope():
        model = make_model(tables)
        model.compile(keras.optimizers.SGD(0.001), "mse")
    rows, seconds, began = [], [], time.perf_counter()

    def note(_epoch, _logs):
        model.optimizer.iterations.numpy()  # which waits for every update
        rows.append(resources())
        seconds.append(time.perf_counter() - began)

    given, options = (x, y), {"batch_size": BATCH}
    if spec.get("pipelines"):

        def pipeline(context: tf.distribute.InputContext) -> tf.data.Dataset:
            mine = tf.data.Dataset.from_tensor_slices((x, y))
            shard = mine.shard(context.num_input_pipelines, context.input_pipeline_id)
            return shard.batch(BATCH)

        given, options = (strategy.distribute_datasets_from_function(pipeline),), {"shuffle": False}
    after = keras.callbacks.LambdaCallback(on_epoch_end=note)
    epochs = -(-steps // STEPS_OF_EPOCH)
    history = model.fit(*given, epochs=epochs, verbose=0, callbacks=[after], **options)
    counted = int(model.optimizer.iterations.numpy())
    (loss,) = history.history["loss"][-1:]
    return {
        "steps": epochs * STEPS_OF_EPOCH,
        "iterations": counted,
        "updates": updates(spec, epochs),
        "loss": loss,
        "seconds": seconds,
        "rows": rows,
    }


def updates(spec: dict, epochs: int) -> tuple[int, int]:
    """How many `optimizer.iterations` may say, at least and at most."""
    steps = epochs * STEPS_OF_EPOCH
    if "average_every" in spec:  # those of a worker, on average
        return steps // WORKERS, steps // WORKERS
    least = steps // (spec.get("push_every", 1) * spec.get("gradients_per_update", 1))
    # At an epoch's end each worker may send what is less than a period's.
    parts = WORKERS * epochs if spec.get("push_every", 1) > 1 else 0
    return least, least + parts


# -- the table -------------------------------------------------------------------------------------


def grows(result: dict, role: str, measure: int) -> float:
    """What a role's processes gain with 10,000 mini-batches, each; over the second half."""
    import numpy as np

    series = np.array([np.mean([row[measure] for row in each[role]]) for each in result["rows"]])
    half = len(series) // 2 if len(series) > 3 else 0
    at = np.arange(half, len(series)) * STEPS_OF_EPOCH / 1e4
    return float(np.polyfit(at, series[half:], 1)[0])


def row_of(name: str, result: dict) -> list[str]:
    if "error" in result:
        return [name, f"**{result['error']}**", "", "", "", ""]
    roles = list(result["rows"][-1])
    least, most = result["updates"]
    if not least <= result["iterations"] <= most:
        wrong = f"**{result['iterations']} updates, not {least} to {most}**"
        return [name, wrong, "", "", "", ""]
    speed = result["steps"] / result["seconds"][-1]
    memory = ", ".join(f"{role} {1e3 * grows(result, role, 0):.0f}" for role in roles)
    threads = ", ".join(f"{role} {grows(result, role, 1):z.1f}" for role in roles)
    files = ", ".join(f"{role} {grows(result, role, 2):z.1f}" for role in roles)
    return [name, f"{result['steps']:,}", f"{speed:.0f}", memory, threads, files]


def table(record: dict) -> str:
    """Of all ways; KB, threads and files that 10,000 mini-batches add to each process of a role."""
    rows = [row_of(name, result) for name, result in record["ways"].items()]
    return runs.table(["", "mini-batches", "a second", "KB", "threads", "files"], rows)


def run(name: str, spec: dict, steps: int) -> dict:
    command = [sys.executable]
    if spec["processes"]:
        servers = 0 if spec["strategy"] == "CompressedAsyncStrategy" else PS
        command += ["-m", "tf_dsgd.launch", "--workers", str(WORKERS), "--ps", str(servers)]
    command += [str(runs.HERE / "long_run.py"), "--way", json.dumps([spec, steps])]
    try:
        return runs.run_process(command, TIMEOUT_SECONDS)
    except (SystemExit, subprocess.TimeoutExpired) as error:
        print(f"{name}: {error}", file=sys.stderr, flush=True)
        return {"error": str(error).strip().splitlines()[-1][:200]}


def main() -> None:
    if sys.argv[1:2] == ["--way"]:
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
        print(json.dumps(train(*json.loads(sys.argv[2]))), flush=True)
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100_000, help="mini-batches of each way")
    parser.add_argument("--only", default="", help="a regular expression of ways' names")
    parser.add_argument("--json", help="where to write all rows")
    options = parser.parse_args()
    record = {**runs.provenance(), "ways": {}}
    for name, spec in runs.chosen(ways(), options.only).items():
        print(f"  {name}", file=sys.stderr, flush=True)
        record["ways"][name] = run(name, spec, options.steps)
        runs.write_json(options.json, record)
    print(f"{runs.heading(record)}\n\n{table(record)}", flush=True)


if __name__ == "__main__":
    main()
