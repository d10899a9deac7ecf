"""One contender of cluster_throughput.py, in processes of its own. Prints one line of JSON.

    python -m tf_dsgd.launch --workers 2 --ps 1 benchmarks/cluster_contenders.py \
        '{"kind": "downpour", "period": 20}'
    python benchmarks/cluster_contenders.py '{"kind": "parameter_server"}'   # needs tf_keras
    python benchmarks/cluster_contenders.py '{"kind": "averaging"}'          # needs torch

Every contender trains an epoch that is not timed first. The clock of ours stops when a weight has
been read after `fit`, and the steps counted are those that the shard had then applied; that of a
peer stops when all its processes are done. The peers read data that is easier than ours: those of
PyTorch take slices in order, those of tf_keras make their data on each worker.

Nothing of another environment is imported at the top: this file runs in each of them.
"""

import dataclasses
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time

import processor_time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

CLASSES = 10
PEER_WORKERS = 2
PREPARED_AFTER = 1100
"""Mini-batches after which workers have prepared a call with several rounds (docs/cluster.md)."""


@dataclasses.dataclass(frozen=True)
class Spec:
    """What to run."""

    kind: str = "downpour"
    """`downpour`: fit; `periodic`: fit by periodic averaging; `chief`: the chief's own time;
    `exchange`: a large model's fetch and push; `overlap`: its push while it computes;
    `meetings`: averages of a large model;
    `parameter_server`: tf_keras; `averaging`, `ddp`: PyTorch."""
    period: int = 20
    """`push_every` and `fetch_every`, or steps between two averagings."""
    periods: tuple[int, ...] = (1, 20)
    """Of `chief`, one after the other."""
    model: str = "mlp"  # of `downpour` and `periodic`, as in contenders.py
    jit_compile: bool = False
    steps_per_execution: int = 1
    pipelines: bool = False
    """Whether workers read the examples from files themselves, as those of the peers do."""
    batch_size: int = 64
    examples: int = 12_800
    epochs: int = 3
    parameters: int = 25_000_000
    variables: int = 150
    calls: int = 10
    """Of `exchange`: how often each function is called."""
    hidden: int = 0
    """Of `chief`: layers before the last one, of eight units, with two variables each."""


# -- ours: this process is the chief, and the launcher has started the others ----------------------


def timed_fit(strategy, model, epochs: int, **data) -> dict:
    """Steps applied, seconds, and the processor time of this process, after an untimed epoch."""
    from tf_dsgd.engine.timing import KINDS

    weight = model.trainable_variables[-1]
    strategy.engine.snapshot()  # from now on rounds are divided
    model.fit(**data, verbose=0)
    weight.numpy()
    steps, before = strategy.steps, strategy.engine.snapshot()
    pids = processor_time.of_cluster()
    cpu_before = processor_time.read(pids)
    cpu, start = time.process_time(), time.perf_counter()
    model.fit(**data, verbose=0, epochs=epochs)
    weight.numpy()
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    cpu_seconds = processor_time.spent(cpu_before, processor_time.read(pids))
    steps = strategy.steps - steps
    spent = strategy.engine.snapshot().since(before).spent.sum(0)
    return {
        "updates": int(strategy.updates),
        "worker_seconds": dict(zip(KINDS, spent.tolist(), strict=True)),
        "steps": steps,
        "seconds": seconds,
        "steps_per_second": steps / seconds,
        "chief_cpu_seconds_per_step": cpu / steps,
        "cpu_seconds": cpu_seconds,
        "staleness_mean": strategy.staleness().mean,
    }


def downpour(spec: Spec) -> dict:
    import tf_dsgd

    return model_fit(
        spec, tf_dsgd.DownpourStrategy(push_every=spec.period, fetch_every=spec.period)
    )


def periodic(spec: Spec) -> dict:
    import tf_dsgd

    return model_fit(spec, tf_dsgd.PeriodicAveragingStrategy(average_every=spec.period))


def model_fit(spec: Spec, strategy) -> dict:
    import contenders

    made = contenders.Spec(
        model=spec.model,
        batch_size=spec.batch_size,
        examples=spec.examples,
        steps_per_execution=spec.steps_per_execution,
        jit_compile=spec.jit_compile,
    )
    x, y = contenders.make_data(made)
    with strategy.scope():
        model = contenders.build_model(made)
    with tempfile.TemporaryDirectory() as directory:
        if spec.pipelines:
            data = {"x": from_files(strategy, x, y, spec.batch_size, directory)}
        else:
            data = {"x": x, "y": y, "batch_size": spec.batch_size}
        if spec.period == 1:
            epochs = 1 + PREPARED_AFTER // (spec.examples // spec.batch_size)
            model.fit(**data, verbose=0, epochs=epochs)
        result = timed_fit(strategy, model, spec.epochs, **data)
    return {**result, "workers": strategy.num_workers}


