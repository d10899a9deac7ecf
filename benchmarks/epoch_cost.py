"""What an epoch costs beside its mini-batches, of the processor and by the clock.

    python benchmarks/epoch_cost.py
    python benchmarks/epoch_cost.py --kinds files --turns 20

One model makes the same number of mini-batches in one epoch and in several, in turns, each by a
`fit` of its own; the difference, by the epochs that the one has more, is what an epoch costs: a
drain, with a shorter last round, new iterators, the reset of metrics and their results, Keras's own
loop. A slow minute of the machine hits both. MLP 784-512-512-10, batch 64, SGD, Downpour with
periods of 20 and `steps_per_execution=20`.

`threads` are two workers of one process, `arrays` two processes and a ps, to which the chief sends
what it reads from arrays, `files` the same whose workers have pipelines of their own (of tensors:
no file is opened), `plain` Keras without a strategy.
"""

import argparse
import json
import sys
import time

import processor_time
import runs

SHORT = 40
"""Mini-batches of an epoch, where there are several: one round for each worker."""
EPOCHS = 10
BATCH, PERIOD = 64, 20
TIMEOUT_SECONDS = 900.0
KINDS = ("plain", "threads", "arrays", "files")
LAUNCH = ("-m", "tf_dsgd.launch", "--workers", "2", "--ps", "1")


def contender(kind: str, turns: int) -> dict:
    """Milliseconds of an epoch in each turn, by the clock and of each role's processors."""
    import contextlib

    import keras
    import numpy as np
    import tensorflow as tf

    import tf_dsgd

    strategy = None
    if kind != "plain":
        cluster = tf_dsgd.LocalCluster(2) if kind == "threads" else None
        strategy = tf_dsgd.DownpourStrategy(cluster, push_every=PERIOD, fetch_every=PERIOD)
    with contextlib.nullcontext() if strategy is None else strategy.scope():
        hidden = [keras.layers.Dense(512, "relu") for _ in range(2)]
        model = keras.Sequential([keras.Input((784,)), *hidden, keras.layers.Dense(10)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        sgd = keras.optimizers.SGD(0.01)
        model.compile(sgd, loss, metrics=["accuracy"], steps_per_execution=PERIOD)
    random = np.random.default_rng(0)
    x = random.normal(size=(SHORT * EPOCHS * BATCH, 784)).astype("float32")
    y = random.integers(10, size=len(x)).astype("int32")

    def data(batches: int) -> dict:
        if kind != "files":
            return {"x": x[: batches * BATCH], "y": y[: batches * BATCH], "batch_size": BATCH}

        def pipeline(context: tf.distribute.InputContext) -> tf.data.Dataset:
            few = tf.data.Dataset.from_tensor_slices((x[: SHORT * BATCH], y[: SHORT * BATCH]))
            return few.batch(BATCH).repeat().take(batches // context.num_input_pipelines)

        return {"x": strategy.distribute_datasets_from_function(pipeline)}

    several, one = data(SHORT), data(SHORT * EPOCHS)
    pids = processor_time.of_cluster()

    def spent(given: dict, epochs: int) -> dict[str, float]:
        before, began = processor_time.read(pids), time.perf_counter()
        model.fit(**given, epochs=epochs, shuffle=False, verbose=0)
        seconds = time.perf_counter() - began
        return {"clock": seconds, **processor_time.spent(before, processor_time.read(pids))}

    found = []
    for turn in range(turns + 2):  # all is traced, and prepared on both workers, in two
        first = spent(several, EPOCHS) if turn % 2 else spent(one, 1)
        second = spent(one, 1) if turn % 2 else spent(several, EPOCHS)
        many, single = (first, second) if turn % 2 else (second, first)
        if turn >= 2:
            found.append({k: 1e3 * (many[k] - single[k]) / (EPOCHS - 1) for k in many})
    if strategy is not None and strategy.steps != 2 * SHORT * EPOCHS * (turns + 2):
        raise SystemExit(f"{strategy.steps} mini-batches were counted")
    return {"kind": kind, "turns": found}


def roles_of(turns: list[dict]) -> list[str]:
    return [role for role in processor_time.ROLES if role in turns[0]]


def in_all(turns: list[dict]) -> list[float]:
    """Milliseconds of all processes, by turn."""
    return [sum(turn[role] for role in roles_of(turns)) for turn in turns]


def row(result: dict) -> list[str]:
    turns = result["turns"]
    roles = roles_of(turns)
    each = [runs.spread([turn[role] for turn in turns], 0) for role in roles]
    each += [""] * (len(processor_time.ROLES) - len(roles))
    return [
        result["kind"],
        runs.spread([turn["clock"] for turn in turns], 0),
        runs.spread(in_all(turns), 0),
        *each,
    ]


def table(results: list[dict]) -> str:
    """By kind."""
    roles = [f"of the {role}" for role in processor_time.ROLES]
    heads = ["an epoch's", "ms by the clock", "ms of processors", *roles]
    return runs.table(heads, [row(result) for result in results])


def main() -> None:
    if sys.argv[1:] and sys.argv[1] in KINDS:
        print(json.dumps(contender(sys.argv[1], int(sys.argv[2]))), flush=True)
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kinds", default=",".join(KINDS), help="with commas")
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--json", help="where to write all single turns")
    options = parser.parse_args()
    results = []
    for kind in options.kinds.split(","):
        if kind not in KINDS:
            parser.error(f"--kinds must be of {', '.join(KINDS)}. Received: {kind!r}.")
        launch = LAUNCH if kind in ("arrays", "files") else ()
        command = [sys.executable, *launch, __file__, kind, str(options.turns)]
        results.append(runs.run_process(command, TIMEOUT_SECONDS))
        runs.write_json(options.json, {**runs.provenance(), "results": results})
    print(f"{runs.heading(runs.provenance())}\n\n{table(results)}")


if __name__ == "__main__":
    main()
