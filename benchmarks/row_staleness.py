"""How stale rows of split tables are, beside the staleness that is counted.

    python benchmarks/row_staleness.py

Every mini-batch names one row, whose gradient is -1, under SGD with a rate of 1: so the row is the
number of updates that were applied to it, and what a step reads of it the number that it knew. The
k-th update finds k - 1 before it. Over all N mini-batches, each a message, that is N (N - 1) / 2,
and what the steps did not know of these, by N, is how stale the row was in the mean. The steps'
readings are added up by a metric. A network beside it takes time, in which others send.

`threads` are those of one process, `processes` have a ps for each two; fetch and push at each
mini-batch. Rows may be fresher than is counted, as a step reads them without the lock, after its
fetch; they must not be staler.
"""

import argparse
import json
import sys

import runs

BATCH, WIDTH, ROWS = 64, 512, 1000
WARM = 100
"""Mini-batches of a first `fit`, of which the means are taken out."""
TIMEOUT_SECONDS = 900.0
KINDS = ("threads", "processes")


def contender(kind: str, workers: int, steps: int) -> dict:
    """Mean staleness, of the row and as it is counted."""
    import keras
    import numpy as np

    import tf_dsgd

    strategy = tf_dsgd.DownpourStrategy(
        tf_dsgd.LocalCluster(workers) if kind == "threads" else None,
        placement={"users/.*": tf_dsgd.Rows()},
    )
    with strategy.scope():
        ids, x = keras.Input((1,), dtype="int64"), keras.Input((WIDTH,))
        table = keras.layers.Embedding(ROWS, 1, embeddings_initializer="zeros", name="users")
        row = keras.layers.Flatten(name="row")(table(ids))
        hidden = keras.layers.Dense(WIDTH, "relu")(keras.layers.Dense(WIDTH, "relu")(x))
        model = keras.Model(
            [ids, x], {"row": row, "net": keras.layers.Dense(1, name="net")(hidden)}
        )
        known = keras.metrics.MeanMetricWrapper(lambda y, p: p, name="known", dtype="float64")
        model.compile(
            keras.optimizers.SGD(1.0),
            {"row": lambda y, p: -p, "net": "mse"},
            loss_weights={"row": 1.0, "net": 1e-4},
            metrics={"row": [known]},
        )
    random = np.random.default_rng(0)

    def fit(number: int) -> float:
        examples = number * BATCH
        inputs = [
            np.zeros([examples, 1], "int64"),
            random.normal(size=(examples, WIDTH)).astype("float32"),
        ]
        targets = {"row": np.zeros([examples, 1]), "net": np.zeros([examples, 1])}
        history = model.fit(inputs, targets, batch_size=BATCH, verbose=0).history
        return float(next(v[-1] for k, v in history.items() if k.endswith("known")))

    def counted() -> tuple[int, float]:
        staleness = strategy.staleness()
        return strategy.steps, staleness.mean * strategy.steps

    fit(WARM)
    before, total_before = counted()
    read = fit(steps)
    after, total = counted()
    row = float(table.get_weights()[0][0, 0])
    if after - before != steps or row != after:
        raise SystemExit(f"{after - before} mini-batches were counted, and the row is {row}.")
    applied = before + (steps - 1) / 2  # before the k-th, in the mean
    return {"counted": (total - total_before) / steps, "row": applied - read}


def main() -> None:
    if sys.argv[1:] and sys.argv[1] in KINDS:
        print(json.dumps(contender(sys.argv[1], *map(int, sys.argv[2:]))), flush=True)
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", default="1,2,4", help="with commas")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--json", help="where to write all single runs")
    options = parser.parse_args()
    rows, results = [], []
    for kind in KINDS:
        for workers in map(int, options.workers.split(",")):
            shards = str(max(1, workers // 2))
            launch = ("-m", "tf_dsgd.launch", "--workers", str(workers), "--ps", shards)
            command = [
                *(sys.executable, *(launch if kind == "processes" else ()), __file__),
                *(kind, str(workers), str(options.steps)),
            ]
            found = [runs.run_process(command, TIMEOUT_SECONDS) for _ in range(options.repetitions)]
            results.append({"kind": kind, "workers": workers, "runs": found})
            runs.write_json(options.json, {**runs.provenance(), "results": results})
            means = [runs.spread([one[of] for one in found], 2) for of in ("counted", "row")]
            rows.append([kind, str(workers), *means])
    print(runs.heading(runs.provenance()) + "\n")
    print(runs.table(["workers", "number", "staleness, as counted", "of the row"], rows))


if __name__ == "__main__":
    main()