def from_files(strategy, x, y, batch_size: int, directory: str):
    """The examples as a dataset that each worker reads from a file of its own."""
    import contenders
    import tensorflow as tf

    records = contenders.records_of(x, y)
    for worker in range(strategy.num_workers):
        mine = records[worker :: strategy.num_workers]
        mine.tofile(os.path.join(directory, f"{worker}.bin"))
    sizes = [len(records[w :: strategy.num_workers]) for w in range(strategy.num_workers)]

    def dataset_fn(context):
        worker = context.input_pipeline_id
        path = os.path.join(directory, f"{worker}.bin")
        dataset = tf.data.FixedLengthRecordDataset(path, 4 * records.shape[1])
        dataset = dataset.apply(tf.data.experimental.assert_cardinality(sizes[worker]))
        return dataset.shuffle(1024).batch(batch_size).map(contenders.decode)

    return strategy.distribute_datasets_from_function(dataset_fn)


def chief(spec: Spec) -> dict:
    """The chief's time where workers have next to nothing to compute."""
    import keras
    import numpy as np

    import tf_dsgd

    random = np.random.default_rng(0)
    x = random.standard_normal((spec.examples, 16), dtype=np.float32)
    y = random.standard_normal((spec.examples, 1), dtype=np.float32)
    results = {}
    for period in spec.periods:
        strategy = tf_dsgd.DownpourStrategy(push_every=period, fetch_every=period)
        with strategy.scope():
            hidden = [keras.layers.Dense(8, "tanh") for _ in range(spec.hidden)]
            model = keras.Sequential([keras.Input((16,)), *hidden, keras.layers.Dense(1)])
            model.compile(keras.optimizers.SGD(1e-4), "mse")
        data = {"x": x, "y": y, "batch_size": spec.batch_size}
        prepared = PREPARED_AFTER + 20 * strategy.num_workers  # all call it by then
        model.fit(**data, verbose=0, epochs=1 + prepared * spec.batch_size // spec.examples)
        results[period] = timed_fit(strategy, model, spec.epochs, **data)
    return {"periods": results, "workers": strategy.num_workers}


def exchange(spec: Spec) -> dict:
    """Seconds of a fetch and of a push, beside functions that only move and assign the bytes.

    The five are called in turn.
    """
    import keras
    import numpy as np
    import tensorflow as tf

    import tf_dsgd

    strategy = tf_dsgd.DownpourStrategy(push_every=2, fetch_every=2)
    width = round((spec.parameters / spec.variables) ** 0.5)
    layers = [keras.layers.Dense(width, use_bias=False) for _ in range(spec.variables)]
    with strategy.scope():
        model = keras.Sequential([keras.Input((width,)), *layers])
        model.compile(keras.optimizers.SGD(1e-6), "mse")
    zeros = np.zeros([16, width], np.float32)  # whose gradients are zero: nothing overflows
    model.fit(zeros, zeros, batch_size=4, verbose=0)

    worker = strategy.engine.store.worker_devices[0]
    program = strategy.engine.program
    functions = {
        "fetch": program.fetch[0],
        "push": lambda: program.push[0](tf.constant(True)),
        **bare_functions(worker, strategy.shard_devices[0], width, spec.variables),
    }
    seconds = {name: [] for name in functions}
    with tf.device(worker):
        for function in functions.values():
            function()
        updates = strategy.updates
        for _ in range(spec.calls):
            for name, function in functions.items():
                start = time.perf_counter()
                function()
                seconds[name].append(time.perf_counter() - start)
    applied = strategy.updates - updates
    if applied != spec.calls:
        raise SystemExit(f"{spec.calls} pushes made {applied} updates")
    return {
        "bytes": 4 * width * width * spec.variables,
        "variables": len(model.trainable_variables),
        "seconds": {name: statistics.median(values) for name, values in seconds.items()},
        "all_seconds": seconds,
    }


def overlap(spec: Spec) -> dict:
    """A large model that sends at every step and fetches every tenth: in turns, and overlapping."""
    import keras
    import numpy as np

    import tf_dsgd

    width = round((spec.parameters / spec.variables) ** 0.5)
    data = np.zeros([spec.examples, width], np.float32)
    results = {}
    for name in ("in turns", "overlapping"):
        strategy = tf_dsgd.DownpourStrategy(push_every=1, fetch_every=10)
        rounds = strategy.engine.rounds
        rounds.overlaps = rounds.overlaps and name == "overlapping"
        with strategy.scope():
            layers = [keras.layers.Dense(width, use_bias=False) for _ in range(spec.variables)]
            model = keras.Sequential([keras.Input((width,)), *layers])
            model.compile(keras.optimizers.SGD(1e-6), "mse")
        fit = {"x": data, "y": data, "batch_size": spec.batch_size}
        results[name] = timed_fit(strategy, model, spec.epochs, **fit)
    return {"results": results}


def meetings(spec: Spec) -> dict:
    """A large model that is averaged at every step, so that workers do little else."""
    import keras
    import numpy as np

    import tf_dsgd

    width = round((spec.parameters / spec.variables) ** 0.5)
    data = np.zeros([4 * spec.examples, width], np.float32)
    strategy = tf_dsgd.PeriodicAveragingStrategy(average_every=1)
    with strategy.scope():
        layers = [keras.layers.Dense(width, use_bias=False) for _ in range(spec.variables)]
        model = keras.Sequential([keras.Input((width,)), *layers])
        model.compile(keras.optimizers.SGD(1e-6), "mse")
    result = timed_fit(strategy, model, spec.epochs, x=data, y=data, batch_size=4)
    return {**result, "workers": strategy.num_workers}


def bare_functions(worker: str, ps: str, width: int, count: int) -> dict:
    """The least that a fetch and a push of as many variables can do."""
    import tensorflow as tf

    def variables(device: str) -> list:
        with tf.device(device):
            return [tf.Variable(tf.zeros([width, width])) for _ in range(count)]

    here, there = variables(worker), variables(ps)

    @tf.function
    def read():
        for mine, theirs in zip(here, there, strict=True):
            mine.assign(theirs.read_value(), read_value=False)

    @tf.function
    def assign():
        for mine, theirs in zip(here, there, strict=True):
            theirs.assign(mine.read_value(), read_value=False)

    @tf.function
    def assign_add():
        for mine, theirs in zip(here, there, strict=True):
            theirs.assign_add(mine.read_value(), read_value=False)

    return {"bare read": read, "bare assign": assign, "bare assign_add": assign_add}


# -- tf_keras 2 on TensorFlow's ParameterServerStrategy --------------------------------------------


def free_address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def serve(cluster: dict, job: str, task: int) -> None:
    """A worker or ps process; one thread within an operation, as many as tf_dsgd.launch gives."""
    import tensorflow as tf

    threads = max(1, (os.cpu_count() or 1) // PEER_WORKERS)
    config = tf.compat.v1.ConfigProto(
        intra_op_parallelism_threads=threads, inter_op_parallelism_threads=4
    )
    tf.distribute.Server(
        tf.train.ClusterSpec(cluster), job_name=job, task_index=task, protocol="grpc", config=config
    ).join()


def parameter_server(spec: Spec) -> dict:
    cluster = {
        "worker": [free_address() for _ in range(PEER_WORKERS)],
        "ps": [free_address()],
        "chief": [free_address()],
    }
    servers = [
        subprocess.Popen(
            [sys.executable, __file__, "--serve", json.dumps([cluster, job, task])],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for job in ("worker", "ps")
        for task in range(len(cluster[job]))
    ]
    try:
        pids = {"chief": [os.getpid()], "ps": [], "workers": []}
        for server, job in zip(servers, ["worker"] * PEER_WORKERS + ["ps"], strict=True):
            pids["ps" if job == "ps" else "workers"].append(server.pid)
        return parameter_server_fit(spec, cluster, pids)
    finally:
        for server in servers:
            server.kill()
            server.wait()


def parameter_server_fit(spec: Spec, cluster: dict, pids: dict) -> dict:
    os.environ["TF_USE_LEGACY_KERAS"] = "1"
    import numpy as np
    import tensorflow as tf
    import tf_keras

    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec(cluster), rpc_layer="grpc", task_type="chief", task_id=0
    )
    strategy = tf.distribute.ParameterServerStrategy(resolver)
    random = np.random.default_rng(0)
    x = random.standard_normal((spec.examples, 784), dtype=np.float32)
    y = random.integers(0, CLASSES, size=spec.examples)
    layers = tf_keras.layers
    with strategy.scope():
        model = tf_keras.Sequential(
            [
                tf_keras.Input((784,)),
                layers.Dense(512, "relu"),
                layers.Dense(512, "relu"),
                layers.Dense(CLASSES),
            ]
        )
        model.compile(
            tf_keras.optimizers.SGD(0.01),
            tf_keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
            steps_per_execution=spec.steps_per_execution,
        )

    def dataset(_):
        data = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(spec.examples).repeat()
        return data.batch(spec.batch_size, drop_remainder=True).prefetch(4)

    ends = []  # of epochs; tf_keras waits for all workers before each
    steps = spec.examples // spec.batch_size
    cpu = []

    def note(*_):
        ends.append(time.perf_counter())
        cpu.append(processor_time.read(pids))

    model.fit(
        tf_keras.utils.experimental.DatasetCreator(dataset),
        epochs=1 + spec.epochs,
        steps_per_epoch=steps,
        verbose=0,
        callbacks=[tf_keras.callbacks.LambdaCallback(on_epoch_end=note)],
    )
    steps *= spec.epochs
    seconds = ends[-1] - ends[0]
    return {
        "steps": steps,
        "seconds": seconds,
        "steps_per_second": steps / seconds,
        "cpu_seconds": processor_time.spent(cpu[0], cpu[-1]),
    }


# -- PyTorch, two processes over gloo --------------------------------------------------------------


def torch_peer(spec: Spec) -> dict:
    import torch.multiprocessing as multiprocessing

    results = multiprocessing.get_context("spawn").SimpleQueue()
    multiprocessing.spawn(torch_worker, (spec, free_address(), results), PEER_WORKERS)
    return results.get()


def torch_worker(rank: int, spec: Spec, address: str, results) -> None:
    import torch
    from torch import distributed, nn

    torch.set_num_threads(max(1, (os.cpu_count() or 1) // PEER_WORKERS))
    distributed.init_process_group(
        "gloo", init_method=f"tcp://{address}", rank=rank, world_size=PEER_WORKERS
    )
    torch.manual_seed(0)
    network = nn.Sequential(
        *(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, CLASSES))
    )
    x = torch.randn(spec.examples, 784)[rank::PEER_WORKERS]
    y = torch.randint(0, CLASSES, (spec.examples,))[rank::PEER_WORKERS]
    model = nn.parallel.DistributedDataParallel(network) if spec.kind == "ddp" else network
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loss = nn.CrossEntropyLoss()
    correct = torch.zeros(())

    def average() -> None:
        flat = torch.cat([p.data.view(-1) for p in network.parameters()])
        distributed.all_reduce(flat)
        flat /= PEER_WORKERS
        at = 0
        for p in network.parameters():
            p.data.copy_(flat[at : at + p.numel()].view_as(p))
            at += p.numel()

    def train(steps: int) -> None:
        for step in range(steps):
            at = step % (len(x) // spec.batch_size) * spec.batch_size
            labels = y[at : at + spec.batch_size]
            optimizer.zero_grad()
            outputs = model(x[at : at + spec.batch_size])
            loss(outputs, labels).backward()
            optimizer.step()
            correct.add_((outputs.argmax(1) == labels).sum())
            if spec.kind == "averaging" and (step + 1) % spec.period == 0:
                average()
        distributed.barrier()

    steps = len(x) // spec.batch_size  # of an epoch, for one process
    train(steps)
    start, cpu = time.perf_counter(), time.process_time()
    train(spec.epochs * steps)
    seconds = time.perf_counter() - start
    total = torch.tensor(time.process_time() - cpu, dtype=torch.float64)
    distributed.all_reduce(total)
    steps *= spec.epochs * PEER_WORKERS
    if rank == 0:
        speed = {"steps": steps, "seconds": seconds, "steps_per_second": steps / seconds}
        results.put({**speed, "cpu_seconds": {"workers": float(total)}})
    distributed.destroy_process_group()


KINDS = {
    "downpour": downpour,
    "periodic": periodic,
    "meetings": meetings,
    "chief": chief,
    "exchange": exchange,
    "overlap": overlap,
    "parameter_server": parameter_server,
    "averaging": torch_peer,
    "ddp": torch_peer,
}


def main() -> None:
    if sys.argv[1] == "--serve":
        serve(*json.loads(sys.argv[2]))
    spec = Spec(**json.loads(sys.argv[1]))
    result = {"spec": dataclasses.asdict(spec), **KINDS[spec.kind](spec)}
    print(json.dumps(result), flush=True)
    if spec.kind == "parameter_server":
        os._exit(0)  # its coordinator's threads would wait for the servers that were ended


if __name__ == "__main__":
    main()
